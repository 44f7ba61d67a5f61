"""Pallas kernel of paged attention; see paged_attention.py for its semantics.

A grid step processes one tile of queries of one sequence; only long prompts have several tiles. It
covers half of the kv heads if their number is even, one half for each core of a chip with two
cores. Queries are [K, R, H] with R = N/K · T rows, ordered by head of the group, then by query, so
that keys and values are read in their own layout. Outputs of whole memory tiles are written to the
columns of their heads, [T, N · H], as the output projection reads them. The kernel attends to the
new rows from their own arrays while the context's last tile arrives; paged_write_tpu.py writes them
to that tile's pages.

Quantized new rows are passed in the queries' dtype, which holds them exactly, and are converted to
eight bits when they are written to the pages.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from dflash.kernels import flash_tpu, paged_write_tpu
from dflash.kernels.flash_tpu import Softmax
from dflash.kernels.paged_write_tpu import PageWriter, Windows
from dflash.kernels.quantized import Quantized
from dflash.kernels.tile_stream_tpu import BUFFERS, TileScales, TileStream
from dflash.kernels.tuning import BlockSizes

OP = "paged_attention"


def paged_attention_tpu(
    *arrays,
    scale: float,
    window: int | None,
    sizes: BlockSizes,
    by_position: bool = False,
    interpret,
):
    """Computes `paged_attention` with keys and values [B, K, T, H] in their stored form.

    If `by_position`, the pages hold the new rows already, and the kernel reads all keys from there,
    tile by tile in ascending order.
    """
    queries, keys, values, key_pages, value_pages, page_table, start, tree_mask, sinks = arrays
    has_sinks = sinks is not None
    tiling = PagedTiling(
        queries, key_pages, page_table, tree_mask, window, has_sinks, sizes, by_position
    )
    inputs = [tiling.split_queries(queries), *tiling.new_rows(keys, values)]
    inputs += tiling.shared_inputs(tree_mask, sinks)
    kernel = functools.partial(attend_step, tiling=tiling, scale=scale)
    scalars = page_table.reshape(-1), start
    outputs, *pools = call(kernel, tiling, scalars, inputs, key_pages, value_pages, interpret)
    return tiling.join_queries(outputs), *pools


def call(kernel, tiling, scalars, arrays, key_pages, value_pages, interpret):
    """Calls a kernel that updates pools of pages in place.

    Args:
      scalars: Arrays of scalars, which precede all other references.
      arrays: Arrays in the order of `tiling.specs`.
    Returns:
      Outputs in the shape `tiling.output_shape`, key_pages, value_pages.
    """
    pools = _parts(key_pages, value_pages)
    first_pool = len(scalars) + len(arrays)
    outputs, *pools = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(tiling.head_groups, tiling.batch, tiling.query_tiles),
            in_specs=[*tiling.specs(), *[pl.BlockSpec(memory_space=pl.ANY)] * len(pools)],
            out_specs=[tiling.output_spec(), *[pl.BlockSpec(memory_space=pl.ANY)] * len(pools)],
            scratch_shapes=tiling.scratch(),
        ),
        out_shape=[
            jax.ShapeDtypeStruct(tiling.output_shape, tiling.dtype),
            *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in pools),
        ],
        input_output_aliases={first_pool + i: 1 + i for i in range(len(pools))},
        compiler_params=flash_tpu.compiler_params("parallel", "arbitrary", "arbitrary"),
        cost_estimate=tiling.cost(),
        interpret=interpret,
        name=f"{OP}{tiling.suffix}_t{tiling.length}",
    )(*scalars, *arrays, *pools)
    if tiling.quantized:
        pools = [Quantized(pools[kind], pools[2 + kind]) for kind in range(2)]
    return outputs, *pools


def _parts(keys, values) -> list:
    """Returns keys and values, followed by key scales and value scales if quantized."""
    if isinstance(keys, Quantized):
        return [keys.values, values.values, keys.scales, values.scales]
    return [keys, values]


class PagedTiling:
    """Shapes of one call: its tiles, blocks and scratch arrays."""

    suffix = ""  # Of the kernel's name.

    def __init__(
        self,
        queries,
        pages,
        page_table,
        tree_mask,
        window,
        has_sinks,
        sizes: BlockSizes,
        by_position: bool = False,
    ):
        self.by_position = by_position
        self.batch, self.length, self.heads, self.width = queries.shape
        self.kv_heads, _, self.page_size, _ = pages.shape
        self.dtype, self.pool_dtype = jnp.dtype(queries.dtype), jnp.dtype(pages.dtype)
        self.quantized = isinstance(pages, Quantized)
        self.new_dtype = self.dtype if self.quantized else self.pool_dtype
        self.table_width = page_table.shape[1]
        self.has_tree, self.has_sinks = tree_mask is not None, has_sinks
        self.window = window
        self.group = self.heads // self.kv_heads
        self.step_heads = flash_tpu.heads_per_step(self.kv_heads)
        self.head_groups = self.kv_heads // self.step_heads
        is_untiled = self.has_tree or self.length <= sizes.queries
        self.query_tile = self.length if is_untiled else sizes.queries
        self.query_tiles = -(-self.length // self.query_tile)
        self.padded = self.query_tiles * self.query_tile
        self.rows = self.group * self.query_tile
        self.in_columns = not (self.width % flash_tpu.LANES or self.query_tile % flash_tpu.SUBLANES)
        pages_per_tile = min(max(1, sizes.keys // self.page_size), self.table_width)
        self.tile = pages_per_tile * self.page_size
        self.windows = Windows(
            2, self.step_heads, self.length, self.padded, self.width, self.page_size,
            self.pool_dtype, self.quantized,
        )  # fmt: skip
        flash_tpu.check_vmem(OP, self._vmem())

    def split_queries(self, queries):
        """Transposes queries [B, T, N, H] to [B, tiles, K, R, H]."""
        tiled = self.pad(queries).reshape(
            self.batch, self.query_tiles, self.query_tile, self.kv_heads, self.group, self.width
        )
        return tiled.transpose(0, 1, 3, 4, 2, 5).reshape(
            self.batch, self.query_tiles, self.kv_heads, self.rows, self.width
        )

    @property
    def output_shape(self) -> tuple[int, ...]:
        """Shape of the outputs: [B, padded, N · H], or that of `split_queries`."""
        if self.in_columns:
            return self.batch, self.padded, self.heads * self.width
        return self.batch, self.query_tiles, self.kv_heads, self.rows, self.width

    def output_spec(self) -> pl.BlockSpec:
        """Returns the block spec of the outputs."""
        if not self.in_columns:
            return self.specs()[0]
        columns = self.step_heads * self.group * self.width
        return pl.BlockSpec((None, self.query_tile, columns), lambda g, b, i, *_: (b, i, g))

    def store(self, outputs_ref, head, rows):
        """Stores the outputs [R, H] of a head of the grid step's."""
        if not self.in_columns:
            outputs_ref[head] = rows.astype(outputs_ref.dtype)
            return
        for member in range(self.group):
            first = (head * self.group + member) * self.width
            member_rows = rows[member * self.query_tile : (member + 1) * self.query_tile]
            outputs_ref[:, first : first + self.width] = member_rows.astype(outputs_ref.dtype)

    def join_queries(self, rows):
        """Returns outputs [B, T, N, H]."""
        if self.in_columns:
            return rows[:, : self.length].reshape(self.batch, self.length, self.heads, self.width)
        tiled = rows.reshape(
            self.batch, self.query_tiles, self.kv_heads, self.group, self.query_tile, self.width
        )
        joined = tiled.transpose(0, 1, 4, 2, 3, 5)
        return joined.reshape(self.batch, self.padded, self.heads, self.width)[:, : self.length]

    def pad(self, array, axis=1, size=None):
        """Pads T to whole query tiles, or to `size`; the causal mask hides the padding."""
        extra = (size or self.padded) - self.length
        padding = [(0, extra if i == axis else 0) for i in range(array.ndim)]
        return jnp.pad(array, padding) if extra else array

    def new_rows(self, keys, values):
        """Returns keys and values [B, K, padded, H], and any scales [B, K, 1, scale lanes]."""
        parts = _parts(keys, values)
        rows = [self.pad(x.astype(self.new_dtype), 2) for x in parts[:2]]
        return [*rows, *(self.pad(x, 3, self.windows.scale_lanes) for x in parts[2:])]

    def shared_inputs(self, tree_mask, sinks) -> list:
        """Returns the arrays that follow queries, keys and values: any tree mask, any sinks."""
        trees = [] if tree_mask is None else [self._tree_input(tree_mask)]
        if sinks is None:
            return trees
        return [*trees, flash_tpu.sink_rows(sinks, self.kv_heads, self.query_tile)]

    def _tree_input(self, tree_mask):
        """Returns the depth plus one of each row of queries at the new rows that it sees.

        It is int32 [B, R, T], and 0 at the new rows that it does not see.
        """
        depth = tree_mask.sum(axis=-1) - 1
        if self.window is not None:
            tree_mask = tree_mask & (depth[:, :, None] - depth[:, None] < self.window)
        seen = jnp.where(tree_mask, depth[:, :, None] + 1, 0)
        return jnp.tile(seen.astype(jnp.int32), (1, self.group, 1))

    def specs(self):
        """Returns the block specs of queries, keys, values, any scales, tree mask and sinks."""
        heads = self.step_heads
        rows = (None, None, heads, self.rows, self.width)
        new = (None, heads, self.padded, self.width)
        specs = [
            pl.BlockSpec(rows, lambda g, b, i, *_: (b, i, g, 0, 0)),
            pl.BlockSpec(new, lambda g, b, i, *_: (b, g, 0, 0)),
            pl.BlockSpec(new, lambda g, b, i, *_: (b, g, 0, 0)),
        ]
        if self.quantized:
            scales = (None, heads, 1, self.windows.scale_lanes)
            specs += [pl.BlockSpec(scales, lambda g, b, i, *_: (b, g, 0, 0))] * 2
        if self.has_tree:
            tree = (None, self.rows, self.length)
            specs.append(pl.BlockSpec(tree, lambda g, b, i, *_: (b, 0, 0)))
        if self.has_sinks:
            sinks = (heads, self.rows, flash_tpu.LANES)
            specs.append(pl.BlockSpec(sinks, lambda g, b, i, *_: (g, 0, 0)))
        return specs

    def scratch(self):
        """Returns the scratch shapes, in the order in which `attend_step` takes them."""
        heads = self.step_heads
        return [
            *Softmax.scratch(heads, self.rows, self.width, self.tile),
            *TileStream.scratch(heads, self.tile, self.width, self.pool_dtype),
            *self.windows.scratch(),
            *(TileScales.scratch(heads, self.tile) if self.quantized else ()),
            *self.windows.scale_scratch(),
        ]

    def _vmem(self):
        heads, width = self.step_heads, self.width
        arrays = {
            "queries and outputs": ((4, heads, self.rows, width), self.dtype),
            "new keys and values": ((4, heads, self.padded, width), self.new_dtype),
            "pages": ((2 * BUFFERS, heads, self.tile, width), self.pool_dtype),
            "running softmax": ((heads, self.rows, width + 2 * flash_tpu.LANES), jnp.float32),
            "scores": ((4, self.rows, max(self.tile, self.query_tile)), jnp.float32),
            **self.windows.vmem(self.tile, BUFFERS),
        }
        if self.has_tree:
            arrays["tree"] = ((2, self.rows, self.length), jnp.int32)
        if self.has_sinks:
            arrays["sinks"] = ((2, heads, self.rows, flash_tpu.LANES), jnp.float32)
        return arrays

    def cost(self) -> pl.CostEstimate:
        """Returns the cost of a call whose sequences fill their page tables."""
        keys = self.table_width * self.page_size
        shape = (self.batch, self.heads, self.kv_heads, self.length, keys, self.width)
        return flash_tpu.cost(*shape, self.pool_dtype)


def attend_step(table_ref, start_ref, *refs, tiling: PagedTiling, scale):
    """Runs a grid step, given references to scalars, to the arrays of `call`, and to scratch."""
    refs = list(refs)
    queries_ref, refs = refs[0], refs[1:]
    # Keys and values, followed by their scales if quantized.
    parts = 4 if tiling.quantized else 2
    new, refs = refs[:parts], refs[parts:]
    tree_ref, refs = (refs[0], refs[1:]) if tiling.has_tree else (None, refs)
    sinks_ref, refs = (refs[0], refs[1:]) if tiling.has_sinks else (None, refs)
    # Skip the input pools: they are aliased to the output pools, which are updated in place.
    refs = refs[parts:]
    outputs_ref, pools, refs = refs[0], refs[1 : 1 + parts], refs[1 + parts :]
    softmax, refs = Softmax(*refs[:4]), refs[4:]
    (*buffers, semaphores), (staged_ref, shifted_ref, written), refs = refs[:3], refs[3:6], refs[6:]
    scale_buffers, staged_scales_ref = (refs[:2], refs[2]) if tiling.quantized else ((), None)

    head_group, sequence, query_tile = (pl.program_id(axis) for axis in range(3))
    last_query_tile = query_tile == tiling.query_tiles - 1
    writes = last_query_tile & (not tiling.by_position)
    own_heads = pl.ds(head_group * tiling.step_heads, tiling.step_heads)
    start, by_position = start_ref[sequence], tiling.by_position
    appended = tiling.length if by_position else 0  # New rows that are read from their pages.

    def page_of(sequence, row):
        return table_ref[sequence * tiling.table_width + flash_tpu.div(row, tiling.page_size)]

    def pages_of(sequence, row, rows):
        place = pl.ds(flash_tpu.rem(row, tiling.page_size), rows)
        return [pool.at[own_heads, page_of(sequence, row), place] for pool in pools[:2]]

    def scales_of(sequence, row):
        return [pool.at[own_heads, page_of(sequence, row)] for pool in pools[2:]]

    scales = TileScales(scale_buffers, scales_of, tiling.dtype) if tiling.quantized else None
    stream = TileStream(
        tuple(buffers), semaphores, pages_of, tiling.page_size,
        lambda b: start_ref[b] + appended, scales, ascending=by_position,
    )  # fmt: skip
    writer = PageWriter(
        tiling.windows, start, own_heads, functools.partial(page_of, sequence), new, pools,
        staged_ref, shifted_ref, staged_scales_ref, written,
    )  # fmt: skip

    @pl.when((sequence == 0) & (query_tile == 0))
    def _():
        stream.open(sequence)

    def for_each_head(visit):
        for head in range(tiling.step_heads):
            visit(head)

    def score(head, keys):
        return flash_tpu.scores(queries_ref[head], keys, scale=scale)

    # Index of the new row to which each row of queries belongs.
    shape = (tiling.rows, 1)
    new_row = jax.lax.broadcasted_iota(jnp.int32, shape, 0)
    new_row = new_row if tiling.group == 1 else flash_tpu.rem(new_row, tiling.query_tile)
    new_row = new_row + query_tile * tiling.query_tile
    first_row, window = query_tile * tiling.query_tile, tiling.window
    if window is not None:
        depth = tree_ref[...].max(axis=-1, keepdims=True) - 1 if tiling.has_tree else new_row
        # First position that each row sees, and the least of them.
        first_visible = start + depth - (window - 1)
        least_visible = jnp.maximum(start + first_row - (window - 1), 0)

    def own_visible(first_key):
        """Returns the mask [R, query tile] of the new rows from `first_key` on."""
        if tiling.has_tree:
            return tree_ref[...] != 0
        other = jax.lax.broadcasted_iota(jnp.int32, (tiling.rows, tiling.query_tile), 1) + first_key
        visible = other <= new_row
        return visible if window is None else visible & (new_row - other < window)

    def attend_own(first_key, fold, masked):
        place = pl.ds(pl.multiple_of(first_key, tiling.query_tile), tiling.query_tile)
        if tiling.query_tiles == 1:
            place = slice(0, tiling.query_tile)

        def new_rows(kind, head):
            rows = new[kind][head, place]
            return Quantized(rows, new[2 + kind][head, :, place]) if tiling.quantized else rows

        def visit(head):
            if tiling.query_tile == 1:
                rows = new_rows(0, head), new_rows(1, head)
                softmax.begin_single(head, queries_ref[head], *rows, scale)
                return
            scores = score(head, new_rows(0, head))
            if masked:
                scores = jnp.where(own_visible(first_key), scores, flash_tpu.MASKED)
            fold(head, scores, new_rows(1, head))

        for_each_head(visit)

    if by_position:
        for_each_head(softmax.clear)
    else:
        attend_own(first_row, softmax.begin, True)
    if tiling.query_tiles > 1 and not by_position:

        def attend_earlier(i, _):
            attend_own(i * tiling.query_tile, softmax.fold_in, window is not None)

        first = 0
        if window is not None:
            first = flash_tpu.div(jnp.maximum(first_row - (window - 1), 0), tiling.query_tile)
        jax.lax.fori_loop(first, query_tile, attend_earlier, None)

    def visit_last(slot, tile):
        @pl.when(writes)
        def _():
            writer.write(stream, slot)

        visit(slot, tile, last=True)

    def visit(slot, tile, *, last=False):
        positions = jax.lax.broadcasted_iota(jnp.int32, (1, tiling.tile), 1) + tile * tiling.tile

        def mask(head, scores):
            if by_position:
                scores = jnp.where(positions <= start + new_row, scores, flash_tpu.MASKED)
            elif last:
                scores = jnp.where(positions < start, scores, flash_tpu.MASKED)
            if window is None:
                return scores
            return jnp.where(positions >= first_visible, scores, flash_tpu.MASKED)

        filled = start + appended - tile * tiling.tile if last else None
        flash_tpu.visit_tile(softmax, stream, slot, score, mask, filled)

    following = jnp.where(last_query_tile, sequence + 1, sequence)

    @pl.when((start == 0) & writes)
    def _():
        writer.write()

    stream.run(
        sequence,
        jnp.minimum(following, tiling.batch - 1),
        following < tiling.batch,
        0 if window is None else flash_tpu.div(least_visible, tiling.tile),
        visit_last,
        visit,
    )

    def finish(head):
        sink = sinks_ref[head, :, :1] if tiling.has_sinks else None
        tiling.store(outputs_ref, head, softmax.outputs(head, sink))

    for_each_head(finish)

    @pl.when(writes)
    def _():
        writer.wait()


def unsupported(queries, key_pages) -> str | None:
    """Returns why the kernel does not support a call, or None if it does."""
    width = queries.shape[-1]
    if width not in flash_tpu.HEAD_DIMS:
        return f"{OP}: head_dim {width} is not one of {flash_tpu.HEAD_DIMS}"
    return paged_write_tpu.unsupported(OP, key_pages)
