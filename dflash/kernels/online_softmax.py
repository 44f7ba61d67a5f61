"""Online softmax attention: accumulates keys and values tile by tile, normalizes once at the end.

Scores exist for one tile of keys at a time. The number of tiles may be a traced value, so the cost
depends on the length in use, not on the capacity of the cache.

Source: Milakov and Gimelshein 2018; Dao et al. 2022.

Inside this file, queries are [K, B, R, H] with R = T·(N/K) rows, one per query and query head of
the group, so that keys and values [K, B, S, H] are read in their own layout and never expanded.
"""

import dataclasses

import jax
import jax.numpy as jnp

from dflash.kernels import quantized

# Finite, so that a masked score vanishes in exp without ever computing inf - inf.
MASKED = -1e30


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Partial:
    """Unnormalized attention over the keys seen so far, in float32.

    Attributes:
      peak: [K, B, R, 1]; largest score.
      total: [K, B, R, 1]; sum of exp(score - peak).
      weighted: [K, B, R, H]; sum of exp(score - peak) · value.
    """

    peak: jax.Array
    total: jax.Array
    weighted: jax.Array


def group_queries(queries: jax.Array, num_kv_heads: int) -> jax.Array:
    """Transposes queries [B, T, N, H] to [K, B, T·N/K, H].

    Rows are ordered by query, then by head of the group.
    """
    batch, length, heads, width = queries.shape
    group = heads // num_kv_heads
    grouped = queries.reshape(batch, length, num_kv_heads, group, width)
    return grouped.transpose(2, 0, 1, 3, 4).reshape(num_kv_heads, batch, length * group, width)


def ungroup(rows: jax.Array, length: int) -> jax.Array:
    """Reverses `group_queries`: transposes [K, B, T·N/K, H] to [B, T, N, H]."""
    kv_heads, batch, grouped, width = rows.shape
    group = grouped // length
    split = rows.reshape(kv_heads, batch, length, group, width).transpose(1, 2, 0, 3, 4)
    return split.reshape(batch, length, kv_heads * group, width)


def attend(
    queries: jax.Array,
    keys: quantized.Rows,
    values: quantized.Rows,
    visible: jax.Array,
    *,
    scale: float,
) -> Partial:
    """Computes the attention of all rows over one tile of keys.

    Args:
      queries: [K, B, R, H].
      keys: [K, B, S, H].
      values: [K, B, S, H].
      visible: bool, broadcastable to [B, R, S]; keys that each row sees.
    """
    keys, key_scales = quantized.split(keys, queries.dtype)
    values, value_scales = quantized.split(values, queries.dtype)
    scores = scale * jnp.einsum("kbrh,kbsh->kbrs", queries, keys, preferred_element_type="float32")
    scores = quantized.scaled(scores, key_scales)
    scores = jnp.where(visible, scores, MASKED)
    # The peak cancels out, as it scales sums and weights alike, so its gradient is zero.
    peak = jax.lax.stop_gradient(scores.max(axis=-1, keepdims=True))
    # A row that sees no key of this tile has peak = MASKED; its weights must be 0, not 1.
    weights = jnp.where(visible, jnp.exp(scores - peak), 0.0)
    on_values = quantized.scaled(weights, value_scales).astype(values.dtype)
    weighted = jnp.einsum("kbrs,kbsh->kbrh", on_values, values, preferred_element_type="float32")
    return Partial(peak, weights.sum(axis=-1, keepdims=True), weighted)


def nothing(queries: jax.Array) -> Partial:
    """Returns the attention of queries [K, B, R, H] to no keys."""
    column = jnp.zeros((*queries.shape[:-1], 1), jnp.float32)
    return Partial(column + MASKED, column, jnp.zeros(queries.shape, jnp.float32))


def merge(a: Partial, b: Partial) -> Partial:
    """Combines the attention over two disjoint sets of keys."""
    peak = jnp.maximum(a.peak, b.peak)
    keep_a, keep_b = jnp.exp(a.peak - peak), jnp.exp(b.peak - peak)
    return Partial(
        peak, keep_a * a.total + keep_b * b.total, keep_a * a.weighted + keep_b * b.weighted
    )


def with_sinks(partial: Partial, sinks: jax.Array) -> Partial:
    """Adds each head's attention sink, a score [N] without a value, to its rows' softmax sums.

    Source: Xiao et al. 2023, arXiv 2309.17453; learned, as in gpt-oss.
    """
    kv_heads, _, rows, _ = partial.peak.shape
    group = sinks.reshape(kv_heads, 1, 1, -1).astype(jnp.float32)
    shape = (kv_heads, 1, rows // group.shape[-1], group.shape[-1])
    peaks = jnp.broadcast_to(group, shape).reshape(kv_heads, 1, rows, 1)
    peaks = jnp.broadcast_to(peaks, partial.peak.shape)
    return merge(partial, Partial(peaks, jnp.ones_like(peaks), jnp.zeros_like(partial.weighted)))


def normalize(partial: Partial, dtype: jnp.dtype) -> jax.Array:
    """Returns attention outputs [K, B, R, H]; every row must have seen at least one key."""
    return (partial.weighted / partial.total).astype(dtype)
