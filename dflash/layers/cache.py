"""KV caches: pages for the target, static arrays for drafters that look in both directions.

Neither stores its length: the decode state counts the committed tokens of each sequence. Rows past
that count are stale and are overwritten later; nothing is ever cropped.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dflash.kernels import paged_attention as paged
from dflash.kernels.quantized import Quantised, Rows
from dflash.parallel.sharding import Sharding

# Accelerators copy whole tiles of rows, of up to this many.
SLOT_TILE = 32


@dataclasses.dataclass(frozen=True)
class CacheArray:
    """One array that a layer's attention keeps of every position: [heads, width].

    Attributes:
      heads: rows of a position; 1 where all query heads share what is kept.
      width: numbers in a row.
      axis: logical name of the heads, by which they are split over devices; None: not split.
    """

    heads: int
    width: int
    axis: str | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PagedCache:
    """What every layer keeps of the context, in pages, and each sequence's table of pages.

    Page indices count within a device's own share of the pool, so that no index ever points across
    devices. Page 0 of each share is scratch: rows of sequences without pages are written there.

    Attributes:
      layers: per layer a pytree as its attention's `cache_spec`, with a pool of pages in place of
        each `CacheArray`: [heads, P, S, width]; plain, or `Quantised`.
      page_table: int32 [B, M].
      axes: logical name of the heads of each pool, in the order of `pools`.
    """

    layers: tuple[Any, ...]
    page_table: jax.Array
    axes: tuple[str | None, ...] = dataclasses.field(metadata={"static": True})

    @property
    def pools(self) -> list[Rows]:
        """The pools of all layers."""
        return jax.tree.leaves(self.layers, is_leaf=_is_pool)

    @property
    def page_size(self) -> int:
        """Slots per page."""
        return self.pools[0].shape[2]

    def compact(self, start: jax.Array, path: jax.Array, sharding: Sharding) -> "PagedCache":
        """Moves the rows of an accepted path to their contiguous places.

        Args:
          start: int32 [B]; position of row 0 of the verified tree.
          path: int32 [B, R]; entry i is the row that belongs at position start + i.
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
        """Logical names of the dimensions of each pool."""
        return [(axis, pages, None, None) for axis in self.axes]

    def _replace_pools(self, pools: Sequence[Rows], page_table: jax.Array) -> "PagedCache":
        form = jax.tree.structure(self.layers, is_leaf=_is_pool)
        layers = jax.tree.unflatten(form, pools)
        return dataclasses.replace(self, layers=layers, page_table=page_table)


def batch_axes(batch: int, sharding: Sharding) -> tuple[str | None, str | None]:
    """Logical names of the batch and page dimensions of a call over `batch` sequences.

    A batch that does not divide over the data replicas is computed on every one of them: one
    sequence cannot be split, so both of its dimensions stay whole.
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
    """An abstract cache; filled with zeros, every sequence owns only the scratch page.

    Args:
      specs: per layer, what its attention keeps of a position: a pytree of `CacheArray`s.
      quantized: rows of `dtype` have scales, which are split over devices as they are.
    """
    batch_name, pages_name = batch_axes(batch, sharding)

    def pool(spec: CacheArray) -> Rows:
        names = (spec.axis, pages_name, None, None)
        rows = sharding.abstract((spec.heads, num_pages, page_size, spec.width), names, dtype)
        if not quantized:
            return rows
        scales = (spec.heads, num_pages, 1, page_size)
        return Quantised(rows, sharding.abstract(scales, names, jnp.float32))

    table = sharding.abstract((batch, pages_per_sequence), (batch_name, None), jnp.int32)
    axes = tuple(spec.axis for spec in jax.tree.leaves(tuple(specs)))
    return PagedCache(jax.tree.map(pool, tuple(specs)), table, axes)


def _is_pool(node: Any) -> bool:
    """Whether a node of `PagedCache.layers` is a pool with parts of its own."""
    return isinstance(node, Quantised)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StaticCache:
    """Keys and values of every layer in one array per sequence: [B, K, L, H] each."""

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]

    def write(self, position: jax.Array, keys, values) -> "StaticCache":
        """Writes rows [B, T, K, H] of every layer, from position[b] of each sequence on."""
        store = jax.vmap(_write_rows)
        return StaticCache(
            tuple(store(old, new, position) for old, new in zip(self.keys, keys, strict=True)),
            tuple(store(old, new, position) for old, new in zip(self.values, values, strict=True)),
        )

    def read_rows(self, sequence: jax.Array, start: jax.Array, count: int) -> "StaticCache":
        """Rows [K, count, H] of every layer, from position `start` of one sequence on."""

        def read(leaf):
            _, heads, _, width = leaf.shape
            where = (sequence, jnp.int32(0), start, jnp.int32(0))
            return jax.lax.dynamic_slice(leaf, where, (1, heads, count, width))[0]

        return jax.tree.map(read, self)

    def write_rows(
        self, sequence: jax.Array, start: jax.Array, rows: "StaticCache"
    ) -> "StaticCache":
        """Writes what `read_rows` has returned."""
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
    """An abstract cache of at least `capacity` positions per sequence, a multiple of `tile`."""
    batch_name, _ = batch_axes(batch, sharding)
    names = (batch_name, "kv_heads", None, None)
    capacity += -capacity % tile
    rows = sharding.abstract((batch, num_kv_heads, capacity, head_dim), names, dtype)
    return StaticCache((rows,) * num_layers, (rows,) * num_layers)
