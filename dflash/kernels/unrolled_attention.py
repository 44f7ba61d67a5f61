"""Attention of one step of an unrolled drafter, without a cache, for training.

Row i of step s sees the first step's keys at rows 0 … i of its document, and the keys at row i of
the second to s-th steps.

Source: the training-time test of EAGLE-3, arXiv 2503.01840, figure 6.
"""

import functools

import jax
import jax.numpy as jnp

from dflash.kernels import causal_attention, implementation, online_softmax
from dflash.kernels.online_softmax import Partial


def unrolled_attention(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    first_keys: jax.Array,
    first_values: jax.Array,
    segment_ids: jax.Array,
    *,
    scale: float,
    chunk_tokens: int | None = None,
) -> jax.Array:
    """Attends from each row to the first step's rows up to it, and to later steps at the same row.

    Padding rows attend to padding; their outputs are finite but meaningless.

    Args:
      queries: [B, T, N, H].
      keys: [B, T, J, K, H]; keys of J >= 1 later steps, including the queries' own. N is a multiple
        of K.
      values: [B, T, J, K, H].
      first_keys: [B, T, K, H]; keys of the first step.
      first_values: [B, T, K, H]; values of the first step.
      segment_ids: int32 [B, T]; rows of one document share an id. 0 is padding.
      chunk_tokens: Queries per chunk; None to derive it from T.
    Returns:
      [B, T, N, H] in the dtype of `queries`.
    Raises:
      ValueError: Shapes are inconsistent; the message names the array.
    """
    _check(queries, keys, values, first_keys, first_values, segment_ids)
    return causal_attention.in_chunks(
        functools.partial(_attend_chunk, scale=scale),
        (queries, keys, values, segment_ids),
        (first_keys, first_values, segment_ids),
        chunk_tokens,
    )


def _attend_chunk(
    queries, keys, values, query_segments, first_keys, first_values, key_segments, *, scale
):
    """Attends from queries [B, C, N, H] of the last C of S rows to all steps' keys."""
    rows = online_softmax.group_queries(queries, first_keys.shape[2])
    partial = online_softmax.merge(
        causal_attention.attend_so_far(
            rows, first_keys, first_values, query_segments, key_segments, scale=scale
        ),
        _attend_own(rows, keys, values, scale),
    )
    normalized = online_softmax.normalize(partial, queries.dtype)
    return online_softmax.ungroup(normalized, queries.shape[1])


def _attend_own(rows: jax.Array, keys: jax.Array, values: jax.Array, scale: float) -> Partial:
    """Attends from rows [K, B, C·N/K, H] to the J keys [B, C, J, K, H] at their own position."""
    kv_heads, batch, grouped, width = rows.shape
    split = rows.reshape(kv_heads, batch, keys.shape[1], -1, width)

    # Elementwise products and sums, since J and N/K are too small for matrix products.
    def along(array):
        by_head = array.astype(jnp.float32).transpose(3, 0, 1, 2, 4)
        return by_head[:, :, :, None]  # [K, B, C, 1, J, H]

    scores = scale * jnp.sum(split.astype(jnp.float32)[..., None, :] * along(keys), axis=-1)
    peak = jax.lax.stop_gradient(scores.max(axis=-1, keepdims=True))
    weights = jnp.exp(scores - peak)
    weighted = jnp.sum(weights[..., None] * along(values), axis=-2)
    total = weights.sum(axis=-1, keepdims=True)
    return Partial(*(x.reshape(kv_heads, batch, grouped, -1) for x in (peak, total, weighted)))


def _check(queries, keys, values, first_keys, first_values, segment_ids):
    batch, length, heads, width = queries.shape
    later, kv_heads = keys.shape[2:4]
    expected = {
        "keys": (keys, (batch, length, later, kv_heads, width)),
        "values": (values, (batch, length, later, kv_heads, width)),
        "first_keys": (first_keys, (batch, length, kv_heads, width)),
        "first_values": (first_values, (batch, length, kv_heads, width)),
        "segment_ids": (segment_ids, (batch, length)),
    }
    implementation.check_shapes("unrolled_attention", expected)
    if heads % kv_heads or not later:
        raise ValueError(
            f"unrolled_attention: {heads} query heads and {later} later steps, "
            f"expected a multiple of {kv_heads} kv heads and at least 1 step"
        )
