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
    """

    heads: int
    width: int
    axis: str | None


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
    """

    layers: tuple[Any, ...]
    page_table: jax.Array
    axes: tuple[str | None, ...] = dataclasses.field(metadata={"static": True})

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
        return self._replace_states(states, table)

    def with_slots(self, other: "PagedCache", slots: jax.Array, sharding: Sharding) -> "PagedCache":
        """Returns `other`, the cache of some slots, as part of this one; see `at_slots`."""
        batch, _ = batch_axes(slots.shape[0], sharding)
        pairs = zip(self.states, other.states, strict=True)
        states = [mine.put(new, slots, batch, sharding) for mine, new in pairs]
        return other._replace_states(states, self.page_table)

    def compact(self, start: jax.Array, path: jax.Array, sharding: Sharding) -> "PagedCache":
        """Moves the rows of an accepted path to contiguous positions.

        Args:
          start: int32 [B]; position of row 0 of the verified tree.
          path: int32 [B, R]; entry i is the row to move to position start + i.
        """
        rows = start[:, None] + jnp.arange(path.shape[1])

        def move(table, start, path, rows, *pools):
            source = paged.row_index(table, start[:, None] + path, self.page_size)
            destination = paged.row_index(table, rows, self.page_size)
            return tuple(paged.move_rows(pages, source, destination) for pages in pools)

        batch, pages = batch_axes(path.shape[0], sharding)
        stored = self._names(pages)
        moved = sharding.map(
            move, ((batch, None), (batch,), (batch, None), (batch, None), *stored), stored
        )(self.page_table, start, path, rows, *self.pools)
        return self._replace_pools(moved, self.page_table)

    def _names(self, pages: str | None) -> list[tuple[str | None, ...]]:
        """Returns the logical axes of each pool."""
        return [(axis, pages, None, None) for axis in self.axes]

    def _replace_pools(self, pools: Sequence[Rows], page_table: jax.Array) -> "PagedCache":
        return self._replace(iter(pools), iter(self.states), page_table)

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
    sharding: Sharding,
) -> PagedCache:
    """Returns an abstract paged cache.

    Filled with zeros, it is an empty cache: every page table entry refers to the scratch page.

    Args:
      specs: The `cache_spec` of each layer's attention, a pytree of `CacheArray`s or a
        `RecurrentSpec`.
      quantized: Store a scale for each row of `dtype`; scales are sharded like their rows.
    """
    batch_name, pages_name = batch_axes(batch, sharding)

    def build(spec: CacheArray | RecurrentSpec) -> Rows | RecurrentState:
        if isinstance(spec, RecurrentSpec):
            return spec.abstract(batch, batch_name, sharding)
        names = (spec.axis, pages_name, None, None)
        rows = sharding.abstract((spec.heads, num_pages, page_size, spec.width), names, dtype)
        if not quantized:
            return rows
        scales = (spec.heads, num_pages, 1, page_size)
        return Quantized(rows, sharding.abstract(scales, names, jnp.float32))

    table = sharding.abstract((batch, pages_per_sequence), (batch_name, None), jnp.int32)
    leaves = jax.tree.leaves(tuple(specs))
    axes = tuple(spec.axis for spec in leaves if isinstance(spec, CacheArray))
    return PagedCache(jax.tree.map(build, tuple(specs)), table, axes)


def _is_state(node: Any) -> bool:
    """Returns whether a node of `PagedCache.layers` is recurrent state, itself a pytree."""
    return isinstance(node, RecurrentState | PendingState)


def _is_leaf(node: Any) -> bool:
    """Returns whether a node of `PagedCache.layers` is recurrent state or a quantized pool."""
    return _is_state(node) or isinstance(node, Quantized)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StaticCache:
    """Contiguous key/value cache: arrays [B, K, L, H] of keys and of values for each layer."""

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]

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
    rows = sharding.abstract((batch, num_kv_heads, capacity, head_dim), names, dtype)
    return StaticCache((rows,) * num_layers, (rows,) * num_layers)
