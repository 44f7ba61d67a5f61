"""Causal attention over rows that hold several documents each; the cache-free form for training."""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from dflash.kernels import causal_attention_tpu as tpu
from dflash.kernels import implementation as implementations
from dflash.kernels import online_softmax
from dflash.kernels.online_softmax import Partial

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
    implementation: str = "auto",
) -> jax.Array:
    """Attends from each row to itself and to earlier rows of the same document.

    Rows of padding attend to padding: what they return is finite and means nothing.

    Args:
      queries: [B, T, N, H].
      keys: [B, T, K, H]; N is a multiple of K.
      values: [B, T, K, H].
      segment_ids: int32 [B, T]; rows of one document share a number, 0 is padding.
      scale: factor on the scores.
      chunk_tokens: queries per step of the reference; None for a length that suits T.
      implementation: see `implementation.run`.
    Returns:
      [B, T, N, H] in the dtype of `queries`.
    Raises:
      ValueError: shapes that do not fit each other, or not the kernels; the message names them.
    """
    _check(queries, keys, values, segment_ids)
    unsupported = tpu.unsupported(queries)

    def reference(queries, keys, values, segment_ids):
        attend = functools.partial(_attend_chunk, scale=scale)
        return in_chunks(attend, (queries, segment_ids), (keys, values, segment_ids), chunk_tokens)

    def attend(*arrays):
        return implementations.run(
            implementation,
            *arrays,
            reference=reference,
            pallas=functools.partial(tpu.attend, scale=scale),
            unsupported=unsupported,
        )

    if implementation == "auto" and not unsupported:
        # What each implementation keeps for its backward pass would be kept for both.
        attend = jax.checkpoint(attend)
    return attend(queries, keys, values, segment_ids)


def in_chunks(
    attend: Callable[..., jax.Array],
    here: Sequence[jax.Array],
    so_far: Sequence[jax.Array],
    chunk_tokens: int | None = None,
) -> jax.Array:
    """Runs a causal attention chunk by chunk, forward and again backward.

    Args:
      attend: from the chunk's rows of all `here` and the rows up to its last of all `so_far`, both
        as arguments in order, to the output [B, C, N, H] of its C rows.
      here: each [B, T, ...].
      so_far: each [B, T, ...].
      chunk_tokens: rows of a chunk; None for a length that suits T.
    Returns:
      [B, T, N, H].
    """
    length = here[0].shape[1]
    chunk = chunk_tokens or max(CHUNK_TOKENS, -(-length // MAX_CHUNKS))
    attend = jax.checkpoint(attend)
    outputs = []
    for begin in range(0, length, chunk):
        end = min(begin + chunk, length)
        own = (array[:, begin:end] for array in here)
        outputs.append(attend(*own, *(array[:, :end] for array in so_far)))
    return jnp.concatenate(outputs, axis=1)


def attend_so_far(
    rows: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    query_segments: jax.Array,
    key_segments: jax.Array,
    *,
    scale: float,
) -> Partial:
    """Attention of a chunk's rows to themselves and to earlier rows of the same document.

    Args:
      rows: [K, B, C·N/K, H]; grouped queries, of which the last one stands where the keys end.
      keys: [B, S, K, H].
      values: [B, S, K, H].
      query_segments: int32 [B, C].
      key_segments: int32 [B, S].
      scale: factor on the scores.
    """
    chunk, context = query_segments.shape[1], key_segments.shape[1]
    same = query_segments[:, :, None] == key_segments[:, None, :]
    visible = same & jnp.tril(jnp.ones((chunk, context), bool), context - chunk)
    return online_softmax.attend(
        rows,
        keys.transpose(2, 0, 1, 3),
        values.transpose(2, 0, 1, 3),
        jnp.repeat(visible, rows.shape[2] // chunk, axis=1),
        scale=scale,
    )


def _attend_chunk(queries, query_segments, keys, values, key_segments, *, scale):
    """Queries [B, C, N, H] that end where the keys [B, S, K, H] end."""
    rows = online_softmax.group_queries(queries, keys.shape[2])
    partial = attend_so_far(rows, keys, values, query_segments, key_segments, scale=scale)
    whole = online_softmax.normalise(partial, queries.dtype)
    return online_softmax.ungroup(whole, queries.shape[1])


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
