"""Paged attention: T new rows per sequence against a KV cache that lives in pages.

T is 1 for plain decoding, block_size for verification, a whole chunk for prefill. The call writes
the new keys and values into their pages and attends in one go.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from dflash.kernels import implementation as implementations
from dflash.kernels import online_softmax, tuning
from dflash.kernels import paged_attention_tpu as tpu
from dflash.kernels import quantized as quantized
from dflash.kernels.online_softmax import Partial
from dflash.kernels.quantized import Quantised, Rows

# Keys per step of the loop over the context. Larger tiles amortise the loop, smaller ones waste
# less on short contexts; between 128 and 512 the difference on a CPU is in the noise.
TILE_TOKENS = 256


def paged_attention(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    key_pages: Rows,
    value_pages: Rows,
    page_table: jax.Array,
    start: jax.Array,
    tree_mask: jax.Array | None = None,
    *,
    scale: float,
    implementation: str = "auto",
    sizes: tuning.BlockSizes | None = None,
) -> tuple[jax.Array, Rows, Rows]:
    """Appends T rows to each sequence's cache and attends over context and new rows.

    Row r of sequence b is stored at cache position `start[b] + r`. It sees every position below
    `start[b]`, and the new rows that `tree_mask` grants it (row r and those before it by default).

    Positions past `start + T` are stale: the kernel may overwrite those that share a tile of memory
    with a new row.

    Pages may be quantized. New rows are then quantized before any row attends to them, so that
    every row sees the same keys and values whether its predecessors came in this call or earlier.

    Args:
      queries: [B, T, N, H].
      keys: [B, T, K, H]; N is a multiple of K.
      values: [B, T, K, H].
      key_pages: [K, P, S, H]; pages of S rows. Plain, or `Quantised` with scales [K, P, 1, S].
      value_pages: [K, P, S, H], likewise.
      page_table: int32 [B, M]; position p of sequence b is in page `page_table[b, p // S]`.
      start: int32 [B]; positions in use before this call. start + T must not exceed M · S.
      tree_mask: bool [B, T, T] or None; entry [b, r, c]: row r sees new row c.
      scale: factor on the scores.
      implementation: see `implementation.run`.
      sizes: of the kernel's blocks; None for the tuned ones.
    Returns:
      outputs [B, T, N, H] in the dtype of `queries`, key_pages, value_pages.
    Raises:
      ValueError: shapes that do not fit each other, or do not fit VMEM; the message names them.
    """
    _check(queries, keys, values, key_pages, value_pages, page_table, start, tree_mask)
    # The only place where rows become what is stored: by head, cast or quantized.
    keys = quantized.encode(keys.swapaxes(1, 2), key_pages)
    values = quantized.encode(values.swapaxes(1, 2), value_pages)
    arrays = (queries, keys, values, key_pages, value_pages, page_table, start)
    sizes = sizes or tuning.PAGED_ATTENTION.get(queries.shape[-1])
    return implementations.run(
        implementation,
        *arrays,
        *([] if tree_mask is None else [tree_mask]),
        reference=functools.partial(_reference, scale=scale),
        pallas=functools.partial(tpu.paged_attention_tpu, scale=scale, sizes=sizes),
        unsupported=tpu.unsupported(queries, key_pages),
    )


def _reference(
    queries,
    keys,
    values,
    key_pages,
    value_pages,
    page_table,
    start,
    tree_mask=None,
    *,
    scale,
):
    """`keys` and `values` are [B, K, T, H], as the pages store them."""
    length = queries.shape[1]
    kv_heads, _, page_size, _ = key_pages.shape
    keys, values = jax.tree.map(lambda rows: rows.swapaxes(0, 1), (keys, values))
    index = row_index(page_table, start[:, None] + jnp.arange(length), page_size)
    # Written before they are read: the loop below then reads one version of the pages, and XLA
    # updates them in place.
    key_pages = write_rows(key_pages, index, keys)
    value_pages = write_rows(value_pages, index, values)

    rows = online_softmax.group_queries(queries, kv_heads)
    group = queries.shape[2] // kv_heads
    attend = functools.partial(online_softmax.attend, scale=scale)
    if tree_mask is None:
        tree_mask = jnp.tril(jnp.ones((1, length, length), bool))
    partial = attend(rows, keys, values, jnp.repeat(tree_mask, group, axis=1))

    def attend_tile(pages, visible):
        return attend(rows, read_pages(key_pages, pages), read_pages(value_pages, pages), visible)

    partial = fold_in_context(partial, attend_tile, page_table, start, page_size)
    outputs = online_softmax.ungroup(online_softmax.normalise(partial, queries.dtype), length)
    return outputs, key_pages, value_pages


def fold_in_context(
    partial: Partial,
    attend_tile: Callable[[jax.Array, jax.Array], Partial],
    page_table: jax.Array,
    start: jax.Array,
    page_size: int,
) -> Partial:
    """Adds attention to the cached context, tile by tile, up to the longest one in use.

    Args:
      partial: attention to the new rows.
      attend_tile: (index int32 [B, n] of pages, visible bool [B, 1, n·S]) -> attention to them.
      page_table: int32 [B, M].
      start: int32 [B]; tokens of each context.
      page_size: S.
    """
    pages_per_tile = min(max(1, TILE_TOKENS // page_size), page_table.shape[1])
    tile = pages_per_tile * page_size
    table = jnp.pad(page_table, ((0, 0), (0, -page_table.shape[1] % pages_per_tile)))

    def fold_in_tile(i, partial):
        pages = jax.lax.dynamic_slice_in_dim(table, i * pages_per_tile, pages_per_tile, axis=1)
        positions = i * tile + jnp.arange(tile)
        visible = positions < start[:, None, None]
        return online_softmax.merge(partial, attend_tile(pages, visible))

    tiles_in_use = (start.max() + tile - 1) // tile
    return jax.lax.fori_loop(0, tiles_in_use, fold_in_tile, partial)


def row_index(page_table: jax.Array, positions: jax.Array, page_size: int) -> jax.Array:
    """Index into the flat [P·S] rows of a page pool.

    Args:
      page_table: int32 [B, M].
      positions: int32 [B, T]; cache positions of each sequence.
      page_size: S.
    Returns:
      int32 [B, T].
    """
    pages = jnp.take_along_axis(page_table, positions // page_size, axis=1)
    return pages * page_size + positions % page_size


def read_pages(pages: Rows, index: jax.Array) -> Rows:
    """The rows [K, B, N·S, H] of pages index [B, N] of pages [K, P, S, H]."""
    if isinstance(pages, Quantised):
        scales = read_pages(pages.scales.mT, index).mT
        return Quantised(read_pages(pages.values, index), scales)
    picked = pages[:, index]
    return picked.reshape(*picked.shape[:2], -1, picked.shape[-1])


def write_rows(pages: Rows, index: jax.Array, rows: Rows) -> Rows:
    """Writes rows [K, B, T, H] at flat index [B, T] of pages [K, P, S, H]."""
    places = _places(pages, index)
    if isinstance(pages, Quantised):
        scales = pages.scales.reshape(-1).at[places].set(rows.scales[:, :, 0])
        values = write_rows(pages.values, index, rows.values)
        return Quantised(values, scales.reshape(pages.scales.shape))
    flat = pages.reshape(-1, pages.shape[-1])
    return flat.at[places].set(rows.astype(pages.dtype)).reshape(pages.shape)


def read_rows(pages: Rows, index: jax.Array) -> Rows:
    """The rows [K, B, T, H] at flat index [B, T] of pages [K, P, S, H]."""
    places = _places(pages, index)
    if isinstance(pages, Quantised):
        scales = pages.scales.reshape(-1)[places][:, :, None]
        return Quantised(read_rows(pages.values, index), scales)
    return pages.reshape(-1, pages.shape[-1])[places]


def _places(pages: Rows, index: jax.Array) -> jax.Array:
    """Flat index [B, T] into every head's rows -> index [K, B, T] into all heads' rows, joined.

    Indexed by row alone, a pool is moved within in the layout that it has on a TPU; with a window
    of all heads, XLA would first copy it into another.
    """
    kv_heads, num_pages, page_size, _ = pages.shape
    return jnp.arange(kv_heads)[:, None, None] * (num_pages * page_size) + index


def move_rows(pages: Rows, source: jax.Array, destination: jax.Array) -> Rows:
    """Copies rows of pages [K, P, S, H] from flat index source [B, T] to destination [B, T]."""
    return write_rows(pages, destination, read_rows(pages, source))


def _check(queries, keys, values, key_pages, value_pages, page_table, start, tree_mask):
    batch, length, heads, width = queries.shape
    kv_heads = key_pages.shape[0]
    expected = {
        "keys": (keys, (batch, length, kv_heads, width)),
        "values": (values, (batch, length, kv_heads, width)),
        "value_pages": (value_pages, key_pages.shape),
        "page_table": (page_table, (batch, page_table.shape[-1])),
        "start": (start, (batch,)),
    }
    if tree_mask is not None:
        expected["tree_mask"] = (tree_mask, (batch, length, length))
    for name, pages in (("key_pages", key_pages), ("value_pages", value_pages)):
        if isinstance(pages, Quantised):
            scales = (*pages.shape[:2], 1, pages.shape[2])
            expected[f"{name}.scales"] = (pages.scales, scales)
    for name, (array, shape) in expected.items():
        if array.shape != shape:
            raise ValueError(f"paged_attention: {name} is {array.shape}, expected {shape}")
    if key_pages.shape[-1] != width or heads % kv_heads:
        raise ValueError(
            f"paged_attention: queries {queries.shape} do not fit key_pages {key_pages.shape}"
        )
