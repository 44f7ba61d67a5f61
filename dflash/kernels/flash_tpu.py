"""Building blocks of the Pallas attention kernels: online softmax in VMEM, and a VMEM budget check.

Scores are in units of log2, so that one multiplication applies both the scale and the base of the
exponential. Each row's running peak is broadcast to all 128 lanes, and its running sum is spread
over them, so that no data moves between lanes until the end.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from dflash.kernels import quantized
from dflash.kernels.quantized import Quantized, Rows

LANES, SUBLANES = 128, 8  # Of a memory tile of 32-bit elements.
LOG2_E = math.log2(math.e)
# Finite, so that a masked score vanishes in exp2 without ever computing inf - inf.
MASKED = -1e30
# The smallest VMEM per core of v5e, v5p, v6e and TPU7x is 64 MiB, some of which Mosaic reserves.
VMEM_BYTES = 56 * 2**20
HEAD_DIMS = (64, 128, 256)


def row_tile(dtype: jnp.dtype) -> int:
    """Returns the rows per memory tile; copies of this dtype begin and end at multiples of it."""
    return 32 // jnp.dtype(dtype).itemsize


def div(a, b: int):
    """Returns a // b for int32 a >= 0.

    `//` would also handle signs, which Mosaic compiles differently per chip.
    """
    return jax.lax.div(a, jnp.int32(b))


def cdiv(a, b: int):
    """Returns ceil(a / b) for int32 a >= 0."""
    return div(a + (b - 1), b)


def rem(a, b: int):
    """Returns a % b for int32 a >= 0."""
    return jax.lax.rem(a, jnp.int32(b))


@dataclasses.dataclass(frozen=True)
class Softmax:
    """References to the online softmax of K heads with R rows each, in float32.

    Attributes:
      peak: [K, R, 128]; largest score, broadcast to all lanes.
      total: [K, R, 128]; its sum over lanes is the sum of exp2(score - peak).
      weighted: [K, R, H]; sum of exp2(score - peak) · value.
      scores: [2, R, S]; scores of a tile that are not yet exponentiated, double-buffered by head.
    """

    peak: jax.Ref
    total: jax.Ref
    weighted: jax.Ref
    scores: jax.Ref

    @staticmethod
    def scratch(heads: int, rows: int, width: int, tile: int) -> list:
        """Returns the scratch shapes of the references."""
        shapes = [(heads, LANES), (heads, LANES), (heads, width), (2, tile)]
        return [pltpu.VMEM((outer, rows, lanes), jnp.float32) for outer, lanes in shapes]

    def clear(self, head) -> None:
        """Initializes a head without keys."""
        self.peak[head] = jnp.full(self.peak.shape[1:], MASKED, jnp.float32)
        self.total[head] = jnp.zeros(self.total.shape[1:], jnp.float32)
        self.weighted[head] = jnp.zeros(self.weighted.shape[1:], jnp.float32)

    def begin(self, head, scores: jax.Array, values: Rows) -> None:
        """Initializes a head with the scores [R, S] and the values [S, H] of its first keys."""
        peak = jnp.broadcast_to(scores.max(axis=-1, keepdims=True), self.peak.shape[1:])
        weights, total = _weigh(scores, peak)
        self.peak[head] = peak
        self.total[head] = total
        self.weighted[head] = _sum_values(weights, values)

    def begin_single(self, head, queries, key, value, scale) -> None:
        """Initializes a head with a single key [1, H] and its value.

        Mosaic does not support matrix products with a single row.
        """
        # There is one scale per row, so that of a single row applies to the whole array.
        key, value = (
            quantized.scaled(*quantized.split(row, jnp.float32)).astype(jnp.float32)
            for row in (key, value)
        )
        raw = queries.astype(jnp.float32) * key
        scores = raw.sum(axis=-1, keepdims=True) * (scale * LOG2_E)
        self.peak[head] = jnp.broadcast_to(scores, self.peak.shape[1:])
        self.total[head] = _first_lane(jnp.ones_like(scores))
        shape = self.weighted.shape[1:]
        self.weighted[head] = jnp.broadcast_to(value, shape)

    def fold_in(self, head, scores: jax.Array, values: Rows) -> None:
        """Adds the scores [R, S] and the values [S, H] of more keys."""
        before = self.peak[head]
        peak = jnp.maximum(before, scores.max(axis=-1, keepdims=True))
        keep = jnp.exp2(before - peak)
        weights, total = _weigh(scores, peak)
        self.peak[head] = peak
        self.total[head] = keep * self.total[head] + total
        seen = _sum_values(weights, values)
        self.weighted[head] = _lanes(keep, seen.shape[-1]) * self.weighted[head] + seen

    def store_scores(self, head, scores: jax.Array) -> None:
        """Runs the first half of `fold_in`: stores scores [R, S] of a tile and updates the peak."""
        before = self.peak[head]
        peak = jnp.maximum(before, scores.max(axis=-1, keepdims=True))
        keep = jnp.exp2(before - peak)
        self.scores[head % 2] = scores
        self.peak[head] = peak
        self.total[head] = keep * self.total[head]
        self.weighted[head] = _lanes(keep, self.weighted.shape[-1]) * self.weighted[head]

    def add_values(self, head, values: Rows) -> None:
        """Runs the second half of `fold_in`: adds the values [S, H] of the stored scores."""
        weights, total = _weigh(self.scores[head % 2], self.peak[head])
        self.total[head] += total
        self.weighted[head] += _sum_values(weights, values)

    def outputs(self, head, sink: jax.Array | None = None) -> jax.Array:
        """Returns the normalized outputs [R, H] of a head.

        Args:
          sink: [R, 1]; score without a value, in units of log2, that is added to the sum.
        """
        total = self.total[head].sum(axis=-1, keepdims=True)
        if sink is not None:
            total += jnp.exp2(sink - self.peak[head][:, :1])
        return self.weighted[head] / total


def dot(a: jax.Array, b: jax.Array, *, transpose_b: bool = False) -> jax.Array:
    """Computes a @ b in float32 [M, N], at the precision of the operands.

    Args:
      a: [M, C].
      b: [C, N], or [N, C] if `transpose_b`.
      transpose_b: Contract with the last dimension of b.
    """
    return _dot(a, b, 1, 1 if transpose_b else 0)


def dot_columns(a: jax.Array, b: jax.Array) -> jax.Array:
    """Computes a.T @ b in float32 [M, N] from a [C, M] and b [C, N], at their precision."""
    return _dot(a, b, 0, 0)


def _dot(a, b, contract_a, contract_b):
    full = jnp.dtype(a.dtype) == jnp.float32
    return jax.lax.dot_general(
        a,
        b,
        (((contract_a,), (contract_b,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if full else jax.lax.Precision.DEFAULT,
        preferred_element_type=jnp.float32,
    )


def scores(queries, keys: Rows, *, scale: float) -> jax.Array:
    """Returns the scores [R, S] of queries [R, H] and keys [S, H], in units of log2."""
    keys, key_scales = quantized.split(keys, queries.dtype)
    raw = dot(queries, keys, transpose_b=True)
    factor = scale * LOG2_E
    return raw * (factor if key_scales is None else factor * key_scales)


def visit_tile(softmax: Softmax, stream, slot, score, mask, filled) -> None:
    """Adds a tile of a stream to the softmax of every head.

    The score products of each head overlap with the exponentials of the head before it.

    Args:
      stream: `TileStream` of the context.
      slot: Buffer of the stream that holds the tile.
      score: Function from (head, keys [S, H], plain or quantized) to scores [R, S].
      mask: Function from (head, scores) to scores in which those of invisible keys are masked.
      filled: Number of valid rows of the tile; None for all.
    """
    heads = softmax.peak.shape[0]

    def store_scores(head):
        softmax.store_scores(head, mask(head, score(head, stream.rows(0, slot, head))))

    store_scores(0)
    for head in range(heads):
        if head + 1 < heads:
            store_scores(head + 1)
        values = stream.rows(1, slot, head)
        if filled is not None:
            # Rows past `filled` have weight zero but were never copied and may be NaN: clear them.
            values = _clear_past(values, filled)
        softmax.add_values(head, values)


def heads_per_step(heads: int) -> int:
    """Returns the heads per grid step: half of them, for chips with two cores, or all if odd."""
    return heads // 2 if heads % 2 == 0 else heads


def tile_rows(capacity: int, largest: int, dtype: jnp.dtype) -> int:
    """Returns the rows per tile of a context: `largest`, or the padded capacity if that is less."""
    unit = row_tile(dtype)
    return min(largest, -(-capacity // unit) * unit)


def compiler_params(*semantics: str) -> pltpu.CompilerParams:
    """Returns the Mosaic parameters of a kernel whose grid dimensions have these semantics."""
    return pltpu.CompilerParams(
        dimension_semantics=semantics,
        vmem_limit_bytes=VMEM_BYTES,
        # Bounds checks cost time on the chip; the interpreter checks bounds in tests.
        disable_bounds_checks=True,
    )


def cost(batch, heads, kv_heads, rows, keys, width, dtype) -> pl.CostEstimate:
    """Returns an upper bound on the cost of attending from `rows` rows to `keys` keys, for XLA."""
    pairs = batch * heads * rows * keys
    read = 2 * batch * kv_heads * keys * width * jnp.dtype(dtype).itemsize
    return pl.CostEstimate(flops=4 * pairs * width, transcendentals=pairs, bytes_accessed=read)


def sink_rows(sinks: jax.Array, kv_heads: int, repeats: int) -> jax.Array:
    """Spreads attention sinks [N] over the rows of a kernel, in units of log2.

    Args:
      sinks: Sink of each query head.
      kv_heads: Key and value heads, K.
      repeats: Consecutive rows of each head of a group.
    Returns:
      float32 [K, N/K · repeats, 128], equal in all lanes.
    """
    grouped = sinks.astype(jnp.float32).reshape(kv_heads, -1) * LOG2_E
    rows = jnp.repeat(grouped, repeats, axis=1)
    return jnp.broadcast_to(rows[..., None], (*rows.shape, LANES))


def check_vmem(op: str, arrays: dict[str, tuple[tuple[int, ...], jnp.dtype]]) -> None:
    """Checks that the arrays of a kernel fit in VMEM.

    Args:
      arrays: Shape, over all buffers, and dtype of each array by name.
    Raises:
      ValueError: The arrays exceed `VMEM_BYTES`; the message lists every array with its size.
    """
    sizes = {name: padded_bytes(shape, dtype) for name, (shape, dtype) in arrays.items()}
    total = sum(sizes.values())
    if total > VMEM_BYTES:
        parts = ", ".join(
            f"{name} {'×'.join(map(str, arrays[name][0]))} {jnp.dtype(arrays[name][1]).name}"
            f" {size / 2**20:.1f}"
            for name, size in sizes.items()
        )
        raise ValueError(
            f"{op}: needs {total / 2**20:.1f} MiB of VMEM, "
            f"more than {VMEM_BYTES / 2**20:.0f}: {parts}"
        )


def padded_bytes(shape: tuple[int, ...], dtype: jnp.dtype) -> int:
    """Returns the bytes of an array in VMEM, where both last dimensions are padded to tiles."""
    *outer, rows, lanes = shape
    tile = row_tile(dtype)
    padded = -(-rows // tile) * tile * (-(-lanes // LANES) * LANES)
    return math.prod(outer) * padded * jnp.dtype(dtype).itemsize


def _clear_past(rows: Rows, filled, axis: int = 0) -> Rows:
    """Replaces entries at and past `filled` along `axis` by zeros."""
    if isinstance(rows, Quantized):
        cleared = _clear_past(rows.values, filled), _clear_past(rows.scales, filled, axis=1)
        return Quantized(*cleared)
    shape = tuple(length if i == axis else 1 for i, length in enumerate(rows.shape))
    present = jax.lax.broadcasted_iota(jnp.int32, shape, axis) < filled
    return jnp.where(present, rows, jnp.zeros_like(rows))


def _sum_values(weights, values: Rows):
    """Computes weights [R, S] @ values [S, H] in float32 [R, H]."""
    values, value_scales = quantized.split(values, values.dtype)
    return dot(quantized.scaled(weights, value_scales).astype(values.dtype), values)


def _weigh(scores, peak):
    """Returns exp2(scores - peak) [R, S], and partial sums [R, 128] of each row."""
    keys = scores.shape[1]
    if keys % LANES:
        weights = jnp.exp2(scores - peak[:, :1])
        return weights, _first_lane(weights.sum(axis=-1, keepdims=True))
    parts = [jnp.exp2(scores[:, i : i + LANES] - peak) for i in range(0, keys, LANES)]
    return jnp.concatenate(parts, axis=-1), sum(parts[1:], parts[0])


def _first_lane(column):
    """Pads a column [R, 1] with zeros to [R, 128]."""
    first = jax.lax.broadcasted_iota(jnp.int32, (column.shape[0], LANES), 1) == 0
    return jnp.where(first, column, 0.0)


def _lanes(spread, width):
    """Broadcasts [R, 128], whose lanes are equal, to [R, width]."""
    if width <= LANES:
        return spread[:, :width]
    return jnp.concatenate([spread] * (width // LANES), axis=-1)
