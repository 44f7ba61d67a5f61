"""The Pallas kernel of paged attention; see paged_attention.py for what it computes.

One step serves one sequence (a long prompt takes several, one per tile of queries), and one half of
the kv heads where their number is even: a chip with two cores gives one half to each. Queries are
[K, R, H] with R = N/K · T rows, ordered by head of the group, then by query, so that keys and
values are read as they lie. The new rows are attended from their own arrays while the context's
last tile arrives. They enter that tile's pages in windows of whole memory tiles, because HBM is
not written row by row: what the first window held is put back in front of them.
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

OP = "paged_attention"


def paged_attention_tpu(
    queries,
    keys,
    values,
    key_pages,
    value_pages,
    page_table,
    start,
    tree_mask=None,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    sizes: BlockSizes,
    interpret,
):
    """Arguments and results as those of `paged_attention`."""
    plan = Plan(queries, key_pages, page_table, tree_mask, sizes)
    batch, length = queries.shape[:2]
    rows = plan.split_queries(queries)
    new = [plan.pad(x.astype(key_pages.dtype)).swapaxes(1, 2) for x in (keys, values)]
    arrays = [rows, *new]
    if tree_mask is not None:
        arrays += plan.tree_inputs(tree_mask, window)
    kernel = functools.partial(
        _kernel,
        plan=plan,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
    )
    pools = [key_pages, value_pages]
    first_pool = 2 + len(arrays)
    outputs, *pools = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(plan.head_groups, batch, plan.query_tiles),
            in_specs=[*plan.specs(arrays), *[pl.BlockSpec(memory_space=pl.ANY)] * 2],
            out_specs=[plan.specs(arrays)[0], *[pl.BlockSpec(memory_space=pl.ANY)] * 2],
            scratch_shapes=plan.scratch(),
        ),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (rows, *pools)],
        input_output_aliases={first_pool: 1, first_pool + 1: 2},
        compiler_params=flash_tpu.compiler_params("parallel", "arbitrary", "arbitrary"),
        cost_estimate=plan.cost(),
        interpret=interpret,
        name=f"{OP}_t{length}",
    )(page_table.reshape(-1), start, *arrays, *pools)
    return plan.join_queries(outputs), *pools


class Plan:
    """Shapes of one call: how it is cut up, and what VMEM it takes."""

    def __init__(self, queries, pages, page_table, tree_mask, sizes: BlockSizes):
        self.batch, self.length, self.heads, self.width = queries.shape
        self.kv_heads, _, self.page_size, _ = pages.shape
        self.dtype, self.pool_dtype = jnp.dtype(queries.dtype), jnp.dtype(pages.dtype)
        self.table_width = page_table.shape[1]
        self.has_tree = tree_mask is not None
        self.group = self.heads // self.kv_heads
        self.step_heads = flash_tpu.heads_per_step(self.kv_heads)
        self.head_groups = self.kv_heads // self.step_heads
        whole = self.has_tree or self.length <= sizes.queries
        self.query_tile = self.length if whole else sizes.queries
        self.query_tiles = -(-self.length // self.query_tile)
        self.padded = self.query_tiles * self.query_tile
        self.rows = self.group * self.query_tile
        pages_per_tile = min(max(1, sizes.keys // self.page_size), self.table_width)
        self.tile = pages_per_tile * self.page_size
        self.window_rows = self._window_rows()
        self.windows = -(-(self.length + self.window_rows - 1) // self.window_rows)
        flash_tpu.check_vmem(OP, self._vmem())

    def _window_rows(self) -> int:
        """Rows of a window of the pages that new rows are written by."""
        rows = flash_tpu.row_tile(self.pool_dtype)
        while self.page_size % (2 * rows) == 0 and 2 * rows <= self.length // 4:
            rows *= 2
        return rows

    def split_queries(self, queries):
        """[B, T, N, H] -> [B, tiles, K, R, H]."""
        tiled = self.pad(queries).reshape(
            self.batch, self.query_tiles, self.query_tile, self.kv_heads, self.group, self.width
        )
        return tiled.transpose(0, 1, 3, 4, 2, 5).reshape(
            self.batch, self.query_tiles, self.kv_heads, self.rows, self.width
        )

    def join_queries(self, rows):
        """The inverse of `split_queries`."""
        tiled = rows.reshape(
            self.batch, self.query_tiles, self.kv_heads, self.group, self.query_tile, self.width
        )
        joined = tiled.transpose(0, 1, 4, 2, 3, 5)
        return joined.reshape(self.batch, self.padded, self.heads, self.width)[:, : self.length]

    def pad(self, array):
        """[B, T, ...] -> a whole number of query tiles; causality hides what is added."""
        extra = self.padded - self.length
        return jnp.pad(array, ((0, 0), (0, extra), (0, 0), (0, 0))) if extra else array

    def tree_inputs(self, tree_mask, window):
        """Which new rows each row sees [B, R, T], and its depth in its tree [B, R, 1]."""
        depth = tree_mask.sum(axis=-1, dtype=jnp.int32) - 1
        if window is not None:
            tree_mask &= depth[:, :, None] - depth[:, None, :] < window
        return [
            jnp.tile(tree_mask.astype(jnp.int32), (1, self.group, 1)),
            jnp.tile(depth[:, :, None], (1, self.group, 1)),
        ]

    def specs(self, arrays):
        """Block specs of queries, keys, values and what a tree adds."""
        heads = self.step_heads
        rows = (None, None, heads, self.rows, self.width)
        new = (None, heads, self.padded, self.width)
        found = [
            pl.BlockSpec(rows, lambda g, b, i, *_: (b, i, g, 0, 0)),
            pl.BlockSpec(new, lambda g, b, i, *_: (b, g, 0, 0)),
            pl.BlockSpec(new, lambda g, b, i, *_: (b, g, 0, 0)),
        ]
        for extra in arrays[3:]:
            found.append(pl.BlockSpec((None, *extra.shape[1:]), lambda g, b, i, *_: (b, 0, 0)))
        return found

    def scratch(self):
        """Scratch shapes, in the order that `_kernel` takes them."""
        heads, staged = self.step_heads, self.windows * self.window_rows
        return [
            *Softmax.scratch(heads, self.rows, self.width, self.tile),
            *TileStream.scratch(heads, self.tile, self.width, self.pool_dtype),
            pltpu.VMEM((2, heads, staged, self.width), self.pool_dtype),
            pltpu.VMEM((self.window_rows + staged, min(self.width, flash_tpu.LANES)), jnp.float32),
            pltpu.SemaphoreType.DMA,
        ]

    def _vmem(self):
        heads, width = self.step_heads, self.width
        staged = self.windows * self.window_rows
        arrays = {
            "queries and outputs": ((4, heads, self.rows, width), self.dtype),
            "new keys and values": ((4, heads, self.padded, width), self.pool_dtype),
            "pages": ((2 * BUFFERS, heads, self.tile, width), self.pool_dtype),
            "running softmax": ((heads, self.rows, width + 2 * flash_tpu.LANES), jnp.float32),
            "scores": ((4, self.rows, max(self.tile, self.query_tile)), jnp.float32),
            "windows": ((2, heads, staged, width), self.pool_dtype),
            "shifted rows": ((self.window_rows + staged, flash_tpu.LANES), jnp.float32),
        }
        if self.has_tree:
            arrays["tree"] = ((2, self.rows, self.length + flash_tpu.LANES), jnp.int32)
        return arrays

    def cost(self) -> pl.CostEstimate:
        """Of a call whose sequences fill their page tables."""
        keys = self.table_width * self.page_size
        shape = (self.batch, self.heads, self.kv_heads, self.length, keys, self.width)
        return flash_tpu.cost(*shape, self.pool_dtype)


def _kernel(table_ref, start_ref, *refs, plan: Plan, scale, window, soft_cap):
    refs = list(refs)
    queries_ref, keys_ref, values_ref = refs[:3]
    tree_ref, depth_ref = refs[3:5] if plan.has_tree else (None, None)
    # The pools are updated in place: what comes in under them is not looked at.
    refs = refs[3 + 2 * plan.has_tree + 2 :]
    outputs_ref, *pools = refs[:3]
    softmax, refs = Softmax(*refs[3:7]), refs[7:]
    buffers, (staged_ref, shifted_ref, written) = refs[:3], refs[3:]

    head_group, sequence, query_tile = (pl.program_id(axis) for axis in range(3))
    last_query_tile = query_tile == plan.query_tiles - 1
    own_heads = pl.ds(head_group * plan.step_heads, plan.step_heads)
    start = start_ref[sequence]

    def pages_of(sequence, row, rows):
        page = table_ref[sequence * plan.table_width + flash_tpu.div(row, plan.page_size)]
        return [
            pool.at[own_heads, page, pl.ds(flash_tpu.rem(row, plan.page_size), rows)]
            for pool in pools
        ]

    stream = TileStream(*buffers, pages_of, plan.page_size, lambda b: start_ref[b])

    @pl.when((sequence == 0) & (query_tile == 0))
    def _():
        stream.open(sequence)

    def for_each_head(visit):
        for head in range(plan.step_heads):
            visit(head)

    def score(head, keys):
        return flash_tpu.scores(queries_ref[head], keys, scale=scale, soft_cap=soft_cap)

    # Which of the new rows each row is, and how far it lies behind the first in its own past.
    shape = (plan.rows, 1)
    token = jax.lax.broadcasted_iota(jnp.int32, shape, 0)
    token = token if plan.group == 1 else flash_tpu.rem(token, plan.query_tile)
    token = token + query_tile * plan.query_tile
    depth = depth_ref[...] if plan.has_tree else token

    def own_visible(first_key):
        """Of the new rows from `first_key` on, those that each row sees: [R, query tile]."""
        if plan.has_tree:
            return tree_ref[...] != 0
        other = jax.lax.broadcasted_iota(jnp.int32, (plan.rows, plan.query_tile), 1) + first_key
        visible = other <= token
        return visible if window is None else visible & (token - other < window)

    def attend_own(first_key, fold, masked):
        place = pl.ds(pl.multiple_of(first_key, plan.query_tile), plan.query_tile)
        if plan.query_tiles == 1:
            place = slice(None)

        def visit(head):
            if plan.query_tile == 1:
                own = keys_ref[head], values_ref[head]
                softmax.begin_single(head, queries_ref[head], *own, scale, soft_cap)
                return
            found = score(head, keys_ref[head, place])
            if masked:
                found = jnp.where(own_visible(first_key), found, flash_tpu.MASKED)
            fold(head, found, values_ref[head, place])

        for_each_head(visit)

    attend_own(query_tile * plan.query_tile, softmax.begin, True)
    if plan.query_tiles > 1:

        def earlier(i, _):
            attend_own(i * plan.query_tile, softmax.fold_in, window is not None)

        first = 0
        if window is not None:
            first = flash_tpu.div(
                jnp.maximum(query_tile * plan.query_tile - window + 1, 0), plan.query_tile
            )
        jax.lax.fori_loop(first, query_tile, earlier, None)

    def visit_last(slot, tile):
        @pl.when(last_query_tile)
        def _():
            _write(plan, start, table_ref, sequence, own_heads, slot, stream, keys_ref, values_ref,
                   pools, staged_ref, shifted_ref, written)  # fmt: skip

        visit(slot, tile, last=True)

    def visit(slot, tile, *, last=False):
        slots = jax.lax.broadcasted_iota(jnp.int32, (1, plan.tile), 1) + tile * plan.tile

        def mask(head, found):
            if last:
                found = jnp.where(slots < start, found, flash_tpu.MASKED)
            if window is not None:
                found = jnp.where(slots > start + depth - window, found, flash_tpu.MASKED)
            return found

        filled = start - tile * plan.tile if last else None
        flash_tpu.visit_tile(softmax, stream, slot, score, mask, filled)

    first_tile = 0
    if window is not None:
        first_seen = start + query_tile * plan.query_tile * (not plan.has_tree) - window + 1
        first_tile = flash_tpu.div(jnp.maximum(first_seen, 0), plan.tile)

    following = jnp.where(last_query_tile, sequence + 1, sequence)

    @pl.when((start == 0) & last_query_tile)
    def _():
        _write(plan, start, table_ref, sequence, own_heads, 0, None, keys_ref, values_ref,
               pools, staged_ref, shifted_ref, written)  # fmt: skip

    stream.run(
        sequence,
        jnp.minimum(following, plan.batch - 1),
        following < plan.batch,
        first_tile,
        visit_last,
        visit,
    )

    def finish(head):
        outputs_ref[head] = softmax.outputs(head).astype(outputs_ref.dtype)

    for_each_head(finish)

    @pl.when(last_query_tile)
    def _():
        _copy_windows(plan, start, table_ref, sequence, own_heads, pools, staged_ref, written,
                      lambda copy: copy.wait())  # fmt: skip


def _write(plan, start, table_ref, sequence, own_heads, slot, stream, keys_ref, values_ref,
           pools, staged_ref, shifted_ref, written):  # fmt: skip
    """Puts the new rows in place in whole windows, and starts their copies to the pages.

    `stream` is None where the sequence has no context, and no window has anything to keep.
    """
    window, staged = plan.window_rows, plan.windows * plan.window_rows
    before = flash_tpu.rem(start, window)
    kept = jax.lax.broadcasted_iota(jnp.int32, (window, 1), 0) < before
    for kind, new_ref in enumerate((keys_ref, values_ref)):
        buffers = None if stream is None else (stream.keys, stream.values)[kind]
        for head in range(plan.step_heads):
            # Only 32-bit rows can be read from any row on, and only one tile of lanes at a time.
            moved = []
            lanes = shifted_ref.shape[-1]
            for i in range(plan.width // lanes):
                new = new_ref[head, : plan.length, i * lanes : (i + 1) * lanes]
                shifted_ref[...] = jnp.zeros_like(shifted_ref)
                shifted_ref[window : window + plan.length] = new.astype(jnp.float32)
                moved.append(shifted_ref[pl.ds(window - before, staged)])
            moved = jnp.concatenate(moved, axis=-1).astype(staged_ref.dtype)
            if stream is not None:
                filled = flash_tpu.rem(start - 1, plan.tile) + 1
                first = pl.multiple_of(jnp.minimum(filled - before, plan.tile - window), window)
                old = buffers[slot, head, pl.ds(first, window)]
                first_window = jnp.where(kept, old, moved[:window])
                staged_ref[kind, head, :window] = first_window
                if staged > window:
                    staged_ref[kind, head, window:] = moved[window:]
            else:
                staged_ref[kind, head] = moved
    _copy_windows(plan, start, table_ref, sequence, own_heads, pools, staged_ref, written,
                  lambda copy: copy.start())  # fmt: skip


def _copy_windows(plan, start, table_ref, sequence, own_heads, pools, staged_ref, written, act):
    window = plan.window_rows
    first = start - flash_tpu.rem(start, window)
    for i in range(plan.windows):
        row = first + i * window

        @pl.when(row < start + plan.length)
        def _(i=i, row=row):
            page = table_ref[sequence * plan.table_width + flash_tpu.div(row, plan.page_size)]
            place = pl.ds(pl.multiple_of(flash_tpu.rem(row, plan.page_size), window), window)
            for kind, pool in enumerate(pools):
                staged = staged_ref.at[kind, :, i * window : (i + 1) * window]
                act(pltpu.make_async_copy(staged, pool.at[own_heads, page, place], written))


def unsupported(queries, key_pages) -> str | None:
    """Why the kernel does not cover a call; None if it does."""
    width, page_size = queries.shape[-1], key_pages.shape[2]
    if width not in flash_tpu.HEAD_DIMS:
        return f"{OP}: head_dim {width} is none of {flash_tpu.HEAD_DIMS}"
    unit = flash_tpu.row_tile(key_pages.dtype)
    if page_size % unit:
        dtype = jnp.dtype(key_pages.dtype).name
        return f"{OP}: pages of {page_size} rows are no multiple of {unit}, a tile of {dtype}"
    return None
