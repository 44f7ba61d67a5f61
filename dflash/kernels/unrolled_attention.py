"""Attention of one step of an unrolled drafter: causal over a first step, and over its own rows.

Row i of step s sees the keys that the first step made at rows 0 … i of its document, and those that
the steps between made at row i itself. The cache-free form for training.

Source: the training-time test of EAGLE-3, arXiv 2503.01840, figure 6.
"""

import functools

import jax
import jax.numpy as jnp

from dflash.kernels import causal_attention, online_softmax
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
    """Attends from each row to a first step's rows up to it, and to later steps at its own place.

    Rows of padding attend to padding: what they return is finite and means nothing.

    Args:
      queries: [B, T, N, H].
      keys: [B, T, J, K, H]; of J >= 1 later steps, the one of the queries among them. N is a
        multiple of K.
      values: [B, T, J, K, H].
      first_keys: [B, T, K, H]; of the first step.
      first_values: [B, T, K, H].
      segment_ids: int32 [B, T]; rows of one document share a number, 0 is padding.
      scale: factor on the scores.
      chunk_tokens: queries per step of the computation; None for a length that suits T.
    Returns:
      [B, T, N, H] in the dtype of `queries`.
    Raises:
      ValueError: shapes that do not fit each other; the message names them.
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
    """Queries [B, C, N, H] that end where the first step's keys [B, S, K, H] end."""
    rows = online_softmax.group_queries(queries, first_keys.shape[2])
    partial = online_softmax.merge(
        causal_attention.attend_so_far(
            rows, first_keys, first_values, query_segments, key_segments, scale=scale
        ),
        _attend_own(rows, keys, values, scale),
    )
    whole = online_softmax.normalise(partial, queries.dtype)
    return online_softmax.ungroup(whole, queries.shape[1])


def _attend_own(rows: jax.Array, keys: jax.Array, values: jax.Array, scale: float) -> Partial:
    """Rows [K, B, C·N/K, H] over the J keys [B, C, J, K, H] of their own place."""
    kv_heads, batch, grouped, width = rows.shape
    split = rows.reshape(kv_heads, batch, keys.shape[1], -1, width)

    # Sums rather than products of matrices: J and N/K are a handful, too small to be worth one.
    def along(array):
        return array.astype(jnp.float32).transpose(3, 0, 1, 2, 4)[
            :, :, :, None
        ]  # [K, B, C, 1, J, H]

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
    for name, (array, shape) in expected.items():
        if array.shape != shape:
            raise ValueError(f"unrolled_attention: {name} is {array.shape}, expected {shape}")
    if heads % kv_heads or not later:
        raise ValueError(
            f"unrolled_attention: {heads} query heads over {kv_heads} kv heads, {later} later steps"
        )
