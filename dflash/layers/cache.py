"""KV caches: pages for the target, static arrays for drafters that look in both directions.

Neither knows its length. The decode state counts the committed tokens of each sequence, once;
rows past that count are stale and get overwritten, nothing is ever cropped.
"""

import dataclasses

import jax
import jax.numpy as jnp

from dflash.kernels import paged_attention as paged
from dflash.kernels.quantised import Quantised, Rows
from dflash.parallel.sharding import Sharding

# Accelerators copy whole tiles of rows, of up to this many.
SLOT_TILE = 32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PagedCache:
    """Keys and values of every layer in pages, and each sequence's table of pages.

    Page indices count within a device's own share of the pool, so that no index ever points across
    devices. Page 0 of each share is scratch: slots that nobody owns are written there.

    Attributes:
      keys: one [K, P, S, H] per layer; plain, or `Quantised`.
      values: one [K, P, S, H] per layer, likewise.
      page_table: int32 [B, M].
    """

    keys: tuple[Rows, ...]
    values: tuple[Rows, ...]
    page_table: jax.Array

    @property
    def page_size(self) -> int:
        """Slots per page."""
        return self.keys[0].shape[2]

    def insert(
        self,
        prefix: "PagedCache",
        slot: jax.Array,
        share: jax.Array,
        table: jax.Array,
        pages: jax.Array,
        sharding: Sharding,
    ) -> "PagedCache":
        """Copies a prompt's pages into those that a slot owns, on the device that holds it.

        Args:
          prefix: of one sequence, in pages 1, 2, … of a pool of its own.
          slot: int32 [].
          share: int32 []; the share of the pool that the slot lives in.
          table: int32 [M]; the slot's page table from now on.
          pages: int32 [pages of the prefix]; where each goes.
          sharding: of the cache.
        """

        def copy(pools, prefix_pools, pages, share):
            mine = jnp.where(share == sharding.index("pages"), pages, 0)
            return jax.tree.map(
                lambda pool, one: pool.at[:, mine].set(one[:, 1:]), pools, prefix_pools
            )

        stored, whole = ("kv_heads", "pages", None, None), ("kv_heads", None, None, None)
        keys, values = sharding.map(
            lambda *args: copy(args[:2], args[2:4], *args[4:]),
            (stored, stored, whole, whole, (None,), ()),
            (stored, stored),
        )(self.keys, self.values, prefix.keys, prefix.values, pages, share)
        return PagedCache(keys, values, self.page_table.at[slot].set(table))

    def compact(self, start: jax.Array, path: jax.Array, sharding: Sharding) -> "PagedCache":
        """Moves the rows of an accepted path to their contiguous places.

        Args:
          start: int32 [B]; slot of row 0 of the verified tree.
          path: int32 [B, R]; entry i is the row that belongs at slot start + i.
        """
        rows = start[:, None] + jnp.arange(path.shape[1])

        def move(keys, values, table, start, path, rows):
            source = paged.slot_index(table, start[:, None] + path, self.page_size)
            destination = paged.slot_index(table, rows, self.page_size)
            return tuple(
                tuple(paged.move_slots(pages, source, destination) for pages in pools)
                for pools in (keys, values)
            )

        batch, pages = batch_axes(path.shape[0], sharding)
        stored = ("kv_heads", pages, None, None)
        keys, values = sharding.map(
            move,
            (stored, stored, (batch, None), (batch,), (batch, None), (batch, None)),
            (stored, stored),
        )(self.keys, self.values, self.page_table, start, path, rows)
        return dataclasses.replace(self, keys=keys, values=values)


def batch_axes(batch: int, sharding: Sharding) -> tuple[str | None, str | None]:
    """Logical names of the batch and page dimensions of a call over `batch` sequences.

    A prompt is prefilled alone, on every data replica at once: one sequence cannot be split, so
    both of its dimensions stay whole.
    """
    return ("batch", "pages") if batch % sharding.size("batch") == 0 else (None, None)


def paged_cache(
    *,
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
    batch: int,
    pages_per_sequence: int,
    num_pages: int,
    page_size: int,
    dtype: jnp.dtype,
    quantised: bool = False,
    sharding: Sharding,
) -> PagedCache:
    """An abstract cache; filled with zeros, every sequence owns the scratch page alone.

    Args: quantised: rows of `dtype` have scales, which are split over devices as they are.
    """
    batch_name, pages_name = batch_axes(batch, sharding)
    names = ("kv_heads", pages_name, None, None)
    pool = sharding.abstract((num_kv_heads, num_pages, page_size, head_dim), names, dtype)
    if quantised:
        scales = (num_kv_heads, num_pages, 1, page_size)
        pool = Quantised(pool, sharding.abstract(scales, names, jnp.float32))
    table = sharding.abstract((batch, pages_per_sequence), (batch_name, None), jnp.int32)
    return PagedCache((pool,) * num_layers, (pool,) * num_layers, table)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StaticCache:
    """Keys and values of every layer in one array per sequence: [B, K, L, H] each."""

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]

    def write(self, position: jax.Array, keys, values) -> "StaticCache":
        """Writes rows [B, T, K, H] of every layer at slots position[b] … position[b] + T - 1."""
        store = jax.vmap(_write_rows)
        return StaticCache(
            tuple(store(old, new, position) for old, new in zip(self.keys, keys, strict=True)),
            tuple(store(old, new, position) for old, new in zip(self.values, values, strict=True)),
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
) -> StaticCache:
    """An abstract cache of at least `capacity` slots per sequence."""
    batch_name, _ = batch_axes(batch, sharding)
    names = (batch_name, "kv_heads", None, None)
    capacity += -capacity % SLOT_TILE
    rows = sharding.abstract((batch, num_kv_heads, capacity, head_dim), names, dtype)
    return StaticCache((rows,) * num_layers, (rows,) * num_layers)
