"""The Pallas kernels of anchored attention, forward and backward; see anchored_attention.py.

A step works on some blocks of one sequence, all query heads of one kv head, against one tile of
the context; tiles that none of its blocks sees are neither fetched nor looked at. Scores are kept
transposed, [keys, rows]: what there is one of per row (where its context begins and ends, its peak,
its sum) then lies along the lanes, is stored without padding, and is never moved between lanes. The
mask is never stored: it is a comparison of key positions with the bounds of each row.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from dflash.kernels import flash_tpu
from dflash.kernels.flash_tpu import MASKED
from dflash.kernels.tuning import BlockSizes

OP = "anchored_attention"
# Rows of the array of row bounds; as many as a tile of memory has.
BEGIN, END, DOCUMENT, BLOCK, WITHIN, BOUNDS = 0, 1, 2, 3, 4, 8


class Plan:
    """Shapes of one call: how it is cut up.

    Arrays of the kernels: queries [B, K, tiles, R, H] with R = blocks · N/K · rows of a block, in
    that order; keys and values of blocks [B, K, tiles, blocks · rows, H]; context [B, K, context
    tiles, S, H].
    """

    def __init__(self, queries, keys, context_keys, sizes: BlockSizes):
        self.batch, self.blocks, self.block, self.heads, self.width = queries.shape
        self.kv_heads, self.length = keys.shape[3], context_keys.shape[1]
        self.dtype = jnp.dtype(queries.dtype)
        self.group = self.heads // self.kv_heads
        wanted = max(1, sizes.queries // (self.group * self.block))
        self.step_blocks = min(wanted, self.blocks)
        self.tiles = -(-self.blocks // self.step_blocks)
        self.rows = self.step_blocks * self.group * self.block
        self.own = self.step_blocks * self.block
        self.tile = flash_tpu.tile_rows(self.length, sizes.keys, self.dtype)
        self.context_tiles = -(-self.length // self.tile)

    def split_queries(self, array):
        """[B, A, R, N, H] -> [B, K, tiles, R', H]."""
        tiled = self._pad_blocks(array).reshape(
            self.batch, self.tiles, self.step_blocks, self.block, self.kv_heads, self.group, -1
        )
        return tiled.transpose(0, 4, 1, 2, 5, 3, 6).reshape(
            self.batch, self.kv_heads, self.tiles, self.rows, self.width
        )

    def join_queries(self, array):
        """The inverse of `split_queries`."""
        tiled = array.reshape(
            self.batch, self.kv_heads, self.tiles, self.step_blocks, self.group, self.block, -1
        ).transpose(0, 2, 3, 5, 1, 4, 6)
        shape = (self.batch, -1, self.block, self.heads, self.width)
        return tiled.reshape(shape)[:, : self.blocks]

    def split_blocks(self, array):
        """[B, A, R, K, H] -> [B, K, tiles, blocks · R, H]."""
        padded = self._pad_blocks(array)
        tiled = padded.reshape(self.batch, self.tiles, self.own, self.kv_heads, self.width)
        return tiled.transpose(0, 3, 1, 2, 4)

    def join_blocks(self, array):
        """The inverse of `split_blocks`."""
        shape = (self.batch, -1, self.block, self.kv_heads, self.width)
        return array.transpose(0, 2, 3, 1, 4).reshape(shape)[:, : self.blocks]

    def split_context(self, array):
        """[B, T, K, H] -> [B, K, context tiles, S, H]."""
        padding = self.context_tiles * self.tile - self.length
        padded = jnp.pad(array, ((0, 0), (0, padding), (0, 0), (0, 0))).swapaxes(1, 2)
        return padded.reshape(self.batch, self.kv_heads, -1, self.tile, self.width)

    def join_context(self, array):
        """The inverse of `split_context`."""
        joined = array.reshape(self.batch, self.kv_heads, -1, self.width).swapaxes(1, 2)
        return joined[:, : self.length]

    def _pad_blocks(self, array):
        """[B, A, ...] -> a whole number of tiles of blocks; those added see nothing but zeros."""
        extra = self.tiles * self.step_blocks - self.blocks
        return jnp.pad(array, [(0, 0), (0, extra)] + [(0, 0)] * (array.ndim - 2))

    def bounds(self, anchors, valid, segment_ids, window):
        """What each row may see, and which context tiles each step needs.

        Returns:
          first and end tile, int32 [B · tiles] each; bounds of rows, int32 [B, tiles, BOUNDS, R];
          documents of the context, int32 [B, context tiles, S, 1].
        """
        document = jnp.take_along_axis(segment_ids, anchors, axis=1)
        begin = jnp.argmax(segment_ids[:, None] == document[..., None], axis=-1)
        if window is not None:
            begin = jnp.maximum(begin, anchors - window)
        end = jnp.where(valid, anchors, 0)
        begin = jnp.minimum(begin, end)
        begin, end, document = (self._pad_blocks(x) for x in (begin, end, document))
        shape = (self.batch, self.tiles, self.step_blocks)
        tiled = jnp.stack([x.astype(jnp.int32).reshape(shape) for x in (begin, end, document)], 2)
        per_row = jnp.repeat(tiled, self.group * self.block, axis=-1)
        row = jnp.arange(self.rows, dtype=jnp.int32)
        places = jnp.stack([row // (self.group * self.block), row % self.block])
        places = jnp.broadcast_to(places, (self.batch, self.tiles, *places.shape))
        rest = jnp.zeros((self.batch, self.tiles, BOUNDS - 5, self.rows), jnp.int32)
        sees = tiled[:, :, END] > tiled[:, :, BEGIN]
        first = jnp.where(sees, tiled[:, :, BEGIN], self.length).min(axis=-1) // self.tile
        last = -(-jnp.where(sees, tiled[:, :, END], 0).max(axis=-1) // self.tile)
        padding = self.context_tiles * self.tile - self.length
        segments = jnp.pad(segment_ids, ((0, 0), (0, padding)))
        return (
            first.reshape(-1),
            last.reshape(-1),
            jnp.concatenate([per_row, places, rest], axis=2),
            segments.reshape(self.batch, self.context_tiles, self.tile, 1),
        )

    def specs(self):
        """Block specs of queries, block keys, context, bounds, documents, and one per row."""

        def context_tile(b, a, t, first, end):
            # A tile that is not needed is not fetched: the one that is there stays.
            at = b * self.tiles + a
            return jnp.maximum(jnp.minimum(jnp.maximum(t, first[at]), end[at] - 1), 0)

        def block(*shape):
            return pl.BlockSpec((None, None, None, *shape), lambda b, k, a, t, *_: (b, k, a, 0, 0))

        context = pl.BlockSpec(
            (None, None, None, self.tile, self.width),
            lambda b, k, a, t, *s: (b, k, context_tile(b, a, t, *s), 0, 0),
        )
        bounds = pl.BlockSpec((None, None, BOUNDS, self.rows), lambda b, k, a, t, *_: (b, a, 0, 0))
        documents = pl.BlockSpec(
            (None, None, self.tile, 1),
            lambda b, k, a, t, *s: (b, context_tile(b, a, t, *s), 0, 0),
        )
        queries, own, per_row = (
            block(self.rows, self.width),
            block(self.own, self.width),
            block(1, self.rows),
        )
        return queries, own, context, bounds, documents, per_row

    def vmem(self, *, backward):
        """What a step keeps in VMEM; see `flash_tpu.check_vmem`."""
        rows, own, tile, width = self.rows, self.own, self.tile, self.width
        arrays = {
            "queries": ((4 + 4 * backward, rows, width), self.dtype),
            "blocks": ((4 + 4 * backward, own, width), self.dtype),
            "context": ((4, tile, width), self.dtype),
            "bounds": ((2, BOUNDS, rows), jnp.int32),
            "documents": ((2, tile, 1), jnp.int32),
            "accumulator": ((1, rows, width), jnp.float32),
            "scores": ((3 + 2 * backward, max(tile, own), rows), jnp.float32),
        }
        if backward:
            arrays["gradient of the context"] = ((4, self.context_tiles, tile, width), jnp.float32)
        return arrays

    def call(self, kernel, name, inputs, in_specs, out_shapes, out_specs, scratch, interpret):
        """pl.pallas_call over (sequence, kv head, tile of blocks, tile of context)."""
        pairs = self.batch * self.heads * self.blocks * self.block * (self.length // 2)
        return pl.pallas_call(
            kernel,
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=2,
                grid=(self.batch, self.kv_heads, self.tiles, self.context_tiles),
                in_specs=in_specs,
                out_specs=out_specs,
                scratch_shapes=scratch,
            ),
            out_shape=out_shapes,
            compiler_params=flash_tpu.compiler_params(
                "parallel", "parallel", "arbitrary", "arbitrary"
            ),
            cost_estimate=pl.CostEstimate(
                flops=4 * pairs * self.width,
                transcendentals=pairs,
                bytes_accessed=sum(math.prod(x.shape) * x.dtype.itemsize for x in inputs),
            ),
            interpret=interpret,
            name=name,
        )(*inputs)


def forward(plan: Plan, arrays, bounds, *, scale, causal, interpret):
    """Outputs as `queries`, and log2 of each row's sum [B, K, tiles, 1, R], float32.

    Args:
      plan: of the call.
      arrays: queries, keys, values, context keys, context values, in the plan's shapes.
      bounds: `plan.bounds`.
    """
    flash_tpu.check_vmem(OP, plan.vmem(backward=False))
    queries, own, context, rows, documents, per_row = plan.specs()
    first, end, row_bounds, segments = bounds
    lanes = jax.ShapeDtypeStruct((*arrays[0].shape[:3], 1, plan.rows), jnp.float32)
    return plan.call(
        functools.partial(_forward, plan=plan, scale=scale, causal=causal),
        f"{OP}_forward",
        (first, end, *arrays, row_bounds, segments),
        [queries, own, own, context, context, rows, documents],
        [jax.ShapeDtypeStruct(arrays[0].shape, arrays[0].dtype), lanes],
        [queries, per_row],
        [
            pltpu.VMEM((plan.width, plan.rows), jnp.float32),
            pltpu.VMEM((1, plan.rows), jnp.float32),
            pltpu.VMEM((1, plan.rows), jnp.float32),
        ],
        interpret,
    )


def backward(plan: Plan, arrays, bounds, outputs, log_sum, grad, *, scale, causal, interpret):
    """Gradients of `arrays`; see `forward`. Those of the context are float32."""
    flash_tpu.check_vmem(OP, plan.vmem(backward=True))
    queries, own, context, rows, documents, per_row = plan.specs()
    first, end, row_bounds, segments = bounds
    drop = (outputs.astype(jnp.float32) * grad.astype(jnp.float32)).sum(axis=-1)[..., None, :]
    whole = pl.BlockSpec(
        (None, None, plan.context_tiles, plan.tile, plan.width),
        lambda b, k, a, t, *_: (b, k, 0, 0, 0),
    )
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays[:3]]
    shapes += [jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in arrays[3:]]
    return plan.call(
        functools.partial(_backward, plan=plan, scale=scale, causal=causal),
        f"{OP}_backward",
        (first, end, *arrays, row_bounds, segments, grad.astype(plan.dtype), log_sum, drop),
        [queries, own, own, context, context, rows, documents, queries, per_row, per_row],
        shapes,
        [queries, own, own, whole, whole],
        [pltpu.VMEM((plan.rows, plan.width), jnp.float32)],
        interpret,
    )


def _own_visible(plan: Plan, bounds_ref, causal):
    """Which keys of the blocks each row sees: bool [own, R]."""
    key = jax.lax.broadcasted_iota(jnp.int32, (plan.own, 1), 0)
    visible = flash_tpu.div(key, plan.block) == bounds_ref[BLOCK : BLOCK + 1]
    if causal:
        visible &= flash_tpu.rem(key, plan.block) <= bounds_ref[WITHIN : WITHIN + 1]
    return visible


def _context_visible(plan: Plan, bounds_ref, documents_ref, tile):
    """Which keys of a context tile each row sees: bool [S, R]."""
    position = jax.lax.broadcasted_iota(jnp.int32, (plan.tile, 1), 0) + tile * plan.tile
    visible = position >= bounds_ref[BEGIN : BEGIN + 1]
    visible &= position < bounds_ref[END : END + 1]
    return visible & (documents_ref[...] == bounds_ref[DOCUMENT : DOCUMENT + 1])


def _needed(plan: Plan, first_ref, end_ref):
    """Whether this step's blocks see this step's context tile."""
    at = pl.program_id(0) * plan.tiles + pl.program_id(2)
    tile = pl.program_id(3)
    return (tile >= first_ref[at]) & (tile < end_ref[at])


def _scores(keys, queries, visible, scale):
    """[S, R], in units of log2."""
    return jnp.where(visible, flash_tpu.scores(keys, queries, scale=scale), MASKED)


def _forward(first_ref, end_ref, queries_ref, keys_ref, values_ref, context_keys_ref,
             context_values_ref, bounds_ref, documents_ref, outputs_ref, log_sum_ref,
             weighted_ref, peak_ref, total_ref, *, plan: Plan, scale, causal):  # fmt: skip
    tile = pl.program_id(3)

    @pl.when(tile == 0)
    def _():
        visible = _own_visible(plan, bounds_ref, causal)
        scores = _scores(keys_ref[...], queries_ref[...], visible, scale)
        peak = scores.max(axis=0, keepdims=True)
        weights = jnp.exp2(scores - peak)
        peak_ref[...] = peak
        total_ref[...] = weights.sum(axis=0, keepdims=True)
        values = values_ref[...]
        weighted_ref[...] = flash_tpu.dot_columns(values, weights.astype(values.dtype))

    @pl.when(_needed(plan, first_ref, end_ref))
    def _():
        visible = _context_visible(plan, bounds_ref, documents_ref, tile)
        scores = _scores(context_keys_ref[...], queries_ref[...], visible, scale)
        before = peak_ref[...]
        peak = jnp.maximum(before, scores.max(axis=0, keepdims=True))
        keep, weights = jnp.exp2(before - peak), jnp.exp2(scores - peak)
        peak_ref[...] = peak
        total_ref[...] = keep * total_ref[...] + weights.sum(axis=0, keepdims=True)
        values = context_values_ref[...]
        seen = flash_tpu.dot_columns(values, weights.astype(values.dtype))
        weighted_ref[...] = keep * weighted_ref[...] + seen

    @pl.when(tile == plan.context_tiles - 1)
    def _():
        outputs_ref[...] = (weighted_ref[...] / total_ref[...]).T.astype(outputs_ref.dtype)
        log_sum_ref[...] = peak_ref[...] + jnp.log2(total_ref[...])


def _backward(first_ref, end_ref, queries_ref, keys_ref, values_ref, context_keys_ref,
              context_values_ref, bounds_ref, documents_ref, grad_ref, log_sum_ref, drop_ref,
              queries_grad_ref, keys_grad_ref, values_grad_ref, context_keys_grad_ref,
              context_values_grad_ref, accumulated_ref, *, plan: Plan, scale, causal):  # fmt: skip
    tile = pl.program_id(3)

    def differentiate(keys, values, visible):
        """Gradients of these keys, of their values, and what they add to that of the queries."""
        scores = _scores(keys, queries_ref[...], visible, scale)
        weights = jnp.exp2(scores - log_sum_ref[...])
        weights_grad = flash_tpu.dot(values, grad_ref[...], transpose_b=True)
        scores_grad = (scale * weights * (weights_grad - drop_ref[...])).astype(keys.dtype)
        return (
            flash_tpu.dot(scores_grad, queries_ref[...]),
            flash_tpu.dot(weights.astype(keys.dtype), grad_ref[...]),
            flash_tpu.dot_columns(scores_grad, keys),
        )

    @pl.when((pl.program_id(2) == 0) & (tile == 0))
    def _():
        context_keys_grad_ref[...] = jnp.zeros_like(context_keys_grad_ref)
        context_values_grad_ref[...] = jnp.zeros_like(context_values_grad_ref)

    @pl.when(tile == 0)
    def _():
        visible = _own_visible(plan, bounds_ref, causal)
        of_keys, of_values, of_queries = differentiate(keys_ref[...], values_ref[...], visible)
        keys_grad_ref[...] = of_keys.astype(keys_grad_ref.dtype)
        values_grad_ref[...] = of_values.astype(values_grad_ref.dtype)
        accumulated_ref[...] = of_queries

    @pl.when(_needed(plan, first_ref, end_ref))
    def _():
        visible = _context_visible(plan, bounds_ref, documents_ref, tile)
        of_keys, of_values, of_queries = differentiate(
            context_keys_ref[...], context_values_ref[...], visible
        )
        context_keys_grad_ref[tile] += of_keys
        context_values_grad_ref[tile] += of_values
        accumulated_ref[...] += of_queries

    @pl.when(tile == plan.context_tiles - 1)
    def _():
        queries_grad_ref[...] = accumulated_ref[...].astype(queries_grad_ref.dtype)


def unsupported(queries) -> str | None:
    """Why the kernels do not cover a call; None if they do."""
    width = queries.shape[-1]
    if width not in flash_tpu.HEAD_DIMS:
        return f"{OP}: head_dim {width} is none of {flash_tpu.HEAD_DIMS}"
    return None
