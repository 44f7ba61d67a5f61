"""Paged attention: attends from T new rows per sequence to a key/value cache in pages.

T is 1 for plain decoding, the block size for verification, and the chunk length for prefill. One
call both writes the new keys and values into their pages and attends.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from dflash.kernels import attention_cpu, online_softmax, quantized, tuning
from dflash.kernels import implementation as implementations
from dflash.kernels import packed_attention_tpu as packed_tpu
from dflash.kernels import paged_attention_tpu as tpu
from dflash.kernels.online_softmax import Partial
from dflash.kernels.packing import Packing
from dflash.kernels.quantized import Quantized, Rows

# Keys per iteration of the loop over the context. Larger tiles amortize the loop's overhead, and
# smaller ones waste less on short contexts. On a CPU, sizes from 128 to 512 differ within noise.
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
    sinks: jax.Array | None = None,
    *,
    scale: float,
    window: int | None = None,
    by_position: bool = False,
    implementation: str = "auto",
    sizes: tuning.BlockSizes | None = None,
) -> tuple[jax.Array, Rows, Rows]:
    """Appends T rows to each sequence's cache and attends to context and new rows.

    Row r of sequence b is stored at cache position `start[b] + r`. It sees every position below
    `start[b]`, and the new rows that `tree_mask` selects (by default, rows up to and including r).
    If a window is set, a row sees no token that is `window` or more positions before its own; the
    position of row r is start[b] plus its depth, the number of new rows that it sees but itself.

    Positions past `start + T` are stale: the kernel may overwrite those that share a memory tile
    with a new row.

    Pages may be quantized. New rows are then quantized before any row attends to them, so that
    every row sees the same keys and values whether its predecessors were appended in this call or
    earlier.

    Args:
      queries: [B, T, N, H].
      keys: [B, T, K, H]; N is a multiple of K.
      values: [B, T, K, H].
      key_pages: [K, P, S, H]; pages of S rows. Plain, or `Quantized` with scales [K, P, 1, S].
      value_pages: [K, P, S, H], in the format of `key_pages`.
      page_table: int32 [B, M]; position p of sequence b is in page `page_table[b, p // S]`.
      start: int32 [B]; cached positions before this call. start + T must not exceed M · S.
      tree_mask: bool [B, T, T]; entry [b, r, c] is whether row r sees new row c. None is causal.
      sinks: [N]; attention sink of each head, a score without a value that is added to the softmax
        sum of every row. None for no sinks.
      window: Positions up to its own that a row sees; None for all.
      by_position: Add keys up in the order of their positions, old and new ones alike, so that a
        row's output does not depend on which of them were appended in this call. Without a tree.
    Returns:
      Outputs [B, T, N, H] in the dtype of `queries`, key_pages, value_pages.
    Raises:
      ValueError: Shapes are inconsistent or exceed VMEM; the message names the array.
    """
    _check(queries, keys, values, key_pages, value_pages, page_table, start, tree_mask, sinks)
    # Only here are rows converted to their stored form: heads first, then cast or quantized.
    keys = quantized.encode(keys.swapaxes(1, 2), key_pages)
    values = quantized.encode(values.swapaxes(1, 2), value_pages)
    arrays = (queries, keys, values, key_pages, value_pages, page_table, start)
    sizes = sizes or tuning.PAGED_ATTENTION.get(queries.shape[-1])
    if by_position and tree_mask is not None:
        raise ValueError("paged_attention: keys of a tree have no order by position")
    view = {"scale": scale, "window": window}
    in_order = {"attend": _attend_by_position} if by_position else {}
    kernel = _kernel_by_position if by_position else tpu.paged_attention_tpu
    return implementations.run(
        implementation,
        *arrays,
        tree_mask,
        sinks,
        reference=functools.partial(_reference, **view, **in_order),
        pallas=functools.partial(kernel, **view, sizes=sizes),
        unsupported=tpu.unsupported(queries, key_pages),
        cpu=None
        if attention_cpu.unsupported(queries, key_pages)
        else functools.partial(_reference, **view, attend=_attend_on_cpu),
    )


def _reference(*arrays, scale, window, attend=None):
    """Computes `paged_attention` with keys and values [B, K, T, H] in their stored form.

    Rows attend by `_attend`, or by `attend` with the same arguments.
    """
    queries, keys, values, key_pages, value_pages, page_table, start, tree_mask, sinks = arrays
    length = queries.shape[1]
    # Write the pages before reading them, so that the loop below reads a single version of them and
    # XLA updates them in place.
    keys, values = jax.tree.map(lambda rows: rows.swapaxes(0, 1), (keys, values))
    key_pages, value_pages = _append(keys, values, *arrays[3:7])

    if tree_mask is None:
        tree_mask = jnp.tril(jnp.ones((1, length, length), bool))
    first_visible = None
    if window is not None:
        depth = tree_mask.sum(-1) - 1
        tree_mask = tree_mask & (depth[:, :, None] - depth[:, None] < window)
        first_visible = start[:, None] + depth - (window - 1)
    arrays = queries, keys, values, key_pages, value_pages, page_table, start
    outputs = (attend or _attend)(arrays, tree_mask, first_visible, sinks, scale)
    return outputs, key_pages, value_pages


def _kernel_by_position(*arrays, **options):
    """Runs the kernel by position, on pages that hold the new rows already."""
    queries, keys, values, *_, page_table, start, tree_mask, sinks = arrays
    rows = jax.tree.map(lambda rows: rows.swapaxes(0, 1), (keys, values))
    pages = _append(*rows, *arrays[3:7])
    rest = page_table, start, tree_mask, sinks
    return tpu.paged_attention_tpu(
        queries, keys, values, *pages, *rest, by_position=True, **options
    )


def _append(keys, values, key_pages, value_pages, page_table, start):
    """Returns the pages with new rows [K, B, T, H], in stored form, from position `start` on."""
    position = start[:, None] + jnp.arange(keys.shape[2])
    index = row_index(page_table, position, key_pages.shape[2])
    return write_rows(key_pages, index, keys), write_rows(value_pages, index, values)


def _attend(arrays, visible_rows, first_visible, sinks, scale):
    """Attends to the context, and to the new rows that `visible_rows` bool [B or 1, T, T] selects.

    Keys and values are [K, B, T, H] in their stored form, and `first_visible`, the first position
    that each row sees, is int32 [B, T] or None.
    """
    queries, keys, values, key_pages, value_pages, page_table, start = arrays
    kv_heads, _, page_size, _ = key_pages.shape
    rows = online_softmax.group_queries(queries, kv_heads)
    group = queries.shape[2] // kv_heads
    if first_visible is not None:
        first_visible = jnp.repeat(first_visible, group, axis=1)
    attend = functools.partial(online_softmax.attend, scale=scale)
    partial = attend(rows, keys, values, jnp.repeat(visible_rows, group, axis=1))

    def attend_tile(pages, visible):
        return attend(rows, read_pages(key_pages, pages), read_pages(value_pages, pages), visible)

    partial = fold_in_context(partial, attend_tile, page_table, start, page_size, first_visible)
    if sinks is not None:
        partial = online_softmax.with_sinks(partial, sinks)
    return online_softmax.ungroup(
        online_softmax.normalize(partial, queries.dtype), queries.shape[1]
    )


def _attend_by_position(arrays, visible_rows, first_visible, sinks, scale):
    """Computes `_attend` from the pages alone, which hold the new rows already."""
    queries, _, _, key_pages, value_pages, page_table, start = arrays
    length, (kv_heads, _, page_size, _) = queries.shape[1], key_pages.shape
    group = queries.shape[2] // kv_heads
    position = jnp.repeat(start[:, None] + jnp.arange(length), group, axis=1)
    if first_visible is not None:
        first_visible = jnp.repeat(first_visible, group, axis=1)
    rows = online_softmax.group_queries(queries, kv_heads)

    def attend_tile(pages, visible):
        tile = read_pages(key_pages, pages), read_pages(value_pages, pages)
        return online_softmax.attend(rows, *tile, visible, scale=scale)

    nothing = online_softmax.nothing(rows)
    fold = functools.partial(fold_in_context, nothing, attend_tile, page_table)
    partial = fold(start + length, page_size, first_visible, position)
    if sinks is not None:
        partial = online_softmax.with_sinks(partial, sinks)
    return online_softmax.ungroup(online_softmax.normalize(partial, queries.dtype), length)


def _attend_on_cpu(arrays, visible_rows, first_visible, sinks, scale):
    queries, keys, values, *pages, page_table, start = arrays
    keys, values = (rows.transpose(1, 2, 0, 3) for rows in (keys, values))
    return attention_cpu.attend(
        *(queries, keys, values, visible_rows, *pages, start),
        scale=scale,
        page_table=page_table,
        first_visible=first_visible,
        sinks=sinks,
    )


def fold_in_context(
    partial: Partial,
    attend_tile: Callable[[jax.Array, jax.Array], Partial],
    page_table: jax.Array,
    start: jax.Array,
    page_size: int,
    first_visible: jax.Array | None = None,
    last_visible: jax.Array | None = None,
) -> Partial:
    """Adds attention to the cached context, tile by tile, up to the longest context of the batch.

    Tiles that no row of the batch sees are skipped.

    Args:
      attend_tile: Function from page indices int32 [B, n] and the visibility of their rows,
        bool [B, 1 or R, n·S], to the attention to these pages.
      page_table: int32 [B, M].
      start: int32 [B]; cached positions of each sequence.
      page_size: Rows per page, S.
      first_visible: int32 [B, R]; first position that each row sees, may be negative. None for 0.
      last_visible: int32 [B, R]; last position that each row sees. None for all cached ones.
    """
    pages_per_tile = min(max(1, TILE_TOKENS // page_size), page_table.shape[1])
    tile = pages_per_tile * page_size
    table = jnp.pad(page_table, ((0, 0), (0, -page_table.shape[1] % pages_per_tile)))

    def fold_in_tile(i, partial):
        pages = jax.lax.dynamic_slice_in_dim(table, i * pages_per_tile, pages_per_tile, axis=1)
        positions = i * tile + jnp.arange(tile)
        visible = positions < start[:, None, None]
        if first_visible is not None:
            visible &= positions >= first_visible[:, :, None]
        if last_visible is not None:
            visible &= positions <= last_visible[:, :, None]
        return online_softmax.merge(partial, attend_tile(pages, visible))

    tiles_in_use = (start.max() + tile - 1) // tile
    first = 0 if first_visible is None else jnp.maximum(first_visible.min(), 0) // tile
    return jax.lax.fori_loop(first, tiles_in_use, fold_in_tile, partial)


def row_index(page_table: jax.Array, positions: jax.Array, page_size: int) -> jax.Array:
    """Returns indices into the flat [P·S] rows of a page pool.

    Args:
      page_table: int32 [B, M].
      positions: int32 [B, T]; cache positions of each sequence.
      page_size: Rows per page, S.
    Returns:
      int32 [B, T].
    """
    pages = jnp.take_along_axis(page_table, positions // page_size, axis=1)
    return pages * page_size + positions % page_size


def read_pages(pages: Rows, index: jax.Array) -> Rows:
    """Returns the rows [K, B, N·S, H] of the pages with indices [B, N] of a pool [K, P, S, H]."""
    if isinstance(pages, Quantized):
        scales = read_pages(pages.scales.mT, index).mT
        return Quantized(read_pages(pages.values, index), scales)
    picked = pages[:, index]
    return picked.reshape(*picked.shape[:2], -1, picked.shape[-1])


def write_rows(pages: Rows, index: jax.Array, rows: Rows) -> Rows:
    """Writes rows [K, B, T, H] at flat indices [B, T] of a pool [K, P, S, H]."""
    places = _places(pages, index)
    if isinstance(pages, Quantized):
        scales = pages.scales.reshape(-1).at[places].set(rows.scales[:, :, 0])
        values = write_rows(pages.values, index, rows.values)
        return Quantized(values, scales.reshape(pages.scales.shape))
    flat = pages.reshape(-1, pages.shape[-1])
    return flat.at[places].set(rows.astype(pages.dtype)).reshape(pages.shape)


def read_rows(pages: Rows, index: jax.Array) -> Rows:
    """Returns the rows [K, B, T, H] at flat indices [B, T] of a pool [K, P, S, H]."""
    places = _places(pages, index)
    if isinstance(pages, Quantized):
        scales = pages.scales.reshape(-1)[places][:, :, None]
        return Quantized(read_rows(pages.values, index), scales)
    return pages.reshape(-1, pages.shape[-1])[places]


def _places(pages: Rows, index: jax.Array) -> jax.Array:
    """Converts flat indices [B, T] per head to indices [K, B, T] into the flat rows of all heads.

    With indices of single rows, XLA on a TPU reads and writes the pool in its layout. With windows
    over all heads, it would first copy the pool to another layout.
    """
    kv_heads, num_pages, page_size, _ = pages.shape
    return jnp.arange(kv_heads)[:, None, None] * (num_pages * page_size) + index


def move_rows(pages: Rows, source: jax.Array, destination: jax.Array) -> Rows:
    """Copies rows of a pool [K, P, S, H] from flat indices source [B, T] to destination [B, T]."""
    return write_rows(pages, destination, read_rows(pages, source))


def _check(queries, keys, values, key_pages, value_pages, page_table, start, tree_mask, sinks):
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
    if sinks is not None:
        expected["sinks"] = (sinks, (heads,))
    for name, pages in (("key_pages", key_pages), ("value_pages", value_pages)):
        if isinstance(pages, Quantized):
            scales = (*pages.shape[:2], 1, pages.shape[2])
            expected[f"{name}.scales"] = (pages.scales, scales)
    implementations.check_shapes("paged_attention", expected)
    if key_pages.shape[-1] != width or heads % kv_heads:
        raise ValueError(
            f"paged_attention: queries {queries.shape} do not fit key_pages {key_pages.shape}"
        )


def packed_attention(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    key_pages: Rows,
    value_pages: Rows,
    page_table: jax.Array,
    start: jax.Array,
    packing: Packing,
    tree_mask: jax.Array | None = None,
    sinks: jax.Array | None = None,
    *,
    scale: float,
    window: int | None = None,
    implementation: str = "auto",
    sizes: tuning.BlockSizes | None = None,
) -> tuple[jax.Array, Rows, Rows]:
    """Computes `paged_attention` over packed rows: different numbers of new rows per sequence.

    Only the kernel attends to packed rows as they are. Elsewhere rows are padded, so that all
    sequences have the same number, and packed again. The padding of a sequence is stored after its
    rows, with arbitrary keys and values.

    The other arguments are those of `paged_attention`.

    Args:
      queries: [D, N, heads, H].
      keys: [D, N, K, H]; the number of heads is a multiple of K.
      values: [D, N, K, H].
      packing: Packing of up to T rows of B sequences into N for each of D replicas.
    Returns:
      Outputs [D, N, heads, H] in the dtype of `queries`, key_pages, value_pages. Outputs of rows
      past the last sequence's are arbitrary.
    Raises:
      ValueError: Shapes are inconsistent; the message names the array.
    """
    arrays = (queries, keys, values, key_pages, value_pages, page_table, start)
    view = {"scale": scale, "window": window}
    chosen = sizes or tuning.PAGED_ATTENTION.get(queries.shape[-1])
    shapes = queries, packing, key_pages, page_table, tree_mask, window, sinks is not None
    unsupported = packed_tpu.unsupported(*shapes, sizes=chosen)

    def padded(*arrays, implementation):
        *rows, key_pages, value_pages, page_table, start, packing, tree_mask, sinks = arrays

        def attend(*rows):
            fixed = key_pages, value_pages, page_table, start, tree_mask, sinks
            options = view | {"implementation": implementation, "sizes": sizes}
            attended, *pages = paged_attention(*rows, *fixed, **options)
            return attended, pages

        attended, pages = packing.around(attend)(*rows)
        return attended, *pages

    return implementations.run(
        implementation,
        *arrays,
        packing,
        tree_mask,
        sinks,
        reference=functools.partial(
            padded, implementation=implementation if unsupported else "reference"
        ),
        pallas=functools.partial(packed_tpu.packed_attention_tpu, **view, sizes=chosen),
        unsupported=unsupported,
        cpu=functools.partial(padded, implementation="cpu"),
    )
