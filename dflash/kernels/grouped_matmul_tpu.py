"""Pallas kernel of grouped matrix products; see grouped_matmul.py for its semantics.

A grid step multiplies one tile of rows, all of one group, with some columns of the group's weights.
Tiles of a group are consecutive, so its weights stay in VMEM, and weights of groups without rows
are never read. 8-bit weights are read as such and widened in VMEM; `jax.lax.ragged_dot` would need
all of them widened in HBM.

If there are few rows, all of them are kept in VMEM, and exact products with a 0/1 matrix gather the
rows of each tile and scatter its results. Tiles in HBM would then be mostly empty, and larger than
the weights that are read. If there are many rows, the caller gathers the tiles.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from dflash.kernels import flash_tpu
from dflash.kernels.tuning import GROUPED_ROWS, GROUPED_WEIGHTS

OP = "grouped_matmul"
_DEPTH_UNIT = 32  # Rows of a tile of 8-bit weights.


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Division of sorted rows into tiles of equal size, each with rows of a single group.

    The tiles of a group are consecutive. Its last one may extend into rows of the next group, whose
    results are discarded.

    Attributes:
      begin: int32 [N]; first row of each tile.
      size: Rows per tile.
      group: int32 [N]; group of each tile. Unused tiles have the group of the last used tile.
      end: int32 [N]; end of the rows of each tile's group.
      num_used: int32 []; number of tiles in use, which come first.
      place: int32 [rows]; index of each row among the rows of all tiles.
      inside: bool [rows]; whether each row belongs to a group.
    """

    begin: jax.Array
    size: int
    group: jax.Array
    end: jax.Array
    num_used: jax.Array
    place: jax.Array
    inside: jax.Array

    def gather(self, rows: jax.Array, begin: jax.Array) -> jax.Array:
        """Gathers the tiles [..., size, D] of rows [rows, D] that begin at `begin`."""
        return rows[jnp.minimum(begin[..., None] + jnp.arange(self.size), len(rows) - 1)]


def grouped_matmul_tpu(rows, weights, tiles: Tiles, scales=None, *, block, read, interpret):
    """Multiplies each tile by the weights of its group.

    Args:
      rows: [R, D] if `fits_vmem` is true for them; otherwise the rows of each tile, [N, tile, D].
      weights: [E, D, F].
      scales: Scales of 8-bit weights; see `grouped_matmul`.
      block: Inputs and outputs per scale; None for one scale per output.
      read: Fraction of the weights that is expected to be read.
    Returns:
      [R, F] or [N, tile, F]; undefined for rows without a group and in unused tiles.
    """
    groups, depth, width = weights.shape
    columns, count = columns_per_step(depth, width), len(tiles.group)
    in_vmem = rows.ndim == 2
    arrays = [weights]
    specs = [pl.BlockSpec((None, depth, columns), lambda f, n, group, *_: (group[n], 0, f))]
    if scales is not None:
        if block is not None:  # Repeat scales for the columns of a block.
            scales = jnp.repeat(scales, block[1], axis=-1)[..., :width]
        arrays.append(scales)
        scale_block = (None, scales.shape[1], columns)
        specs.append(pl.BlockSpec(scale_block, lambda f, n, group, *_: (group[n], 0, f)))
    if in_vmem:
        row_spec = pl.BlockSpec(rows.shape, lambda f, n, *_: (0, 0))
        outputs = pl.BlockSpec((len(rows), columns), lambda f, n, *_: (0, f))
    else:
        row_spec = pl.BlockSpec((None, tiles.size, depth), lambda f, n, *_: (n, 0, 0))
        outputs = pl.BlockSpec((None, tiles.size, columns), lambda f, n, *_: (n, 0, f))
    # Expected tiles in use: one per group that is read, plus the excess of tiles over groups.
    expected = min(count, round(read * groups) + count - min(count, groups))
    return pl.pallas_call(
        functools.partial(_kernel, tile=tiles.size, in_vmem=in_vmem, inputs=block and block[0]),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(pl.cdiv(width, columns), jnp.maximum(tiles.num_used, 1)),
            in_specs=[row_spec, *specs],
            out_specs=outputs,
        ),
        out_shape=jax.ShapeDtypeStruct((*rows.shape[:-1], width), rows.dtype),
        compiler_params=flash_tpu.compiler_params("parallel", "arbitrary"),
        cost_estimate=pl.CostEstimate(
            flops=2 * expected * tiles.size * depth * width,
            transcendentals=0,
            bytes_accessed=round(read * sum(x.size * x.dtype.itemsize for x in arrays)),
        ),
        interpret=interpret,
        name=f"{OP}_r{tiles.size}" if in_vmem else f"{OP}_tiles_r{tiles.size}",
    )(tiles.group, tiles.begin, tiles.end, rows, *arrays)


def fits_vmem(rows: jax.Array) -> bool:
    """Returns whether all rows [R, D] fit in VMEM."""
    return len(rows) <= GROUPED_ROWS and rows.size <= GROUPED_WEIGHTS


def columns_per_step(depth: int, width: int) -> int | None:
    """Returns the columns of weights per grid step, or None if no number of columns fits.

    The last step has fewer columns if no number of whole lanes divides the width. The number of
    column tiles is even where possible, for chips with two cores.
    """
    if width % flash_tpu.LANES:
        if depth * width <= GROUPED_WEIGHTS:
            return width
        fitting = GROUPED_WEIGHTS // depth // flash_tpu.LANES
        return fitting * flash_tpu.LANES or None
    fitting = [
        columns
        for columns in range(flash_tpu.LANES, width + 1, flash_tpu.LANES)
        if width % columns == 0 and depth * columns <= GROUPED_WEIGHTS
    ]
    even = [columns for columns in fitting if (width // columns) % 2 == 0]
    return max(even or fitting, default=None)


def unsupported(rows, weights, block) -> str | None:
    """Returns why the kernel does not support a call, or None if it does."""
    depth, width = weights.shape[1:]
    if depth % _DEPTH_UNIT:
        return f"{OP}: rows of {depth} elements, expected a multiple of {_DEPTH_UNIT}"
    if columns_per_step(depth, width) is None:
        return f"{OP}: weights {depth} × {width} are too large for VMEM"
    unit = flash_tpu.row_tile(weights.dtype)
    if block is not None and (depth % block[0] or block[0] % unit):
        return (
            f"{OP}: blocks of {block[0]} inputs, expected a divisor of {depth} "
            f"and a multiple of {unit}"
        )
    return None


def _kernel(group_ref, begin_ref, end_ref, rows_ref, weights_ref, *refs, tile, in_vmem, inputs):
    *scales_ref, out_ref = refs
    step = pl.program_id(1)
    weights = weights_ref[...]
    scales = scales_ref[0][...] if scales_ref else None
    if inputs is not None and scales is not None:
        parts = weights.astype(jnp.float32).reshape(-1, inputs, weights.shape[-1])
        weights, scales = (parts * scales[:, None]).reshape(weights.shape), None

    def product(rows):
        out = flash_tpu.dot(rows, weights.astype(rows.dtype))
        return (out if scales is None else out * scales).astype(out_ref.dtype)

    if not in_vmem:
        out_ref[...] = product(rows_ref[...])
        return
    rows = rows_ref[...]
    shape = (tile, len(rows))
    tile_row, row = (jax.lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
    tile_row = tile_row + begin_ref[step]
    is_selected = (tile_row == row) & (tile_row < end_ref[step])
    selection = jnp.where(is_selected, 1.0, 0.0).astype(rows.dtype)
    products = product(flash_tpu.dot(selection, rows).astype(rows.dtype))
    placed = flash_tpu.dot_columns(selection, products).astype(out_ref.dtype)

    @pl.when(step == 0)
    def _():
        out_ref[...] = placed

    @pl.when(step > 0)
    def _():
        out_ref[...] += placed
