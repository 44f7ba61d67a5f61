"""Pallas kernel of block attention; see block_attention.py for its semantics.

A grid step processes one sequence. It covers half of the kv heads if their number is even, one half
for each core of a chip with two cores. Rows are ordered by head of the group, then by row of the
block, so that the context is read once, in its own layout, without copies.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from dflash.kernels import flash_tpu
from dflash.kernels.flash_tpu import Softmax
from dflash.kernels.tile_stream_tpu import BUFFERS, TileStream
from dflash.kernels.tuning import BlockSizes

OP = "block_attention"


def block_attention_tpu(*arrays, sizes: BlockSizes, interpret, **view):
    """Computes `block_attention`; arguments and results are the same.

    Of two windows, `windows` has the narrower one; `view` is scale, window and causality.
    """
    queries, keys, values, context_keys, context_values, length, sinks, windows = arrays
    batch, block, heads, width = queries.shape
    kv_heads, capacity = context_keys.shape[1:3]
    group = heads // kv_heads
    rows = group * block
    step_heads = flash_tpu.heads_per_step(kv_heads)
    tile = flash_tpu.tile_rows(capacity, sizes.keys, context_keys.dtype)
    dtype = context_keys.dtype
    flash_tpu.check_vmem(
        OP,
        {
            "queries and outputs": ((4, step_heads, rows, width), queries.dtype),
            "the block's keys and values": ((4, step_heads, block, width), dtype),
            "context": ((2 * BUFFERS, step_heads, tile, width), dtype),
            "running softmax": ((step_heads, rows, width + 2 * flash_tpu.LANES), jnp.float32),
            "scores": ((4, rows, tile), jnp.float32),
        }
        | (
            {}
            if sinks is None
            else {"sinks": ((2, step_heads, rows, flash_tpu.LANES), jnp.float32)}
        ),
    )
    grouped = queries.reshape(batch, block, kv_heads, group, width).transpose(0, 2, 3, 1, 4)
    grouped = grouped.reshape(batch, kv_heads, rows, width)
    new = [array.astype(dtype).swapaxes(1, 2) for array in (keys, values)]
    sink_rows = [] if sinks is None else [flash_tpu.sink_rows(sinks, kv_heads, block)]

    def step_spec(rows):
        return pl.BlockSpec((None, step_heads, rows, width), lambda g, b, *_: (b, g, 0, 0))

    sink_spec = pl.BlockSpec((step_heads, rows, flash_tpu.LANES), lambda g, b, *_: (g, 0, 0))
    limits = [length] if windows is None else [length, windows]
    outputs = pl.pallas_call(
        functools.partial(_kernel, block=block, batch=batch, chosen=windows is not None, **view),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(limits),
            grid=(kv_heads // step_heads, batch),
            in_specs=[
                step_spec(rows), step_spec(block), step_spec(block),
                pl.BlockSpec(memory_space=pl.ANY), pl.BlockSpec(memory_space=pl.ANY),
                *(sink_spec for _ in sink_rows),
            ],
            out_specs=step_spec(rows),
            scratch_shapes=[
                *Softmax.scratch(step_heads, rows, width, tile),
                *TileStream.scratch(step_heads, tile, width, dtype),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct(grouped.shape, queries.dtype),
        compiler_params=flash_tpu.compiler_params("parallel", "arbitrary"),
        cost_estimate=flash_tpu.cost(batch, heads, kv_heads, block, capacity, width, dtype),
        interpret=interpret,
        # Forecasts read the window from the name.
        name=f"{OP}_t{block}" + ("" if view["window"] is None else f"_w{view['window']}"),
    )(*limits, grouped, *new, context_keys, context_values, *sink_rows)  # fmt: skip
    outputs = outputs.reshape(batch, kv_heads, group, block, width).transpose(0, 3, 1, 2, 4)
    return outputs.reshape(queries.shape)


def _kernel(length_ref, *refs, block, batch, scale, window, causal, chosen):
    windows_ref, *refs = refs if chosen else (None, *refs)
    inputs, (outputs_ref, *scratch) = refs[:-8], refs[-8:]
    queries_ref, keys_ref, values_ref, *context = inputs[:5]
    sinks_ref = inputs[5] if len(inputs) > 5 else None
    softmax, buffers, semaphores = Softmax(*scratch[:4]), tuple(scratch[4:6]), scratch[6]
    step_heads, rows = queries_ref.shape[:2]
    head_group, sequence = pl.program_id(0), pl.program_id(1)
    own_heads = pl.ds(head_group * step_heads, step_heads)
    length = length_ref[sequence]
    tile_rows = buffers[0].shape[2]

    def source(sequence, row, count):
        unit = flash_tpu.row_tile(buffers[0].dtype)
        place = pl.ds(pl.multiple_of(row, unit), count)
        return [array.at[sequence, own_heads, place] for array in context]

    stream = TileStream(buffers, semaphores, source, tile_rows, lambda b: length_ref[b])

    @pl.when(sequence == 0)
    def _():
        stream.open(sequence)

    def score(head, keys):
        return flash_tpu.scores(queries_ref[head], keys, scale=scale)

    for head in range(step_heads):
        if block == 1:
            softmax.begin_single(head, queries_ref[head], keys_ref[head], values_ref[head], scale)
            continue
        scores = score(head, keys_ref[head])
        row, key = (jax.lax.broadcasted_iota(jnp.int32, (rows, block), i) for i in (0, 1))
        row = flash_tpu.rem(row, block)
        if causal:
            scores = jnp.where(key <= row, scores, flash_tpu.MASKED)
        if window is not None and window < block:
            scores = jnp.where(jnp.abs(row - key) < window, scores, flash_tpu.MASKED)
        softmax.begin(head, scores, values_ref[head])

    if chosen:
        window = windows_ref[sequence]
    # First context position that the anchor sees; the row r places after it sees r fewer.
    first_visible = 0 if window is None else length - (window - 1)

    def visit(slot, tile, *, last):
        positions = tile * tile_rows + jax.lax.broadcasted_iota(jnp.int32, (1, tile_rows), 1)

        def mask(head, scores):
            if last:
                scores = jnp.where(positions < length, scores, flash_tpu.MASKED)
            if window is None:
                return scores
            row = flash_tpu.rem(jax.lax.broadcasted_iota(jnp.int32, (rows, 1), 0), block)
            return jnp.where(positions >= first_visible + row, scores, flash_tpu.MASKED)

        filled = length - tile * tile_rows if last else None
        flash_tpu.visit_tile(softmax, stream, slot, score, mask, filled)

    stream.run(
        sequence,
        jnp.minimum(sequence + 1, batch - 1),
        sequence + 1 < batch,
        flash_tpu.div(jnp.maximum(first_visible, 0), tile_rows) if window is not None else 0,
        functools.partial(visit, last=True),
        functools.partial(visit, last=False),
    )
    for head in range(step_heads):
        sink = None if sinks_ref is None else sinks_ref[head, :, :1]
        outputs_ref[head] = softmax.outputs(head, sink).astype(outputs_ref.dtype)


def unsupported(queries, context_keys) -> str | None:
    """Returns why the kernel does not support a call, or None if it does."""
    width, capacity = queries.shape[-1], context_keys.shape[2]
    unit = flash_tpu.row_tile(context_keys.dtype)
    if width not in flash_tpu.HEAD_DIMS:
        return f"{OP}: head_dim {width} is not one of {flash_tpu.HEAD_DIMS}"
    if capacity % unit:
        dtype = jnp.dtype(context_keys.dtype).name
        return (
            f"{OP}: a context of {capacity} rows, expected a multiple of {unit}, a tile of {dtype}"
        )
    return None
