"""Block attention for training: many anchored blocks per sequence over one shared context."""

import functools

import jax
import jax.numpy as jnp

from dflash.kernels import online_softmax

# Blocks per step; scores exist for one step at a time, forward and backward.
GROUP_BLOCKS = 8


def anchored_attention(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    context_keys: jax.Array,
    context_values: jax.Array,
    anchors: jax.Array,
    valid: jax.Array,
    segment_ids: jax.Array,
    *,
    scale: float,
    window: int | None = None,
    causal: bool = False,
    group_blocks: int = GROUP_BLOCKS,
) -> jax.Array:
    """Attends from A blocks of R rows over the context before each block, and over the block.

    A row of block j sees context row p iff p < anchors[b, j], p belongs to the anchor's document,
    and p >= anchors[b, j] - window where a window is set. It also sees all rows of its own block
    (those up to itself if `causal`), and nothing of any other.

    Args:
      queries: [B, A, R, N, H].
      keys: [B, A, R, K, H]; N is a multiple of K.
      values: [B, A, R, K, H].
      context_keys: [B, T, K, H].
      context_values: [B, T, K, H].
      anchors: int32 [B, A], in [0, T).
      valid: bool [B, A]; other blocks return zeros and reach no gradient.
      segment_ids: int32 [B, T]; rows of one document share a number, 0 is padding.
      scale: factor on the scores.
      window: context positions before the anchor that remain visible; None for all.
      causal: row r sees the block's rows up to r only.
      group_blocks: blocks per step.
    Returns:
      [B, A, R, N, H] in the dtype of `queries`.
    Raises:
      ValueError: shapes that do not fit each other; the message names them.
    """
    _check(queries, keys, values, context_keys, context_values, anchors, valid, segment_ids)
    blocks = queries.shape[1]
    group = min(group_blocks, blocks)
    attend = functools.partial(_attend_group, scale=scale, window=window, causal=causal)

    def step(arrays):
        return jax.checkpoint(attend)(context_keys, context_values, segment_ids, *arrays)

    per_group = (queries, keys, values, anchors, valid)
    outputs = jax.lax.map(step, [_split(array, group) for array in per_group])
    outputs = outputs.swapaxes(0, 1)
    return outputs.reshape(outputs.shape[0], -1, *outputs.shape[3:])[:, :blocks]


def visible_context(anchors: jax.Array, segment_ids: jax.Array, window: int | None) -> jax.Array:
    """Which context rows each block sees.

    Args:
      anchors: int32 [B, A].
      segment_ids: int32 [B, T].
      window: as in `anchored_attention`.
    Returns:
      bool [B, A, T].
    """
    positions = jnp.arange(segment_ids.shape[1])
    documents = jnp.take_along_axis(segment_ids, anchors, axis=1)
    visible = positions < anchors[..., None]
    visible &= segment_ids[:, None, :] == documents[..., None]
    if window is not None:
        visible &= positions >= anchors[..., None] - window
    return visible


def _attend_group(
    context_keys,
    context_values,
    segment_ids,
    queries,
    keys,
    values,
    anchors,
    valid,
    *,
    scale,
    window,
    causal,
):
    """One group of blocks, in the shapes of `anchored_attention`."""
    batch, blocks, block, heads, width = queries.shape
    kv_heads = keys.shape[3]
    share = heads // kv_heads
    inside = jnp.ones((block, block), bool)
    # An invalid block sees itself too, so that no row is without a key; it is zeroed at the end.
    own = online_softmax.attend(
        online_softmax.group_queries(queries.reshape(-1, block, heads, width), kv_heads),
        keys.reshape(-1, block, kv_heads, width).transpose(2, 0, 1, 3),
        values.reshape(-1, block, kv_heads, width).transpose(2, 0, 1, 3),
        jnp.repeat(jnp.tril(inside) if causal else inside, share, axis=0),
        scale=scale,
    )
    own = jax.tree.map(lambda x: x.reshape(kv_heads, batch, -1, x.shape[-1]), own)
    rows = online_softmax.group_queries(queries.reshape(batch, -1, heads, width), kv_heads)

    context = online_softmax.attend(
        rows,
        context_keys.transpose(2, 0, 1, 3),
        context_values.transpose(2, 0, 1, 3),
        jnp.repeat(visible_context(anchors, segment_ids, window), block * share, axis=1),
        scale=scale,
    )
    attended = online_softmax.normalise(online_softmax.merge(own, context), queries.dtype)
    attended = online_softmax.ungroup(attended, blocks * block).reshape(queries.shape)
    return jnp.where(valid[:, :, None, None, None], attended, 0)


def _split(array: jax.Array, group: int) -> jax.Array:
    """[B, A, ...] -> [steps, B, group, ...]; blocks that fill up the last step are all zeros."""
    batch, blocks = array.shape[:2]
    padding = [(0, 0), (0, -blocks % group)] + [(0, 0)] * (array.ndim - 2)
    return jnp.pad(array, padding).reshape(batch, -1, group, *array.shape[2:]).swapaxes(0, 1)


def _check(queries, keys, values, context_keys, context_values, anchors, valid, segment_ids):
    batch, blocks, block, heads, width = queries.shape
    kv_heads, length = keys.shape[3], segment_ids.shape[1]
    expected = {
        "keys": (keys, (batch, blocks, block, kv_heads, width)),
        "values": (values, (batch, blocks, block, kv_heads, width)),
        "context_keys": (context_keys, (batch, length, kv_heads, width)),
        "context_values": (context_values, (batch, length, kv_heads, width)),
        "anchors": (anchors, (batch, blocks)),
        "valid": (valid, (batch, blocks)),
        "segment_ids": (segment_ids, (batch, length)),
    }
    for name, (array, shape) in expected.items():
        if array.shape != shape:
            raise ValueError(f"anchored_attention: {name} is {array.shape}, expected {shape}")
    if heads % kv_heads:
        raise ValueError(f"anchored_attention: {heads} query heads over {kv_heads} kv heads")
