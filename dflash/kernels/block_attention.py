"""Block attention: attends from a draft block to a static context, and to itself bidirectionally.

A causal paged kernel cannot compute this, since every row of the block sees every other row.
"""

import functools

import jax
import jax.numpy as jnp

from dflash.kernels import attention_cpu, online_softmax, tuning
from dflash.kernels import block_attention_tpu as tpu
from dflash.kernels import implementation as implementations

# Keys per iteration of the loop over the context; see paged_attention.TILE_TOKENS.
TILE_TOKENS = 256


def block_attention(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    context_keys: jax.Array,
    context_values: jax.Array,
    length: jax.Array,
    sinks: jax.Array | None = None,
    windows: jax.Array | None = None,
    *,
    scale: float,
    window: int | None = None,
    causal: bool = False,
    implementation: str = "auto",
    sizes: tuning.BlockSizes | None = None,
) -> jax.Array:
    """Attends from a block of T rows to its context and to itself.

    The block is anchored at position `length[b]`: its row r is at position length[b] + r, and sees
    context key p iff p < length[b]. If a window is set, a row sees no key that is `window` or more
    positions before or after it, in the context or in the block.

    Args:
      queries: [B, T, N, H].
      keys: [B, T, K, H]; N is a multiple of K.
      values: [B, T, K, H].
      context_keys: [B, K, L, H]; rows at and past `length` are never read.
      context_values: [B, K, L, H].
      length: int32 [B]; context rows in use.
      sinks: [N]; attention sink of each head, as in `paged_attention`, or None.
      windows: int32 [B]; windows of the sequences' contexts, which narrow `window`. Rows of the
        block see one another whatever these are. None to narrow nothing.
      window: Positions up to its own that a row sees; None for all.
      causal: Row r sees rows up to r of the block only.
    Returns:
      [B, T, N, H] in the dtype of `queries`.
    Raises:
      ValueError: Shapes are inconsistent or exceed VMEM; the message names the array.
    """
    arrays = (queries, keys, values, context_keys, context_values, length)
    _check("block_attention", queries.shape[1], *arrays)
    if sinks is not None and sinks.shape != queries.shape[2:3]:
        raise ValueError(f"block_attention: sinks is {sinks.shape}, expected {queries.shape[2:3]}")
    if windows is not None and windows.shape != length.shape:
        raise ValueError(f"block_attention: windows is {windows.shape}, expected {length.shape}")
    if windows is not None and window is not None:
        windows = jnp.minimum(windows, window)
    arrays = (*arrays, sinks, windows)
    view = {"scale": scale, "window": window, "causal": causal}
    sizes = sizes or tuning.BLOCK_ATTENTION.get(queries.shape[-1])
    return implementations.run(
        implementation,
        *arrays,
        reference=functools.partial(_with_mask, _attend, **view),
        pallas=functools.partial(tpu.block_attention_tpu, **view, sizes=sizes),
        unsupported=tpu.unsupported(queries, context_keys),
        cpu=None
        if attention_cpu.unsupported(queries, context_keys)
        else functools.partial(_with_mask, attention_cpu.attend, **view),
    )


def _with_mask(
    attend, queries, keys, values, context_keys, context_values, length, sinks=None, windows=None,
    *, scale, window, causal,
):  # fmt: skip
    block = queries.shape[1]
    inside = visible_inside(block, window=window, causal=causal)[None]
    first = _first_visible(length, block, window if windows is None else windows[:, None])
    arrays = queries, keys, values, inside, context_keys, context_values, length
    return attend(*arrays, scale=scale, first_visible=first, sinks=sinks)


def visible_inside(block: int, *, window: int | None, causal: bool) -> jax.Array:
    """Returns the mask bool [T, T] of the block's rows that each of its T rows sees."""
    row, key = jnp.arange(block)[:, None], jnp.arange(block)
    visible = key <= row if causal else jnp.ones((block, block), bool)
    return visible if window is None else visible & (jnp.abs(row - key) < window)


def branch_attention(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    visible: jax.Array,
    context_keys: jax.Array,
    context_values: jax.Array,
    length: jax.Array,
    *,
    scale: float,
    implementation: str = "auto",
) -> jax.Array:
    """Attends from T rows to a context, and to those of S drafted rows that `visible` selects.

    The other arguments are those of `block_attention`.

    Args:
      keys: [B, S, K, H].
      values: [B, S, K, H].
      visible: bool [B, T, S]; drafted rows that each row sees, at least one.
      implementation: "cpu", or another one of `implementation.run`, all of which are the reference.
    Returns:
      [B, T, N, H] in the dtype of `queries`.
    Raises:
      ValueError: Shapes are inconsistent; the message names the array.
    """
    batch, rows, _, _ = queries.shape
    drafted = keys.shape[1]
    arrays = (queries, keys, values, context_keys, context_values, length)
    _check("branch_attention", drafted, *arrays)
    if visible.shape != (batch, rows, drafted):
        raise ValueError(
            f"branch_attention: visible is {visible.shape}, expected {(batch, rows, drafted)}"
        )
    on_cpu = implementation == "cpu" and not attention_cpu.unsupported(queries, context_keys)
    attend = attention_cpu.attend if on_cpu else _attend
    first = _first_visible(length, rows, None)
    return attend(*arrays[:3], visible, *arrays[3:], scale=scale, first_visible=first)


def _attend(*arrays, scale, first_visible, sinks=None):
    """Computes `attention_cpu.attend` without pages."""
    queries, keys, values, visible_rows, context_keys, context_values, length = arrays
    block, kv_heads = queries.shape[1], keys.shape[2]
    rows = online_softmax.group_queries(queries, kv_heads)
    partial = online_softmax.attend(
        rows,
        keys.transpose(2, 0, 1, 3),
        values.transpose(2, 0, 1, 3),
        jnp.repeat(visible_rows, queries.shape[2] // kv_heads, axis=1),
        scale=scale,
    )

    capacity = context_keys.shape[2]
    tile = min(TILE_TOKENS, capacity)
    # Of each row and head of a group, [B, T·N/K].
    first = jnp.repeat(first_visible, queries.shape[2] // kv_heads, axis=1)

    def fold_in_tile(i, partial):
        # The last tile may extend past the capacity. It is then read from an earlier position, and
        # rows that earlier tiles contain are masked.
        begin = jnp.minimum(i * tile, capacity - tile)
        positions = begin + jnp.arange(tile)
        exists = (positions < length[:, None]) & (positions >= i * tile)
        visible = exists[:, None] & (positions >= first[..., None])
        seen = online_softmax.attend(
            rows,
            jax.lax.dynamic_slice_in_dim(context_keys, begin, tile, axis=2).swapaxes(0, 1),
            jax.lax.dynamic_slice_in_dim(context_values, begin, tile, axis=2).swapaxes(0, 1),
            visible,
            scale=scale,
        )
        return online_softmax.merge(partial, seen)

    first_tile = first.min() // tile
    end_tile = (length.max() + tile - 1) // tile
    partial = jax.lax.fori_loop(first_tile, end_tile, fold_in_tile, partial)
    if sinks is not None:
        partial = online_softmax.with_sinks(partial, sinks)
    return online_softmax.ungroup(online_softmax.normalize(partial, queries.dtype), block)


def _first_visible(length: jax.Array, rows: int, window: int | jax.Array | None) -> jax.Array:
    """Returns the first position of the context that each row sees, int32 [B, T].

    The window is one for all sequences, or int32 [B, 1].
    """
    if window is None:
        return jnp.zeros((length.shape[0], rows), jnp.int32)
    return jnp.maximum(length[:, None] + jnp.arange(rows) - (window - 1), 0)


def _check(op, block, queries, keys, values, context_keys, context_values, length):
    batch, _, heads, width = queries.shape
    kv_heads = keys.shape[2]
    expected = {
        "keys": (keys, (batch, block, kv_heads, width)),
        "values": (values, (batch, block, kv_heads, width)),
        "context_keys": (context_keys, (batch, kv_heads, context_keys.shape[2], width)),
        "context_values": (context_values, context_keys.shape),
        "length": (length, (batch,)),
    }
    implementations.check_shapes(op, expected, heads, kv_heads)
