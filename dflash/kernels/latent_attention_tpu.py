"""Pallas kernel of latent attention; see latent_attention.py for its semantics.

All query heads see the same rows, so a grid step processes one sequence and as many heads as form
`step_rows` query rows. The context is streamed once for each such group of heads, and the products
of a group take longer than its stream. Within a step the query rows are divided into chunks of
whole heads, [C, R, W] with R ordered by head, then by query; a chunk plays the role of a kv head in
paged_attention_tpu.py. Only the first group writes the new rows. The old rows that it writes back
beside them are unchanged, so other groups may read them at the same time.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from dflash.kernels import flash_tpu, paged_write_tpu, quantized
from dflash.kernels.flash_tpu import Softmax
from dflash.kernels.paged_write_tpu import PageWriter, Windows
from dflash.kernels.quantized import Quantized
from dflash.kernels.tile_stream_tpu import BUFFERS, TileScales, TileStream
from dflash.kernels.tuning import LatentSizes

OP = "latent_attention"


def latent_attention_tpu(
    queries, latents, pages, page_table, start, tree_mask, *, value_width, scale, sizes, interpret
):
    """Computes `latent_attention` with latents [1, B, T, W] in their stored form."""
    tiling = LatentTiling(queries, pages, page_table, tree_mask, value_width, sizes)
    rows = tiling.split_queries(queries)
    arrays = [rows, *tiling.new_rows(latents)]
    if tree_mask is not None:
        arrays.append(jnp.tile(tree_mask.astype(jnp.int32), (1, tiling.chunk_heads, 1)))
    pools = [pages.values, pages.scales] if tiling.quantized else [pages]
    anywhere = [pl.BlockSpec(memory_space=pl.ANY)] * len(pools)
    outputs = jax.ShapeDtypeStruct((*rows.shape[:-1], value_width), rows.dtype)
    attended, *pools = pl.pallas_call(
        functools.partial(_kernel, tiling=tiling, scale=scale),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(tiling.groups, tiling.batch),
            in_specs=[*tiling.specs(arrays), *anywhere],
            out_specs=[tiling.step_spec(value_width), *anywhere],
            scratch_shapes=tiling.scratch(),
        ),
        out_shape=[outputs, *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in pools)],
        input_output_aliases={2 + len(arrays) + i: 1 + i for i in range(len(pools))},
        compiler_params=flash_tpu.compiler_params("parallel", "arbitrary"),
        cost_estimate=tiling.cost(),
        interpret=interpret,
        name=f"{OP}_t{tiling.length}",
    )(page_table.reshape(-1), start, *arrays, *pools)
    return tiling.join_queries(attended), Quantized(*pools) if tiling.quantized else pools[0]


class LatentTiling:
    """Shapes of one call: its head groups, chunks, tiles and scratch arrays."""

    def __init__(self, queries, pages, page_table, tree_mask, value_width, sizes: LatentSizes):
        self.batch, self.length, self.heads, self.width = queries.shape
        self.page_size, self.table_width = pages.shape[2], page_table.shape[1]
        self.dtype, self.pool_dtype = jnp.dtype(queries.dtype), jnp.dtype(pages.dtype)
        self.quantized = isinstance(pages, Quantized)
        self.new_dtype = self.dtype if self.quantized else self.pool_dtype
        self.value_width = value_width
        self.has_tree = tree_mask is not None
        self.step_heads = _largest_part(self.heads, sizes.step_rows // self.length)
        self.groups = self.heads // self.step_heads
        self.chunk_heads = _largest_part(self.step_heads, sizes.chunk_rows // self.length)
        self.chunks = self.step_heads // self.chunk_heads
        self.rows = self.chunk_heads * self.length
        self.tile = min(max(1, sizes.keys // self.page_size), self.table_width) * self.page_size
        self.windows = Windows(
            1, 1, self.length, self.length, self.width, self.page_size, self.pool_dtype,
            self.quantized,
        )  # fmt: skip
        flash_tpu.check_vmem(OP, self._vmem())

    def split_queries(self, queries):
        """Transposes queries [B, T, N, W] to [B, chunks of all groups, R, W]."""
        by_head = queries.swapaxes(1, 2)
        return by_head.reshape(self.batch, self.groups * self.chunks, self.rows, self.width)

    def join_queries(self, rows):
        """Transposes outputs [B, chunks of all groups, R, V] to [B, T, N, V]."""
        return rows.reshape(self.batch, self.heads, self.length, self.value_width).swapaxes(1, 2)

    def new_rows(self, latents):
        """Returns new cache rows [B, 1, T, W], and any scales [B, 1, 1, scale lanes]."""
        if not self.quantized:
            return [latents.swapaxes(0, 1).astype(self.new_dtype)]
        extra = self.windows.scale_lanes - self.length
        scales = jnp.pad(latents.scales.swapaxes(0, 1), ((0, 0),) * 3 + ((0, extra),))
        return [latents.values.swapaxes(0, 1).astype(self.new_dtype), scales]

    def step_spec(self, width):
        """Returns the block spec of queries or outputs."""
        return pl.BlockSpec((None, self.chunks, self.rows, width), lambda g, b, *_: (b, g, 0, 0))

    def specs(self, arrays):
        """Returns the block specs of queries, new rows, any scales and any tree mask."""
        unsplit = [
            pl.BlockSpec((None, *x.shape[1:]), lambda g, b, *_, n=x.ndim: (b, *[0] * (n - 1)))
            for x in arrays[1:]
        ]
        return [self.step_spec(self.width), *unsplit]

    def scratch(self):
        """Returns the scratch shapes, in the order in which `_kernel` takes them."""
        return [
            *Softmax.scratch(self.chunks, self.rows, self.value_width, self.tile),
            *TileStream.scratch(1, self.tile, self.width, self.pool_dtype, kinds=1),
            *self.windows.scratch(),
            *(TileScales.scratch(1, self.tile, kinds=1) if self.quantized else ()),
            *self.windows.scale_scratch(),
        ]

    def _vmem(self):
        lanes = self.value_width + 2 * flash_tpu.LANES
        arrays = {
            "queries": ((2, self.chunks, self.rows, self.width), self.dtype),
            "outputs": ((2, self.chunks, self.rows, self.value_width), self.dtype),
            "new rows": ((2, self.length, self.width), self.new_dtype),
            "pages": ((BUFFERS, self.tile, self.width), self.pool_dtype),
            "running softmax": ((self.chunks, self.rows, lanes), jnp.float32),
            "scores": ((4, self.rows, max(self.tile, self.length)), jnp.float32),
            **self.windows.vmem(self.tile, BUFFERS),
        }
        if self.has_tree:
            arrays["tree"] = ((2, self.rows, self.length), jnp.int32)
        return arrays

    def cost(self) -> pl.CostEstimate:
        """Returns the cost of a call whose sequences fill their page tables."""
        keys = self.table_width * self.page_size
        pairs = self.batch * self.heads * self.length * keys
        read = self.groups * self.batch * keys * self.width * self.pool_dtype.itemsize
        return pl.CostEstimate(
            flops=2 * pairs * (self.width + self.value_width),
            transcendentals=pairs,
            bytes_accessed=read,
        )


def _largest_part(count: int, limit: int) -> int:
    """Returns the largest divisor of `count` that is at most `limit`, or 1."""
    return max(n for n in range(1, count + 1) if count % n == 0 and n <= max(1, limit))


def _kernel(table_ref, start_ref, *refs, tiling: LatentTiling, scale):
    refs = list(refs)
    parts = 2 if tiling.quantized else 1  # Rows, and scales if quantized.
    queries_ref, new, refs = refs[0], refs[1 : 1 + parts], refs[1 + parts :]
    tree_ref = refs[0] if tiling.has_tree else None
    # Skip the input pools: they are aliased to the output pools, which are updated in place.
    refs = refs[tiling.has_tree + parts :]
    outputs_ref, pools, refs = refs[0], refs[1 : 1 + parts], refs[1 + parts :]
    softmax, (buffer, semaphores), refs = Softmax(*refs[:4]), refs[4:6], refs[6:]
    (staged_ref, shifted_ref, written), refs = refs[:3], refs[3:]
    scale_buffer, staged_scales_ref = refs if tiling.quantized else (None, None)

    group, sequence = pl.program_id(0), pl.program_id(1)
    start = start_ref[sequence]

    def page_of(sequence, row):
        return table_ref[sequence * tiling.table_width + flash_tpu.div(row, tiling.page_size)]

    def rows_of(sequence, row, rows):
        place = pl.ds(flash_tpu.rem(row, tiling.page_size), rows)
        return [pools[0].at[pl.ds(0, 1), page_of(sequence, row), place]]

    def scales_of(sequence, row):
        return [pools[1].at[pl.ds(0, 1), page_of(sequence, row)]]

    scales = TileScales((scale_buffer,), scales_of, tiling.dtype) if tiling.quantized else None
    stream = TileStream(
        (buffer,), semaphores, rows_of, tiling.page_size, lambda b: start_ref[b], scales,
        value_width=tiling.value_width,
    )  # fmt: skip
    writer = PageWriter(
        tiling.windows, start, pl.ds(0, 1), functools.partial(page_of, sequence), new, pools,
        staged_ref, shifted_ref, staged_scales_ref, written,
    )  # fmt: skip

    @pl.when(sequence == 0)
    def _():
        stream.open(sequence)

    def score(chunk, keys):
        return flash_tpu.scores(queries_ref[chunk], keys, scale=scale)

    _attend_own(tiling, queries_ref, new, tree_ref, softmax, score, scale)

    @pl.when((start == 0) & (group == 0))
    def _():
        writer.write()

    def visit(slot, tile, *, last=False):
        if last:
            pl.when(group == 0)(lambda: writer.write(stream, slot))
        positions = jax.lax.broadcasted_iota(jnp.int32, (1, tiling.tile), 1) + tile * tiling.tile

        def mask(chunk, scores):
            return jnp.where(positions < start, scores, flash_tpu.MASKED) if last else scores

        filled = start - tile * tiling.tile if last else None
        flash_tpu.visit_tile(softmax, stream, slot, score, mask, filled)

    stream.run(
        sequence,
        jnp.minimum(sequence + 1, tiling.batch - 1),
        sequence + 1 < tiling.batch,
        0,
        functools.partial(visit, last=True),
        visit,
    )
    for chunk in range(tiling.chunks):
        outputs_ref[chunk] = softmax.outputs(chunk).astype(outputs_ref.dtype)

    pl.when(group == 0)(writer.wait)


def _attend_own(tiling, queries_ref, new, tree_ref, softmax, score, scale):
    """Initializes every chunk with the attention to the new rows, causal or by the tree mask."""
    keys = Quantized(new[0][0], new[1][0, :, : tiling.length]) if tiling.quantized else new[0][0]
    values = quantized.leading(keys, tiling.value_width)
    if tiling.length == 1:
        for chunk in range(tiling.chunks):
            softmax.begin_single(chunk, queries_ref[chunk], keys, values, scale)
        return
    if tiling.has_tree:
        visible = tree_ref[...] != 0
    else:
        row, other = (
            jax.lax.broadcasted_iota(jnp.int32, (tiling.rows, tiling.length), axis)
            for axis in (0, 1)
        )
        visible = other <= flash_tpu.rem(row, tiling.length)
    for chunk in range(tiling.chunks):
        scores = jnp.where(visible, score(chunk, keys), flash_tpu.MASKED)
        softmax.begin(chunk, scores, values)


def unsupported(queries, pages, value_width: int) -> str | None:
    """Returns why the kernel does not support a call, or None if it does."""
    if value_width % flash_tpu.LANES:
        return f"{OP}: value_width {value_width}, expected a multiple of {flash_tpu.LANES}"
    return paged_write_tpu.unsupported(OP, pages)
