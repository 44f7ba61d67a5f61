"""The Pallas kernel of split_heads; see split_heads.py for what it computes.

One step serves a tile of rows, and half of the heads where their number is even: a chip with two
cores gives one half to each. A head is as wide as the lanes, so taking it out of its row moves
nothing.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from dflash.kernels import flash_tpu

OP = "split_heads"
TILE_ROWS = 128


def split_heads_tpu(rows, cos, sin, scale=None, *, eps: float, interpret):
    """Arguments and results as those of `split_heads`."""
    batch, length, columns = rows.shape
    width = 2 * cos.shape[-1]
    heads = columns // width
    step_heads = flash_tpu.heads_per_step(heads)
    tile = min(length, TILE_ROWS)
    # A half turn of the lanes and these stand for the two halves of a rotation.
    turns = [jnp.concatenate([cos, cos], axis=-1), jnp.concatenate([-sin, sin], axis=-1)]
    arrays = [rows, *(turn[:, :, 0] for turn in turns)]
    columns_of_step = pl.BlockSpec((None, tile, step_heads * width), lambda g, b, i: (b, i, g))
    angles = pl.BlockSpec((None, tile, width), lambda g, b, i: (b, i, 0))
    specs = [columns_of_step, angles, angles]
    if scale is not None:
        arrays.append(scale[None])
        specs.append(pl.BlockSpec((1, width), lambda g, b, i: (0, 0)))
    outputs = pl.pallas_call(
        functools.partial(_kernel, eps=eps),
        grid=(heads // step_heads, batch, length // tile),
        in_specs=specs,
        out_specs=pl.BlockSpec((None, step_heads, tile, width), lambda g, b, i: (b, g, i, 0)),
        out_shape=jax.ShapeDtypeStruct((batch, heads, length, width), rows.dtype),
        compiler_params=flash_tpu.compiler_params("parallel", "arbitrary", "arbitrary"),
        cost_estimate=pl.CostEstimate(
            flops=8 * rows.size,
            transcendentals=rows.size // width,
            bytes_accessed=2 * rows.size * rows.dtype.itemsize,
        ),
        interpret=interpret,
        name=OP,
    )(*arrays)
    return outputs.swapaxes(1, 2)


def _kernel(rows_ref, cos_ref, sin_ref, *refs, eps):
    *scale_ref, outputs_ref = refs
    heads, _, width = outputs_ref.shape
    cos, sin = cos_ref[...], sin_ref[...]
    scale = scale_ref[0][...].astype(jnp.float32) if scale_ref else None
    for head in range(heads):
        x = rows_ref[:, head * width : (head + 1) * width].astype(jnp.float32)
        if scale is not None:
            x *= jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
            # Rounded where plain JAX rounds.
            x = scale * x.astype(rows_ref.dtype).astype(jnp.float32)
            x = x.astype(rows_ref.dtype).astype(jnp.float32)
        half = width // 2
        turned = jnp.concatenate([x[:, half:], x[:, :half]], axis=-1)
        outputs_ref[head] = (x * cos + turned * sin).astype(outputs_ref.dtype)


def unsupported(rows, cos, sin, scale=None) -> str | None:
    """Why the kernel does not cover a call; None if it does."""
    length, width = rows.shape[1], 2 * cos.shape[-1]
    if width % flash_tpu.LANES:
        return f"{OP}: heads of {width} are no multiple of {flash_tpu.LANES}"
    if length > TILE_ROWS and length % TILE_ROWS:
        return f"{OP}: {length} rows are no multiple of {TILE_ROWS}"
    if cos.shape[:2] != rows.shape[:2]:
        return f"{OP}: angles {cos.shape} are not one for each of rows {rows.shape}"
    if scale is not None and scale.dtype != rows.dtype:
        return f"{OP}: rows of {rows.dtype.name}, but a scale of {scale.dtype.name}"
    return None
