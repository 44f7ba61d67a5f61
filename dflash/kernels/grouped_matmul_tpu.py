"""The Pallas kernel of grouped products; see grouped_matmul.py for what it computes.

One step multiplies one tile of rows, all of one group, with some columns of the group's weights.
Tiles of a group follow one another, so its weights stay in VMEM meanwhile, and weights of groups
without rows are never read. Weights in eight bits are read as such, and become wider in VMEM:
`jax.lax.ragged_dot` would want all of them wide in HBM.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from dflash.kernels import flash_tpu
from dflash.kernels.tuning import GROUPED_WEIGHTS

OP = "grouped_matmul"


def grouped_matmul_tpu(rows, weights, group, used, scales=None, *, block, read, interpret):
    """Tiles of rows, each times the weights of its group.

    Args:
      rows: [N, R, D]; tiles in use come first, those of a group next to one another.
      weights: [E, D, F].
      group: int32 [N]; of each tile. Tiles that are not in use name the last one's.
      used: int32 []; tiles in use.
      scales: see `grouped_matmul`.
      block: likewise.
      read: likewise.
      interpret: for `pl.pallas_call`.
    Returns:
      [N, R, F]; anything in the tiles that are not in use.
    """
    count, tile, depth = rows.shape
    groups, _, width = weights.shape
    columns = columns_per_step(depth, width)
    arrays = [rows, weights]
    specs = [
        # Of tiles that are not in use nothing is read.
        pl.BlockSpec((None, tile, depth), lambda f, n, group, used: (_last(n, used), 0, 0)),
        pl.BlockSpec((None, depth, columns), lambda f, n, group, used: (group[n], 0, f)),
    ]
    if scales is not None:
        if block is not None:  # the scale of every column, for each block of inputs
            scales = jnp.repeat(scales, block[1], axis=-1)[..., :width]
        arrays.append(scales)
        of_step = (None, scales.shape[1], columns)
        specs.append(pl.BlockSpec(of_step, lambda f, n, group, used: (group[n], 0, f)))
    # Those of groups that are read, and as many more as groups may leave half empty.
    used_tiles = min(count, round(read * groups) + count - min(count, groups))
    return pl.pallas_call(
        functools.partial(_kernel, inputs=block and block[0]),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(width // columns, count),
            in_specs=specs,
            out_specs=pl.BlockSpec((None, tile, columns), lambda f, n, *_: (n, 0, f)),
        ),
        out_shape=jax.ShapeDtypeStruct((count, tile, width), rows.dtype),
        compiler_params=flash_tpu.compiler_params("parallel", "arbitrary"),
        cost_estimate=pl.CostEstimate(
            flops=2 * used_tiles * tile * depth * width,
            transcendentals=0,
            bytes_accessed=round(read * sum(x.size * x.dtype.itemsize for x in arrays[1:])),
        ),
        interpret=interpret,
        name=f"{OP}_r{tile}",
    )(group, used[None], *arrays)


def columns_per_step(depth: int, width: int) -> int | None:
    """Columns of weights that a step takes; None where no number of them fits.

    An even number of parts where that is possible, for a chip with two cores.
    """
    whole = width if width % flash_tpu.LANES else flash_tpu.LANES
    fitting = [
        columns
        for columns in range(whole, width + 1, whole)
        if width % columns == 0 and depth * columns <= GROUPED_WEIGHTS
    ]
    even = [columns for columns in fitting if (width // columns) % 2 == 0]
    return max(even or fitting, default=None)


def unsupported(rows, weights, block) -> str | None:
    """Why the kernel does not cover a call; None if it does."""
    depth, width = weights.shape[1:]
    if depth % flash_tpu.LANES:
        return f"{OP}: rows of {depth} numbers are no multiple of {flash_tpu.LANES}"
    if columns_per_step(depth, width) is None:
        return f"{OP}: weights {depth} × {width} are too large for VMEM"
    unit = flash_tpu.row_tile(weights.dtype)
    if block is not None and (depth % block[0] or block[0] % unit):
        return f"{OP}: blocks of {block[0]} of {depth} inputs are not whole tiles of {unit}"
    return None


def _last(tile, used):
    return jnp.minimum(tile, jnp.maximum(used[0] - 1, 0))


def _kernel(group_ref, used_ref, rows_ref, weights_ref, *refs, inputs):
    *scales_ref, out_ref = refs

    @pl.when(pl.program_id(1) < used_ref[0])
    def _():
        weights = weights_ref[...]
        scales = scales_ref[0][...] if scales_ref else None
        if inputs is not None and scales is not None:
            parts = weights.astype(jnp.float32).reshape(-1, inputs, weights.shape[-1])
            weights, scales = (parts * scales[:, None]).reshape(weights.shape), None
        product = flash_tpu.dot(rows_ref[...], weights.astype(rows_ref.dtype))
        product = product if scales is None else product * scales
        out_ref[...] = product.astype(out_ref.dtype)
