"""Causal attention over rows of packed documents, without a cache, for training."""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from dflash.kernels import causal_attention_tpu as tpu
from dflash.kernels import implementation as implementations
from dflash.kernels import online_softmax
from dflash.kernels.online_softmax import Partial

# Queries per chunk. Scores exist for one chunk at a time, forward and backward, and a chunk reads
# no key after its last query. A CPU is fastest when the scores of a chunk fit its cache.
CHUNK_TOKENS = 64
# Chunks are unrolled, each with its own number of keys. Longer sequences take longer chunks.
MAX_CHUNKS = 12


def causal_attention(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    segment_ids: jax.Array,
    sinks: jax.Array | None = None,
    *,
    scale: float,
    window: int | None = None,
    chunk_tokens: int | None = None,
    implementation: str = "auto",
) -> jax.Array:
    """Attends from each row to itself and to earlier rows of the same document.

    Padding rows attend to padding; their outputs are finite but meaningless.

    Args:
      queries: [B, T, N, H].
      keys: [B, T, K, H]; N is a multiple of K.
      values: [B, T, K, H].
      segment_ids: int32 [B, T]; rows of one document share an id. 0 is padding.
      sinks: [N]; attention sink of each head, as in `paged_attention`, or None. The kernels do not
        support sinks.
      window: Rows up to its own that a row sees; None for all.
      chunk_tokens: Queries per chunk of the reference; None to derive it from T.
    Returns:
      [B, T, N, H] in the dtype of `queries`.
    Raises:
      ValueError: Shapes are inconsistent, or the kernels do not support them; the message names
        the array.
    """
    _check(queries, keys, values, segment_ids, sinks)
    unsupported = tpu.unsupported(queries, sinks)

    def reference(queries, keys, values, segment_ids):
        attend = functools.partial(_attend_chunk, sinks=sinks, scale=scale, window=window)
        return in_chunks(attend, (queries, segment_ids), (keys, values, segment_ids), chunk_tokens)

    def attend(*arrays):
        return implementations.run(
            implementation,
            *arrays,
            reference=reference,
            pallas=functools.partial(tpu.attend, scale=scale, window=window),
            unsupported=unsupported,
        )

    if implementation == "auto" and not unsupported:
        # Recompute in the backward pass, as the residuals of both implementations would be kept.
        attend = jax.checkpoint(attend)
    return attend(queries, keys, values, segment_ids)


def in_chunks(
    attend: Callable[..., jax.Array],
    here: Sequence[jax.Array],
    so_far: Sequence[jax.Array],
    chunk_tokens: int | None = None,
) -> jax.Array:
    """Computes causal attention chunk by chunk; the backward pass recomputes each chunk.

    Args:
      attend: Function that returns the outputs [B, C, N, H] of a chunk. Its arguments are the
        chunk's rows of each array of `here`, then the rows up to the chunk's end of each array of
        `so_far`.
      here: Arrays [B, T, ...] of which a chunk sees its own rows.
      so_far: Arrays [B, T, ...] of which a chunk sees its own and all earlier rows.
      chunk_tokens: Rows per chunk; None to derive it from T.
    Returns:
      [B, T, N, H].
    """
    length = here[0].shape[1]
    chunk = chunk_tokens or max(CHUNK_TOKENS, -(-length // MAX_CHUNKS))
    attend = jax.checkpoint(attend)
    outputs = []
    for begin in range(0, length, chunk):
        end = min(begin + chunk, length)
        chunk_rows = (array[:, begin:end] for array in here)
        outputs.append(attend(*chunk_rows, *(array[:, :end] for array in so_far)))
    return jnp.concatenate(outputs, axis=1)


def attend_so_far(
    rows: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    query_segments: jax.Array,
    key_segments: jax.Array,
    *,
    scale: float,
    window: int | None = None,
) -> Partial:
    """Attends from a chunk's rows to themselves and to earlier rows of the same document.

    Args:
      rows: [K, B, C·N/K, H]; grouped queries of the last C of S rows.
      keys: [B, S, K, H].
      values: [B, S, K, H].
      query_segments: int32 [B, C]; segment ids of the queries.
      key_segments: int32 [B, S]; segment ids of the keys.
      window: Rows up to its own that a row sees; None for all.
    """
    chunk, context = query_segments.shape[1], key_segments.shape[1]
    same = query_segments[:, :, None] == key_segments[:, None, :]
    visible = same & jnp.tril(jnp.ones((chunk, context), bool), context - chunk)
    if window is not None:
        visible &= jnp.triu(jnp.ones((chunk, context), bool), context - chunk - (window - 1))
    return online_softmax.attend(
        rows,
        keys.transpose(2, 0, 1, 3),
        values.transpose(2, 0, 1, 3),
        jnp.repeat(visible, rows.shape[2] // chunk, axis=1),
        scale=scale,
    )


def _attend_chunk(queries, query_segments, keys, values, key_segments, *, sinks, **view):
    """Attends from queries [B, C, N, H] of the last C of S rows to keys [B, S, K, H]."""
    rows = online_softmax.group_queries(queries, keys.shape[2])
    partial = attend_so_far(rows, keys, values, query_segments, key_segments, **view)
    if sinks is not None:
        partial = online_softmax.with_sinks(partial, sinks)
    normalized = online_softmax.normalize(partial, queries.dtype)
    return online_softmax.ungroup(normalized, queries.shape[1])


def _check(queries, keys, values, segment_ids, sinks):
    batch, length, heads, width = queries.shape
    kv_heads = keys.shape[2]
    expected = {
        "keys": (keys, (batch, length, kv_heads, width)),
        "values": (values, (batch, length, kv_heads, width)),
        "segment_ids": (segment_ids, (batch, length)),
    }
    if sinks is not None:
        expected["sinks"] = (sinks, (heads,))
    implementations.check_shapes(tpu.OP, expected, heads, kv_heads)
