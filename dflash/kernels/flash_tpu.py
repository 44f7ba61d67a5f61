"""Shared by the Pallas attention kernels: a running softmax in VMEM, and a check of VMEM's size.

Scores are kept in units of log2, so that one multiplication serves both the scale and the base of
the exponential. Each row's running peak is kept in all 128 lanes, and its running sum is spread
over them, so that no lane moves until the end.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from dflash.kernels import quantized as quantized
from dflash.kernels.quantized import Quantised, Rows

LANES = 128
LOG2_E = math.log2(math.e)
# Large and finite: a masked score must vanish in exp2 without ever making inf - inf.
MASKED = -1e30
# The smallest VMEM of a core among v5e, v5p, v6e and TPU7x is 64 MiB; Mosaic keeps some itself.
VMEM_BYTES = 56 * 2**20
HEAD_DIMS = (64, 128, 256)


def row_tile(dtype: jnp.dtype) -> int:
    """Rows of one tile of memory: copies of this dtype begin and end at multiples of them."""
    return 32 // jnp.dtype(dtype).itemsize


def div(a, b: int):
    """a // b of int32 a >= 0, without the sign handling of `//`, which Mosaic compiles per chip."""
    return jax.lax.div(a, jnp.int32(b))


def cdiv(a, b: int):
    """ceil(a / b) of int32 a >= 0."""
    return div(a + (b - 1), b)


def rem(a, b: int):
    """a % b of int32 a >= 0."""
    return jax.lax.rem(a, jnp.int32(b))


@dataclasses.dataclass(frozen=True)
class Softmax:
    """References to the running softmax of K heads of R rows; float32.

    Attributes:
      peak: [K, R, 128]; the largest score, in every lane.
      total: [K, R, 128]; the sum over lanes is the sum of exp2(score - peak).
      weighted: [K, R, H]; sum of exp2(score - peak) · value.
      scores: [2, R, S]; of a whole tile before weighting, alternating between two heads.
    """

    peak: jax.Ref
    total: jax.Ref
    weighted: jax.Ref
    scores: jax.Ref

    @staticmethod
    def scratch(heads: int, rows: int, width: int, tile: int) -> list:
        """Scratch shapes of the references."""
        shapes = [(heads, LANES), (heads, LANES), (heads, width), (2, tile)]
        return [pltpu.VMEM((outer, rows, lanes), jnp.float32) for outer, lanes in shapes]

    def begin(self, head, scores: jax.Array, values: Rows) -> None:
        """Starts a head over with scores [R, S] of its first keys and their values [S, H]."""
        peak = jnp.broadcast_to(scores.max(axis=-1, keepdims=True), self.peak.shape[1:])
        weights, total = _weigh(scores, peak)
        self.peak[head] = peak
        self.total[head] = total
        self.weighted[head] = _sum_values(weights, values)

    def begin_single(self, head, queries, key, value, scale) -> None:
        """Starts a head over with a single key [1, H] and its value; Mosaic has no such product."""
        # One scale a row: with a single row, of all that there is.
        key, value = (
            quantized.scaled(*quantized.split(row, jnp.float32)).astype(jnp.float32)
            for row in (key, value)
        )
        raw = queries.astype(jnp.float32) * key
        found = raw.sum(axis=-1, keepdims=True) * (scale * LOG2_E)
        self.peak[head] = jnp.broadcast_to(found, self.peak.shape[1:])
        self.total[head] = _first_lane(jnp.ones_like(found))
        shape = self.weighted.shape[1:]
        self.weighted[head] = jnp.broadcast_to(value, shape)

    def fold_in(self, head, scores: jax.Array, values: Rows) -> None:
        """Adds scores [R, S] of more keys and their values [S, H]."""
        before = self.peak[head]
        peak = jnp.maximum(before, scores.max(axis=-1, keepdims=True))
        keep = jnp.exp2(before - peak)
        weights, total = _weigh(scores, peak)
        self.peak[head] = peak
        self.total[head] = keep * self.total[head] + total
        seen = _sum_values(weights, values)
        self.weighted[head] = _lanes(keep, seen.shape[-1]) * self.weighted[head] + seen

    def weigh_later(self, head, scores: jax.Array) -> None:
        """The first half of `fold_in`: keeps scores [R, S] of a whole tile, moves the peak."""
        before = self.peak[head]
        peak = jnp.maximum(before, scores.max(axis=-1, keepdims=True))
        keep = jnp.exp2(before - peak)
        self.scores[head % 2] = scores
        self.peak[head] = peak
        self.total[head] = keep * self.total[head]
        self.weighted[head] = _lanes(keep, self.weighted.shape[-1]) * self.weighted[head]

    def weigh_now(self, head, values: Rows) -> None:
        """The second half: adds the values [S, H] of the tile."""
        weights, total = _weigh(self.scores[head % 2], self.peak[head])
        self.total[head] += total
        self.weighted[head] += _sum_values(weights, values)

    def outputs(self, head, sink: jax.Array | None = None) -> jax.Array:
        """[R, H], normalised; a sink [R, 1] is one more score, in log2, that has no value."""
        total = self.total[head].sum(axis=-1, keepdims=True)
        if sink is not None:
            total += jnp.exp2(sink - self.peak[head][:, :1])
        return self.weighted[head] / total


def dot(a: jax.Array, b: jax.Array, *, transpose_b: bool = False) -> jax.Array:
    """a [M, C] · b [C, N] (or [N, C]) -> float32 [M, N], at the precision of the operands."""
    return _dot(a, b, 1, 1 if transpose_b else 0)


def dot_columns(a: jax.Array, b: jax.Array) -> jax.Array:
    """a [C, M] · b [C, N] -> float32 [M, N], at the precision of the operands."""
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
    """Scores [R, S] of queries [R, H] and keys [S, H], in units of log2."""
    keys, key_scales = quantized.split(keys, queries.dtype)
    raw = dot(queries, keys, transpose_b=True)
    factor = scale * LOG2_E
    return raw * (factor if key_scales is None else factor * key_scales)


def visit_tile(softmax: Softmax, stream, half, score, mask, filled) -> None:
    """Adds a whole tile of a stream to the softmax of every head.

    The products of the next head are under way while those of one are weighed.

    Args:
      softmax: of all heads.
      stream: a TileStream.
      half: half of the double buffer that holds the tile.
      score: (head, keys [S, H], plain or quantized) -> scores [R, S].
      mask: (head, scores) -> scores, those of keys that are not to be seen replaced.
      filled: rows of the tile that hold something; None for all.
    """
    heads = softmax.peak.shape[0]

    def weigh_later(head):
        softmax.weigh_later(head, mask(head, score(head, stream.rows(0, half, head))))

    weigh_later(0)
    for head in range(heads):
        if head + 1 < heads:
            weigh_later(head + 1)
        values = stream.rows(1, half, head)
        if filled is not None:
            # Their weight is zero, which is not enough: rows that were never copied may be NaN.
            values = _clear_past(values, filled)
        softmax.weigh_now(head, values)


def heads_per_step(heads: int) -> int:
    """Heads that one step serves: half of them, for a chip with two cores, or all."""
    return heads // 2 if heads % 2 == 0 else heads


def tile_rows(capacity: int, wanted: int, dtype: jnp.dtype) -> int:
    """Rows per tile of a context of `capacity`: what is wanted, or what there is."""
    unit = row_tile(dtype)
    return min(wanted, -(-capacity // unit) * unit)


def compiler_params(*semantics: str) -> pltpu.CompilerParams:
    """How Mosaic is to compile a kernel whose grid has these dimensions."""
    return pltpu.CompilerParams(
        dimension_semantics=semantics,
        vmem_limit_bytes=VMEM_BYTES,
        # Interpret mode is where stray copies are looked for; on the chip looking costs time.
        disable_bounds_checks=True,
    )


def cost(batch, heads, kv_heads, rows, keys, width, dtype) -> pl.CostEstimate:
    """Of attending from `rows` rows over `keys` keys: the most it can be, for XLA to plan by."""
    pairs = batch * heads * rows * keys
    read = 2 * batch * kv_heads * keys * width * jnp.dtype(dtype).itemsize
    return pl.CostEstimate(flops=4 * pairs * width, transcendentals=pairs, bytes_accessed=read)


def check_vmem(op: str, arrays: dict[str, tuple[tuple[int, ...], jnp.dtype]]) -> int:
    """Adds up what a kernel keeps in VMEM.

    Args:
      op: for the message.
      arrays: name -> shape (of all buffers together) and dtype.
    Returns:
      bytes, with the padding of the last two dimensions to tiles.
    Raises:
      ValueError: it does not fit; the message names every array with its size.
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
            f"{op}: needs {total / 2**20:.1f} MiB of VMEM of {VMEM_BYTES / 2**20:.0f}: {parts}"
        )
    return total


def padded_bytes(shape: tuple[int, ...], dtype: jnp.dtype) -> int:
    """Bytes of an array in VMEM, where tiles of rows and 128 lanes are never split."""
    *outer, rows, lanes = shape
    tile = row_tile(dtype)
    padded = -(-rows // tile) * tile * (-(-lanes // LANES) * LANES)
    return math.prod(outer) * padded * jnp.dtype(dtype).itemsize


def _clear_past(rows: Rows, filled, axis: int = 0) -> Rows:
    """Rows [S, H] with zeros from `filled` on; `axis` is that of the rows."""
    if isinstance(rows, Quantised):
        cleared = _clear_past(rows.values, filled), _clear_past(rows.scales, filled, axis=1)
        return Quantised(*cleared)
    shape = tuple(length if i == axis else 1 for i, length in enumerate(rows.shape))
    present = jax.lax.broadcasted_iota(jnp.int32, shape, axis) < filled
    return jnp.where(present, rows, jnp.zeros_like(rows))


def _sum_values(weights, values: Rows):
    """weights [R, S] · values [S, H] -> float32 [R, H]."""
    values, value_scales = quantized.split(values, values.dtype)
    return dot(quantized.scaled(weights, value_scales).astype(values.dtype), values)


def _weigh(scores, peak):
    """exp2(scores - peak) [R, S], and its sum, spread over 128 lanes."""
    keys = scores.shape[1]
    if keys % LANES:
        weights = jnp.exp2(scores - peak[:, :1])
        return weights, _first_lane(weights.sum(axis=-1, keepdims=True))
    parts = [jnp.exp2(scores[:, i : i + LANES] - peak) for i in range(0, keys, LANES)]
    return jnp.concatenate(parts, axis=-1), sum(parts[1:], parts[0])


def _first_lane(column):
    """[R, 1] -> [R, 128] with zeros beside it."""
    first = jax.lax.broadcasted_iota(jnp.int32, (column.shape[0], LANES), 1) == 0
    return jnp.where(first, column, 0.0)


def _lanes(spread, width):
    """[R, 128] with equal lanes -> [R, width]."""
    if width <= LANES:
        return spread[:, :width]
    return jnp.concatenate([spread] * (width // LANES), axis=-1)
