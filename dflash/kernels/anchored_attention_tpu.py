"""Pallas kernels of anchored attention, forward and backward; see anchored_attention.py.

A grid step attends from some blocks of one sequence, with all query heads of one kv head, to one
tile of the context. Tiles that none of its blocks sees are neither fetched nor processed. Scores
are transposed, [keys, rows], so that per-row values (bounds of its context, peak, sum) extend along
the lanes, are stored without padding, and never move between lanes. Masks are not stored but
computed by comparing key positions with the bounds of each row.
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
# Rows of the array of row bounds, which has 8 rows, a whole memory tile.
BEGIN, END, DOCUMENT, VALID, BLOCK, WITHIN, BOUNDS = 0, 1, 2, 3, 4, 5, 8


class AnchoredTiling:
    """Shapes of one call: its tiles, blocks and scratch arrays.

    The kernels take queries [B, 1, rows, N·H], and keys and values of blocks and of the context
    [B, 1, rows, K·H]. This is the layout of projections: nothing is copied, and a grid step reads
    its columns. Heads narrower than the lanes are transposed beforehand, to [B, K, rows, …].

    The score rows of a grid step are ordered by query head, then by row.
    """

    def __init__(self, queries, keys, context_keys, sizes: BlockSizes):
        self.batch, self.blocks, self.block, self.heads, self.width = queries.shape
        self.kv_heads, self.length = keys.shape[3], context_keys.shape[1]
        self.dtype = jnp.dtype(queries.dtype)
        self.group = self.heads // self.kv_heads
        # Round up to whole memory tiles.
        multiple = math.lcm(self.block, flash_tpu.row_tile(self.dtype)) // self.block
        step_blocks = max(1, sizes.queries // (self.group * self.block))
        self.step_blocks = -(-min(step_blocks, self.blocks) // multiple) * multiple
        self.tiles = -(-self.blocks // self.step_blocks)
        self.block_rows = self.step_blocks * self.block
        self.rows = self.group * self.block_rows
        self.tile = flash_tpu.tile_rows(self.length, sizes.keys, self.dtype)
        self.context_tiles = -(-self.length // self.tile)
        self.in_columns = self.width % flash_tpu.LANES == 0

    def split_blocks(self, array):
        """Converts queries, keys or values [B, A, R, n, H] to the layout of the kernels."""
        padded = self._pad_blocks(array)
        return self._split(padded.reshape(self.batch, -1, self.kv_heads, self._columns(array)))

    def join_blocks(self, array):
        """Reverses `split_blocks`."""
        shape = (self.batch, self.tiles * self.step_blocks, self.block, -1, self.width)
        return self._join(array).reshape(shape)[:, : self.blocks]

    def split_context(self, array):
        """Converts context keys or values [B, T, K, H] to the layout of the kernels."""
        padding = self.context_tiles * self.tile - self.length
        return self._split(jnp.pad(array, ((0, 0), (0, padding), (0, 0), (0, 0))))

    def join_context(self, array):
        """Reverses `split_context`."""
        shape = (self.batch, -1, self.kv_heads, self.width)
        return self._join(array).reshape(shape)[:, : self.length]

    def _columns(self, array) -> int:
        return array.shape[3] // self.kv_heads * self.width

    def _split(self, array):
        """Converts [B, rows, K, columns] to the layout of the kernels."""
        if self.in_columns:
            return array.reshape(self.batch, 1, array.shape[1], -1)
        return array.swapaxes(1, 2)

    def _join(self, array):
        """Reverses `_split`, to [B, rows, …]."""
        return array[:, 0] if self.in_columns else array.swapaxes(1, 2)

    def _pad_blocks(self, array):
        """Pads [B, A, ...] with zeros to a whole number of tiles of blocks."""
        extra = self.tiles * self.step_blocks - self.blocks
        return jnp.pad(array, [(0, 0), (0, extra)] + [(0, 0)] * (array.ndim - 2))

    def bounds(self, anchors, valid, segment_ids, window):
        """Returns the bounds of each row's context, and the context tiles that each step needs.

        Returns:
          First tile and end tile, int32 [B · tiles] each; bounds of rows, int32 [B, tiles, BOUNDS,
          R]; segment ids of the context, int32 [B, context tiles, S, 1].
        """
        document = jnp.take_along_axis(segment_ids, anchors, axis=1)
        begin = jnp.argmax(segment_ids[:, None] == document[..., None], axis=-1)
        if window is not None:
            begin = jnp.maximum(begin, anchors - (window - 1))
        end = jnp.where(valid, anchors, 0)
        begin = jnp.minimum(begin, end)
        per_block = [self._pad_blocks(x.astype(jnp.int32)) for x in (begin, end, document, valid)]
        shape = (self.batch, self.tiles, self.step_blocks)
        tiled = jnp.stack([x.reshape(shape) for x in per_block], axis=2)
        row = jnp.arange(self.block_rows, dtype=jnp.int32)
        places = jnp.stack([row // self.block, row % self.block])
        places = jnp.broadcast_to(places, (self.batch, self.tiles, *places.shape))
        unused = jnp.zeros((self.batch, self.tiles, BOUNDS - 6, self.block_rows), jnp.int32)
        per_row = jnp.repeat(tiled, self.block, axis=-1)
        if window is not None:  # The window moves with the row.
            first = per_row[:, :, END] + places[:, :, 1] - (window - 1)
            per_row = per_row.at[:, :, BEGIN].max(first)
        per_row = jnp.concatenate([per_row, places, unused], axis=2)
        sees = tiled[:, :, END] > tiled[:, :, BEGIN]
        first = jnp.where(sees, tiled[:, :, BEGIN], self.length).min(axis=-1) // self.tile
        last = -(-jnp.where(sees, tiled[:, :, END], 0).max(axis=-1) // self.tile)
        padding = self.context_tiles * self.tile - self.length
        segments = jnp.pad(segment_ids, ((0, 0), (0, padding)))
        return (
            first.reshape(-1),
            last.reshape(-1),
            jnp.tile(per_row, self.group),
            segments.reshape(self.batch, self.context_tiles, self.tile, 1),
        )

    def specs(self):
        """Returns all block specs of the kernels.

        Returns:
          Block specs of queries, of blocks' keys or values, of a context tile, of row bounds, of
          the context's segment ids, of per-row values, and of the whole context.
        """

        def context_tile(b, a, t, first, end):
            # For a tile that is not needed, repeat the previous index, so that nothing is fetched.
            step = b * self.tiles + a
            return jnp.maximum(jnp.minimum(jnp.maximum(t, first[step]), end[step] - 1), 0)

        def place(b, k, row):
            return (b, 0, row, k) if self.in_columns else (b, k, row, 0)

        def block(columns):
            return pl.BlockSpec(
                (None, None, self.block_rows, columns), lambda b, k, a, t, *_: place(b, k, a)
            )

        context = pl.BlockSpec(
            (None, None, self.tile, self.width),
            lambda b, k, a, t, *s: place(b, k, context_tile(b, a, t, *s)),
        )
        all_context = pl.BlockSpec(
            (None, None, self.context_tiles * self.tile, self.width),
            lambda b, k, a, t, *_: place(b, k, 0),
        )
        per_row = pl.BlockSpec(
            (None, None, None, 1, self.rows), lambda b, k, a, t, *_: (b, k, a, 0, 0)
        )
        bounds = pl.BlockSpec((None, None, BOUNDS, self.rows), lambda b, k, a, t, *_: (b, a, 0, 0))
        documents = pl.BlockSpec(
            (None, None, self.tile, 1), lambda b, k, a, t, *s: (b, context_tile(b, a, t, *s), 0, 0)
        )
        queries, keys = block(self.group * self.width), block(self.width)
        return queries, keys, context, bounds, documents, per_row, all_context

    @property
    def per_row_shape(self) -> tuple[int, ...]:
        """Shape of an array with one value per row of scores."""
        return self.batch, self.kv_heads, self.tiles, 1, self.rows

    def vmem(self, *, backward):
        """Returns the arrays of a grid step in VMEM; see `flash_tpu.check_vmem`."""
        rows, block, tile, width = self.rows, self.block_rows, self.tile, self.width
        arrays = {
            "queries": ((4 + 4 * backward, rows, width), self.dtype),
            "blocks": ((4 + 4 * backward, block, width), self.dtype),
            "context": ((4, tile, width), self.dtype),
            "bounds": ((2, BOUNDS, rows), jnp.int32),
            "documents": ((2, tile, 1), jnp.int32),
            "accumulator": ((1, rows, width), jnp.float32),
            "scores": ((3 + 2 * backward, max(tile, block), rows), jnp.float32),
        }
        if backward:
            arrays["gradient of the context"] = ((4, self.context_tiles, tile, width), jnp.float32)
        return arrays

    def call(
        self, kernel, name, inputs, in_specs, out_shapes, out_specs, scratch, interpret, *, products
    ):
        """Calls a kernel on the grid (sequence, kv head, tile of blocks, tile of context).

        Args:
          inputs: Scalar-prefetch arguments (first and end tiles), then the other arguments.
          products: Dot products per pair of a row and a key, for the cost estimate.
        """
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
                flops=2 * products * pairs * self.width,
                transcendentals=pairs,
                bytes_accessed=sum(math.prod(x.shape) * x.dtype.itemsize for x in inputs),
            ),
            interpret=interpret,
            name=name,
        )(*inputs)


def forward(tiling: AnchoredTiling, arrays, bounds, *, interpret, **view):
    """Returns outputs in the layout of queries, and log2 of each row's softmax sum.

    The latter is float32, of shape `tiling.per_row_shape`.

    Args:
      arrays: Queries, keys, values, context keys and context values, in the layout of the kernels.
      bounds: Result of `tiling.bounds`.
      **view: Scale, window and causality of `anchored_attention`.
    """
    flash_tpu.check_vmem(OP, tiling.vmem(backward=False))
    queries, block, context, rows, documents, per_row, _ = tiling.specs()
    first, end, row_bounds, segments = bounds
    log_sum = jax.ShapeDtypeStruct(tiling.per_row_shape, jnp.float32)
    return tiling.call(
        functools.partial(_forward, tiling=tiling, **view),
        f"{OP}_forward",
        (first, end, *arrays, row_bounds, segments),
        [queries, block, block, context, context, rows, documents],
        [jax.ShapeDtypeStruct(arrays[0].shape, arrays[0].dtype), log_sum],
        [queries, per_row],
        [
            pltpu.VMEM((tiling.width, tiling.rows), jnp.float32),
            pltpu.VMEM((1, tiling.rows), jnp.float32),
            pltpu.VMEM((1, tiling.rows), jnp.float32),
        ],
        interpret,
        products=2,
    )


def backward(tiling: AnchoredTiling, arrays, bounds, outputs, log_sum, grad, *, interpret, **view):
    """Returns the gradients of the arrays of `forward`; those of the context are float32.

    Args:
      outputs: Outputs of `forward`.
      log_sum: Second result of `forward`.
      grad: Gradient of the outputs.
    """
    flash_tpu.check_vmem(OP, tiling.vmem(backward=True))
    queries, block, context, rows, documents, per_row, all_context = tiling.specs()
    first, end, row_bounds, segments = bounds
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays[:3]]
    shapes += [jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in arrays[3:]]
    return tiling.call(
        functools.partial(_backward, tiling=tiling, **view),
        f"{OP}_backward",
        (first, end, *arrays, row_bounds, segments, outputs, grad.astype(tiling.dtype), log_sum),
        [queries, block, block, context, context, rows, documents, queries, queries, per_row],
        shapes,
        [queries, block, block, all_context, all_context],
        [
            pltpu.VMEM((tiling.rows, tiling.width), jnp.float32),
            pltpu.VMEM((1, tiling.rows), jnp.float32),
        ],
        interpret,
        products=5,
    )


def _own_visible(tiling: AnchoredTiling, bounds_ref, window, causal):
    """Returns the mask bool [block rows, R] of the block keys that each row sees."""
    key = jax.lax.broadcasted_iota(jnp.int32, (tiling.block_rows, 1), 0)
    visible = flash_tpu.div(key, tiling.block) == bounds_ref[BLOCK : BLOCK + 1]
    if causal:
        visible &= flash_tpu.rem(key, tiling.block) <= bounds_ref[WITHIN : WITHIN + 1]
    if window is not None and window < tiling.block:
        distance = flash_tpu.rem(key, tiling.block) - bounds_ref[WITHIN : WITHIN + 1]
        visible &= jnp.abs(distance) < window
    return visible


def _context_visible(tiling: AnchoredTiling, bounds_ref, documents_ref, tile):
    """Returns the mask bool [S, R] of the keys of a context tile that each row sees."""
    position = jax.lax.broadcasted_iota(jnp.int32, (tiling.tile, 1), 0) + tile * tiling.tile
    visible = position >= bounds_ref[BEGIN : BEGIN + 1]
    visible &= position < bounds_ref[END : END + 1]
    return visible & (documents_ref[...] == bounds_ref[DOCUMENT : DOCUMENT + 1])


def _needed(tiling: AnchoredTiling, first_ref, end_ref):
    """Returns whether this grid step's blocks see its context tile."""
    step = pl.program_id(0) * tiling.tiles + pl.program_id(2)
    tile = pl.program_id(3)
    return (tile >= first_ref[step]) & (tile < end_ref[step])


def _query_heads(tiling: AnchoredTiling, ref):
    """Reads the query heads [block rows, N/K·H] of a reference as score rows [R, H]."""
    heads = [ref[:, begin : begin + tiling.width] for begin in _head_columns(tiling)]
    return jnp.concatenate(heads, axis=0)


def _store_query_heads(tiling: AnchoredTiling, ref, heads):
    """Writes score rows [R, H] to the query heads [block rows, N/K·H] of a reference."""
    for i, begin in enumerate(_head_columns(tiling)):
        head_rows = heads[i * tiling.block_rows : (i + 1) * tiling.block_rows]
        ref[:, begin : begin + tiling.width] = head_rows.astype(ref.dtype)


def _head_columns(tiling: AnchoredTiling) -> range:
    return range(0, tiling.group * tiling.width, tiling.width)


def _scores(keys, queries, visible, scale):
    """Returns masked scores [S, R], in units of log2."""
    return jnp.where(visible, flash_tpu.scores(keys, queries, scale=scale), MASKED)


def _forward(first_ref, end_ref, queries_ref, keys_ref, values_ref, context_keys_ref,
             context_values_ref, bounds_ref, documents_ref, outputs_ref, log_sum_ref,
             weighted_ref, peak_ref, total_ref, *,
             tiling: AnchoredTiling, scale, window, causal):  # fmt: skip
    tile = pl.program_id(3)

    def scores_of(keys_ref, visible):
        return _scores(keys_ref[...], _query_heads(tiling, queries_ref), visible, scale)

    @pl.when(tile == 0)
    def _():
        scores = scores_of(keys_ref, _own_visible(tiling, bounds_ref, window, causal))
        peak = scores.max(axis=0, keepdims=True)
        weights = jnp.exp2(scores - peak)
        peak_ref[...] = peak
        total_ref[...] = weights.sum(axis=0, keepdims=True)
        values = values_ref[...]
        weighted_ref[...] = flash_tpu.dot_columns(values, weights.astype(values.dtype))

    @pl.when(_needed(tiling, first_ref, end_ref))
    def _():
        visible = _context_visible(tiling, bounds_ref, documents_ref, tile)
        scores = scores_of(context_keys_ref, visible)
        before = peak_ref[...]
        peak = jnp.maximum(before, scores.max(axis=0, keepdims=True))
        keep, weights = jnp.exp2(before - peak), jnp.exp2(scores - peak)
        peak_ref[...] = peak
        total_ref[...] = keep * total_ref[...] + weights.sum(axis=0, keepdims=True)
        values = context_values_ref[...]
        seen = flash_tpu.dot_columns(values, weights.astype(values.dtype))
        weighted_ref[...] = keep * weighted_ref[...] + seen

    @pl.when(tile == tiling.context_tiles - 1)
    def _():
        valid = bounds_ref[VALID : VALID + 1] != 0
        attended = jnp.where(valid, weighted_ref[...] / total_ref[...], 0)
        _store_query_heads(tiling, outputs_ref, attended.T)
        # With a huge sum, the rows of an invalid block have weight zero in every gradient.
        log_sum_ref[...] = jnp.where(valid, peak_ref[...] + jnp.log2(total_ref[...]), -MASKED)


def _backward(first_ref, end_ref, queries_ref, keys_ref, values_ref, context_keys_ref,
              context_values_ref, bounds_ref, documents_ref, outputs_ref, grad_ref, log_sum_ref,
              queries_grad_ref, keys_grad_ref, values_grad_ref, context_keys_grad_ref,
              context_values_grad_ref, accumulated_ref, delta_ref, *,
              tiling: AnchoredTiling, scale, window, causal):  # fmt: skip
    tile = pl.program_id(3)

    def differentiate(keys, values, visible):
        """Returns the gradients of keys and values, and their part of the queries' gradient."""
        queries, grad = _query_heads(tiling, queries_ref), _query_heads(tiling, grad_ref)
        weights = jnp.exp2(_scores(keys, queries, visible, scale) - log_sum_ref[...])
        weights_grad = flash_tpu.dot(values, grad, transpose_b=True)
        scores_grad = (scale * weights * (weights_grad - delta_ref[...])).astype(keys.dtype)
        return (
            flash_tpu.dot(scores_grad, queries),
            flash_tpu.dot(weights.astype(keys.dtype), grad),
            flash_tpu.dot_columns(scores_grad, keys),
        )

    @pl.when((pl.program_id(2) == 0) & (tile == 0))
    def _():
        context_keys_grad_ref[...] = jnp.zeros_like(context_keys_grad_ref)
        context_values_grad_ref[...] = jnp.zeros_like(context_values_grad_ref)

    @pl.when(tile == 0)
    def _():
        products = _query_heads(tiling, outputs_ref).astype(jnp.float32)
        products *= _query_heads(tiling, grad_ref).astype(jnp.float32)
        delta_ref[...] = products.T.sum(axis=0, keepdims=True)
        visible = _own_visible(tiling, bounds_ref, window, causal)
        keys_grad, values_grad, queries_grad = differentiate(
            keys_ref[...], values_ref[...], visible
        )
        keys_grad_ref[...] = keys_grad.astype(keys_grad_ref.dtype)
        values_grad_ref[...] = values_grad.astype(values_grad_ref.dtype)
        accumulated_ref[...] = queries_grad

    @pl.when(_needed(tiling, first_ref, end_ref))
    def _():
        visible = _context_visible(tiling, bounds_ref, documents_ref, tile)
        keys_grad, values_grad, queries_grad = differentiate(
            context_keys_ref[...], context_values_ref[...], visible
        )
        rows = pl.ds(pl.multiple_of(tile * tiling.tile, tiling.tile), tiling.tile)
        context_keys_grad_ref[rows] += keys_grad
        context_values_grad_ref[rows] += values_grad
        accumulated_ref[...] += queries_grad

    @pl.when(tile == tiling.context_tiles - 1)
    def _():
        _store_query_heads(tiling, queries_grad_ref, accumulated_ref[...])


def unsupported(queries) -> str | None:
    """Returns why the kernels do not support a call, or None if they do."""
    width = queries.shape[-1]
    if width not in flash_tpu.HEAD_DIMS:
        return f"{OP}: head_dim {width} is not one of {flash_tpu.HEAD_DIMS}"
    return None
