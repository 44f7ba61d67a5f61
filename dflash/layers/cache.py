"""Caches: pages and recurrent state of targets, static arrays of bidirectional drafters.

No cache stores its length: the decode state counts the committed tokens of each sequence. Rows past
that count are stale and are overwritten later, so nothing is ever cropped. Recurrent state has no
rows; it advances by committed rows only.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dflash.kernels import paged_attention as paged
from dflash.kernels.quantized import Quantized, Rows
from dflash.layers.recurrent_state import PendingState, RecurrentSpec, RecurrentState
from dflash.parallel.sharding import Sharding

# Largest number of rows in a tile; accelerators copy whole tiles.
SLOT_TILE = 32


@dataclasses.dataclass(frozen=True)
class CacheArray:
    """Specification of an array that a layer caches for each position: [heads, width].

    Attributes:
      heads: Rows per position; 1 if all query heads share a row.
      width: Elements per row.
      axis: Logical axis of the heads, which decides how they are sharded; None if they are not.
      window: Positions up to its own that a row of the layer sees; None for all.
    """

    heads: int
    width: int
    axis: str | None
    window: int | None = None


@dataclasses.dataclass(frozen=True)
class Ring:
    """Pages that each slot owns permanently for the layers with a window, and uses in turn.

    Attributes:
      pages: Pages of each slot; the rows that a call reads or writes must fit.
      num_pages: Pages of all slots together, with a scratch page for each data replica.
    """

    pages: int
    num_pages: int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PagedCache:
    """Cache of all layers: pages, with the page table of each sequence, and recurrent state.

    Page indices count within a device's own shard of the pool, so an index never refers to another
    device. Page 0 of each shard is scratch: rows of sequences without pages are written there.

    Attributes:
      layers: One pytree per layer: its attention's `cache_spec`, with each `CacheArray` replaced by
        a pool of pages [heads, P, S, width], a plain array or `Quantized`; or the layer's
        `RecurrentState` of the B sequences. After a verification, the latter is a `PendingState`
        until `commit`.
      page_table: int32 [B, M].
      axes: Logical axis of the heads of each pool, in the order of `pools`.
      slots: int32 [B]; slot of each sequence within its replica, which owns a ring. None if all
        layers use the pages of the page table.
      ring_pages: Pages of a ring; 0 without rings.
      in_ring: Whether each layer uses the rings.
    """

    layers: tuple[Any, ...]
    page_table: jax.Array
    axes: tuple[str | None, ...] = dataclasses.field(metadata={"static": True})
    slots: jax.Array | None = None
    ring_pages: int = dataclasses.field(default=0, metadata={"static": True})
    in_ring: tuple[bool, ...] = dataclasses.field(default=(), metadata={"static": True})

    @property
    def pools(self) -> list[Rows]:
        """Page pools of all layers."""
        leaves = jax.tree.leaves(self.layers, is_leaf=_is_leaf)
        return [leaf for leaf in leaves if not _is_state(leaf)]

    @property
    def page_size(self) -> int:
        """Rows per page."""
        return self.pools[0].shape[2]

    @property
    def tables(self) -> list[jax.Array]:
        """Page table of each layer, int32 [B, M].

        In a ring, position p is in page (p // S) mod the ring's pages, if the page table has a page
        for it.
        """
        if self.slots is None:
            return [self.page_table] * len(self.layers)
        turn = jnp.arange(self.page_table.shape[1], dtype=jnp.int32) % self.ring_pages
        ring_page = 1 + self.slots[:, None] * self.ring_pages + turn
        ring = jnp.where(self.page_table > 0, ring_page, 0)
        return [ring if is_ring else self.page_table for is_ring in self.in_ring]

    @property
    def states(self) -> list[RecurrentState | PendingState]:
        """Recurrent state of the layers that have one."""
        return list(filter(_is_state, jax.tree.leaves(self.layers, is_leaf=_is_leaf)))

    def commit(
        self, start: jax.Array, count: jax.Array, path: jax.Array | None, sharding: Sharding
    ) -> "PagedCache":
        """Returns the cache after the accepted rows of a verified block.

        Args:
          start: int32 [B]; position of row 0 of the block.
          count: int32 [B]; number of accepted rows.
          path: int32 [B, R]; row of the block at each depth of the accepted path. None is a chain,
            whose rows of pages are in place already.
        """
        cache = self if path is None else self.compact(start, path, sharding)
        batch, _ = batch_axes(count.shape[0], sharding)
        states = [state.commit(count, path, batch, sharding) for state in self.states]
        return cache._replace_states(states, self.page_table)

    def at_slots(
        self, slots: jax.Array, fresh: jax.Array, table: jax.Array, sharding: Sharding
    ) -> "PagedCache":
        """Returns the cache of the sequences in some slots.

        Args:
          slots: int32 [n]; each counts within its device's shard of the slots.
          fresh: bool [n]; sequences that begin, whose recurrent state is zero.
          table: int32 [n, M]; their page table.
        """
        batch, _ = batch_axes(slots.shape[0], sharding)
        states = [state.take(slots, fresh, batch, sharding) for state in self.states]
        owners = None if self.slots is None else slots
        return dataclasses.replace(self._replace_states(states, table), slots=owners)

    def with_slots(self, other: "PagedCache", slots: jax.Array, sharding: Sharding) -> "PagedCache":
        """Returns `other`, the cache of some slots, as part of this one; see `at_slots`."""
        batch, _ = batch_axes(slots.shape[0], sharding)
        pairs = zip(self.states, other.states, strict=True)
        states = [state.put(new, slots, batch, sharding) for state, new in pairs]
        return dataclasses.replace(other._replace_states(states, self.page_table), slots=self.slots)

    def compact(self, start: jax.Array, path: jax.Array, sharding: Sharding) -> "PagedCache":
        """Moves the rows of an accepted path to contiguous positions.

        Args:
          start: int32 [B]; position of row 0 of the verified tree.
          path: int32 [B, R]; entry i is the row to move to position start + i.
        """
        rows = start[:, None] + jnp.arange(path.shape[1])
        layer_tables = self.tables
        in_use = list({id(table): table for table in layer_tables}.values())
        # Index of the table of each pool; all pools of a layer have the same one.
        table_of = [
            next(i for i, used in enumerate(in_use) if used is table)
            for table, layer in zip(layer_tables, self.layers, strict=True)
            for leaf in jax.tree.leaves(layer, is_leaf=_is_leaf)
            if not _is_state(leaf)
        ]

        def move(start, path, rows, *arrays):
            tables, pools = arrays[: len(in_use)], arrays[len(in_use) :]
            sources = [
                paged.row_index(table, start[:, None] + path, self.page_size) for table in tables
            ]
            destinations = [paged.row_index(table, rows, self.page_size) for table in tables]
            return tuple(
                paged.move_rows(pages, sources[i], destinations[i])
                for pages, i in zip(pools, table_of, strict=True)
            )

        batch, pages = batch_axes(path.shape[0], sharding)
        stored = [(axis, pages, None, None) for axis in self.axes]
        tables = [(batch, None)] * len(in_use)
        moved = sharding.map(
            move, ((batch,), (batch, None), (batch, None), *tables, *stored), stored
        )(start, path, rows, *in_use, *self.pools)
        return self._replace(iter(moved), iter(self.states), self.page_table)

    def _replace_states(self, states, page_table: jax.Array) -> "PagedCache":
        return self._replace(iter(self.pools), iter(states), page_table)

    def _replace(self, pools, states, page_table: jax.Array) -> "PagedCache":
        layers = jax.tree.map(
            lambda leaf: next(states if _is_state(leaf) else pools), self.layers, is_leaf=_is_leaf
        )
        return dataclasses.replace(self, layers=layers, page_table=page_table)


def batch_axes(batch: int, sharding: Sharding) -> tuple[str | None, str | None]:
    """Returns the logical axes of the batch and page dimensions for a batch of `batch` sequences.

    If the batch does not divide over the data replicas, both axes are None, and every replica
    computes the whole batch.
    """
    return ("batch", "pages") if batch % sharding.size("batch") == 0 else (None, None)


def paged_cache(
    specs: Sequence[Any],
    *,
    batch: int,
    pages_per_sequence: int,
    num_pages: int,
    page_size: int,
    dtype: jnp.dtype,
    quantized: bool = False,
    ring: Ring | None = None,
    sharding: Sharding,
) -> PagedCache:
    """Returns an abstract paged cache.

    Filled with zeros, it is an empty cache: every page table entry refers to the scratch page.

    Args:
      specs: The `cache_spec` of each layer's attention, a pytree of `CacheArray`s or a
        `RecurrentSpec`.
      quantized: Store a scale for each row of `dtype`; scales are sharded like their rows.
      ring: Pages of the layers with a window; None if they use those of the page table.
    """
    batch_name, pages_name = batch_axes(batch, sharding)
    stored = dtype if quantized else _stored_dtype(dtype, sharding)

    def build(spec: CacheArray | RecurrentSpec) -> Rows | RecurrentState:
        if isinstance(spec, RecurrentSpec):
            return spec.abstract(batch, batch_name, sharding)
        names = (spec.axis, pages_name, None, None)
        count = num_pages if ring is None or spec.window is None else ring.num_pages
        rows = sharding.abstract((spec.heads, count, page_size, spec.width), names, stored)
        if not quantized:
            return rows
        scales = (spec.heads, count, 1, page_size)
        return Quantized(rows, sharding.abstract(scales, names, jnp.float32))

    table = sharding.abstract((batch, pages_per_sequence), (batch_name, None), jnp.int32)
    leaves = jax.tree.leaves(tuple(specs))
    axes = tuple(spec.axis for spec in leaves if isinstance(spec, CacheArray))
    layers = jax.tree.map(build, tuple(specs))
    if ring is None:
        return PagedCache(layers, table, axes)
    slots = sharding.abstract((batch,), (batch_name,), jnp.int32)
    in_ring = tuple(window_of(spec) is not None for spec in specs)
    return PagedCache(layers, table, axes, slots, ring.pages, in_ring)


def _stored_dtype(dtype: jnp.dtype, sharding: Sharding) -> jnp.dtype:
    """Returns the dtype in which a cache holds values of `dtype`: at least float32 on a CPU.

    XLA on a CPU writes rows to an array of bfloat16 by converting all of it to float32 and back.
    """
    return jnp.promote_types(dtype, jnp.float32) if sharding.platform == "cpu" else dtype


def window_of(spec: Any) -> int | None:
    """Returns the window of a layer, given its `cache_spec`; None if it sees all positions."""
    arrays = [leaf for leaf in jax.tree.leaves(spec) if isinstance(leaf, CacheArray)]
    return arrays[0].window if arrays else None


def _is_state(node: Any) -> bool:
    return isinstance(node, RecurrentState | PendingState)


def _is_leaf(node: Any) -> bool:
    return _is_state(node) or isinstance(node, Quantized)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StaticCache:
    """Contiguous key/value cache: arrays [B, K, L, H] of keys and of values for each layer."""

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]

    @property
    def by_layer(self) -> list[tuple[jax.Array, jax.Array]]:
        """Keys and values of each layer."""
        return list(zip(self.keys, self.values, strict=True))

    def write(self, position: jax.Array, keys, values) -> "StaticCache":
        """Writes each layer's new rows [B, T, K, H], starting at position[b] of sequence b."""
        store = jax.vmap(_write_rows)
        return StaticCache(
            tuple(store(old, new, position) for old, new in zip(self.keys, keys, strict=True)),
            tuple(store(old, new, position) for old, new in zip(self.values, values, strict=True)),
        )

    def read_rows(self, sequence: jax.Array, start: jax.Array, count: int) -> "StaticCache":
        """Returns each layer's rows [K, count, H] of one sequence, starting at position `start`."""

        def read(leaf):
            _, heads, _, width = leaf.shape
            where = (sequence, jnp.int32(0), start, jnp.int32(0))
            return jax.lax.dynamic_slice(leaf, where, (1, heads, count, width))[0]

        return jax.tree.map(read, self)

    def write_rows(
        self, sequence: jax.Array, start: jax.Array, rows: "StaticCache"
    ) -> "StaticCache":
        """Writes rows, in the form that `read_rows` returns, starting at position `start`."""
        where = (sequence, jnp.int32(0), start, jnp.int32(0))
        return jax.tree.map(
            lambda leaf, new: jax.lax.dynamic_update_slice(leaf, new[None], where), self, rows
        )


def _write_rows(cache: jax.Array, rows: jax.Array, position: jax.Array) -> jax.Array:
    """Writes rows [T, K, H] at `position` of one sequence's cache [K, L, H]."""
    return jax.lax.dynamic_update_slice_in_dim(
        cache, rows.swapaxes(0, 1).astype(cache.dtype), position, axis=1
    )


def static_cache(
    *,
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
    batch: int,
    capacity: int,
    dtype: jnp.dtype,
    sharding: Sharding,
    tile: int = SLOT_TILE,
) -> StaticCache:
    """Returns an abstract cache; `capacity` is rounded up to a multiple of `tile` positions."""
    batch_name, _ = batch_axes(batch, sharding)
    names = (batch_name, "kv_heads", None, None)
    capacity += -capacity % tile
    shape = (batch, num_kv_heads, capacity, head_dim)
    rows = sharding.abstract(shape, names, _stored_dtype(dtype, sharding))
    return StaticCache((rows,) * num_layers, (rows,) * num_layers)
