"""Causal attention over rows that hold several documents each; the cache-free form for training."""

import functools

import jax
import jax.numpy as jnp

from dflash.kernels import online_softmax

# Queries per step. Scores exist for one step at a time, forward and backward, and a step looks at
# no key after its last query. A CPU is fastest when a step's scores stay in its cache.
CHUNK_TOKENS = 64
# Steps are unrolled, each with its own number of keys. Longer sequences take longer steps.
MAX_CHUNKS = 12


def causal_attention(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    segment_ids: jax.Array,
    *,
    scale: float,
    chunk_tokens: int | None = None,
) -> jax.Array:
    """Attends from each row to itself and to earlier rows of the same document.

    Rows of padding attend to padding: what they return is finite and means nothing.

    Args:
      queries: [B, T, N, H].
      keys: [B, T, K, H]; N is a multiple of K.
      values: [B, T, K, H].
      segment_ids: int32 [B, T]; rows of one document share a number, 0 is padding.
      scale: factor on the scores.
      chunk_tokens: queries per step; None for a length that suits T.
    Returns:
      [B, T, N, H] in the dtype of `queries`.
    Raises:
      ValueError: shapes that do not fit each other; the message names them.
    """
    _check(queries, keys, values, segment_ids)
    length = queries.shape[1]
    chunk = chunk_tokens or default_chunk(length)
    attend = jax.checkpoint(functools.partial(_attend_chunk, scale=scale))
    outputs = []
    for begin in range(0, length, chunk):
        end = min(begin + chunk, length)
        outputs.append(
            attend(
                queries[:, begin:end],
                keys[:, :end],
                values[:, :end],
                segment_ids[:, begin:end],
                segment_ids[:, :end],
            )
        )
    return jnp.concatenate(outputs, axis=1)


def default_chunk(length: int) -> int:
    """Queries per step that suit rows of `length` tokens."""
    return max(CHUNK_TOKENS, -(-length // MAX_CHUNKS))


def visible_keys(query_segments: jax.Array, key_segments: jax.Array) -> jax.Array:
    """bool [B, C, S]; which of S keys each of C queries sees, both ending at the same row."""
    chunk, context = query_segments.shape[1], key_segments.shape[1]
    same = query_segments[:, :, None] == key_segments[:, None, :]
    return same & jnp.tril(jnp.ones((chunk, context), bool), context - chunk)


def _attend_chunk(queries, keys, values, query_segments, key_segments, *, scale):
    """Queries [B, C, N, H] that end where the keys [B, S, K, H] end."""
    chunk, kv_heads = queries.shape[1], keys.shape[2]
    visible = visible_keys(query_segments, key_segments)
    partial = online_softmax.attend(
        online_softmax.group_queries(queries, kv_heads),
        keys.transpose(2, 0, 1, 3),
        values.transpose(2, 0, 1, 3),
        jnp.repeat(visible, queries.shape[2] // kv_heads, axis=1),
        scale=scale,
    )
    return online_softmax.ungroup(online_softmax.normalise(partial, queries.dtype), chunk)


def _check(queries, keys, values, segment_ids):
    batch, length, heads, width = queries.shape
    kv_heads = keys.shape[2]
    expected = {
        "keys": (keys, (batch, length, kv_heads, width)),
        "values": (values, (batch, length, kv_heads, width)),
        "segment_ids": (segment_ids, (batch, length)),
    }
    for name, (array, shape) in expected.items():
        if array.shape != shape:
            raise ValueError(f"causal_attention: {name} is {array.shape}, expected {shape}")
    if heads % kv_heads:
        raise ValueError(f"causal_attention: {heads} query heads over {kv_heads} kv heads")
