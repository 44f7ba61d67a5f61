"""Block attention: a draft block against a static context, and against itself in both directions.

A causal paged kernel cannot serve this: every row of the block sees every other one.
"""

import jax
import jax.numpy as jnp

from dflash.kernels import online_softmax

# Keys per step of the loop over the context; see paged_attention.TILE_TOKENS.
TILE_TOKENS = 256


def block_attention(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    context_keys: jax.Array,
    context_values: jax.Array,
    length: jax.Array,
    *,
    scale: float,
    window: int | None = None,
    causal: bool = False,
) -> jax.Array:
    """Attends from a block of T rows over its context and itself.

    The block is anchored at position `length[b]`: context key p is visible to all of its rows iff
    p < length[b], and p >= length[b] - window where a window is set.

    Args:
      queries: [B, T, N, H].
      keys: [B, T, K, H]; N is a multiple of K.
      values: [B, T, K, H].
      context_keys: [B, K, L, H]; rows at and past `length` are never looked at.
      context_values: [B, K, L, H].
      length: int32 [B]; context rows in use.
      scale: factor on the scores.
      window: context positions before the anchor that remain visible; None for all.
      causal: row r sees the block's rows up to r only.
    Returns:
      [B, T, N, H] in the dtype of `queries`.
    Raises:
      ValueError: shapes that do not fit each other; the message names them.
    """
    _check(queries, keys, values, context_keys, context_values, length)
    block, kv_heads = queries.shape[1], keys.shape[2]
    rows = online_softmax.group_queries(queries, kv_heads)
    inside = jnp.ones((block, block), bool)
    partial = online_softmax.attend(
        rows,
        keys.transpose(2, 0, 1, 3),
        values.transpose(2, 0, 1, 3),
        jnp.repeat(jnp.tril(inside) if causal else inside, queries.shape[2] // kv_heads, axis=0),
        scale=scale,
    )

    capacity = context_keys.shape[2]
    tile = min(TILE_TOKENS, capacity)
    first_visible = jnp.zeros_like(length) if window is None else jnp.maximum(length - window, 0)

    def fold_in_tile(i, partial):
        # The last tile may reach past the capacity; dynamic_slice then starts earlier, so the
        # positions are counted from where it really starts and those of earlier tiles left out.
        begin = jnp.minimum(i * tile, capacity - tile)
        positions = begin + jnp.arange(tile)
        visible = (positions < length[:, None]) & (positions >= first_visible[:, None])
        visible &= positions >= i * tile
        seen = online_softmax.attend(
            rows,
            jax.lax.dynamic_slice_in_dim(context_keys, begin, tile, axis=2).swapaxes(0, 1),
            jax.lax.dynamic_slice_in_dim(context_values, begin, tile, axis=2).swapaxes(0, 1),
            visible[:, None, :],
            scale=scale,
        )
        return online_softmax.merge(partial, seen)

    first_tile = first_visible.min() // tile
    end_tile = (length.max() + tile - 1) // tile
    partial = jax.lax.fori_loop(first_tile, end_tile, fold_in_tile, partial)
    return online_softmax.ungroup(online_softmax.normalise(partial, queries.dtype), block)


def _check(queries, keys, values, context_keys, context_values, length):
    batch, block, heads, width = queries.shape
    kv_heads = keys.shape[2]
    expected = {
        "keys": (keys, (batch, block, kv_heads, width)),
        "values": (values, (batch, block, kv_heads, width)),
        "context_keys": (context_keys, (batch, kv_heads, context_keys.shape[2], width)),
        "context_values": (context_values, context_keys.shape),
        "length": (length, (batch,)),
    }
    for name, (array, shape) in expected.items():
        if array.shape != shape:
            raise ValueError(f"block_attention: {name} is {array.shape}, expected {shape}")
    if heads % kv_heads:
        raise ValueError(f"block_attention: {heads} query heads over {kv_heads} kv heads")
