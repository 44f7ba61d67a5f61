"""Pallas kernels of split_heads; see split_heads.py for their semantics.

The kernel for decoding returns heads before rows. A grid step processes a tile of rows, and half of
the heads of every part if their numbers are even, one half for each core of a chip with two cores.
The width of a head is a multiple of the lanes, so extracting it moves no data between lanes.

The kernels for training, forward and backward, keep heads in their own columns, the layout that
attention in training reads.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from dflash.kernels import flash_tpu

OP = "split_heads"
TILE_ROWS = 128


def split_heads_tpu(rows, cos, sin, *scales, parts, eps: float, interpret):
    """Computes `split_heads`, with cos and sin as separate arguments."""
    batch, length, columns = rows.shape
    width = 2 * cos.shape[-1]
    heads, steps = _heads(columns // width, parts)
    tile = min(length, TILE_ROWS)
    factors = _rotation_factors(cos, sin)
    # Pass the rows once per part, each time with another block spec.
    columns_of_step, heads_of_step, before = [], [], 0
    for count in heads:
        step_heads = count // steps
        first, before = before // step_heads, before + count
        columns_of_step.append(
            pl.BlockSpec(
                (None, tile, step_heads * width), lambda g, b, i, first=first: (b, i, first + g)
            )
        )
        heads_of_step.append(
            pl.BlockSpec((None, step_heads, tile, width), lambda g, b, i: (b, g, i, 0))
        )
    angles = pl.BlockSpec((None, tile, width), lambda g, b, i: (b, i, 0))
    scale = pl.BlockSpec((1, width), lambda g, b, i: (0, 0))
    outputs = pl.pallas_call(
        functools.partial(_kernel, parts=parts, normed=bool(scales), eps=eps),
        grid=(steps, batch, length // tile),
        in_specs=[*columns_of_step, angles, angles, *(scale for _ in scales)],
        out_specs=heads_of_step,
        out_shape=[
            jax.ShapeDtypeStruct((batch, count, length, width), rows.dtype) for count in heads
        ],
        compiler_params=flash_tpu.compiler_params("parallel", "arbitrary", "arbitrary"),
        cost_estimate=pl.CostEstimate(
            flops=8 * rows.size,
            transcendentals=rows.size // width,
            bytes_accessed=2 * rows.size * rows.dtype.itemsize,
        ),
        interpret=interpret,
        name=OP,
    )(*(rows for _ in parts), *factors, *(array[None] for array in scales))
    return tuple(array.swapaxes(1, 2) for array in outputs)


def rotate_columns(rows, cos, sin, *scales, eps: float, interpret):
    """Normalizes and rotates every head of rows [B, T, n·H], which form a single part."""
    kernel = functools.partial(_columns_kernel, eps=eps)
    return _over_columns(
        kernel, f"{OP}_columns", [rows], cos, sin, scales, [rows.dtype], interpret
    )[0]


def rotate_columns_gradients(rows, grad, cos, sin, *scales, eps: float, interpret):
    """Returns the gradients of rows and scales of `rotate_columns`, given those of its result."""
    kernel = functools.partial(_columns_gradient_kernel, eps=eps)
    rows_grad, *scale_grads = _over_columns(
        kernel, f"{OP}_columns_gradients", [rows, grad], cos, sin, scales,
        [rows.dtype, *(jnp.float32 for _ in scales)], interpret,
    )  # fmt: skip
    return rows_grad, *(
        array.sum(axis=(0, 1, 2)).astype(scale.dtype)
        for array, scale in zip(scale_grads, scales, strict=True)
    )


def _over_columns(kernel, name, arrays, cos, sin, scales, dtypes, interpret):
    """Calls a kernel on tiles of rows.

    Args:
      arrays: Arrays [B, T, n·H] to process.
      cos: float32 [B, T, 1, H/2].
      sin: float32 [B, T, 1, H/2].
      scales: At most one scale [H].
      dtypes: Dtype of each output.
    Returns:
      An array [B, T, n·H], then an array [B, tiles, 1, H] for each further dtype.
    """
    batch, length, columns = arrays[0].shape
    width, tile = 2 * cos.shape[-1], min(length, TILE_ROWS)
    all_columns = pl.BlockSpec((None, tile, columns), lambda b, i: (b, i, 0))
    angles = pl.BlockSpec((None, tile, width), lambda b, i: (b, i, 0))
    scale = pl.BlockSpec((1, width), lambda b, i: (0, 0))
    sums = pl.BlockSpec((None, None, 1, width), lambda b, i: (b, i, 0, 0))
    shapes = [arrays[0].shape] + [(batch, length // tile, 1, width)] * (len(dtypes) - 1)
    size = arrays[0].size
    return pl.pallas_call(
        kernel,
        grid=(batch, length // tile),
        in_specs=[*(all_columns for _ in arrays), angles, angles, *(scale for _ in scales)],
        out_specs=[all_columns, *(sums for _ in dtypes[1:])],
        out_shape=[
            jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)
        ],
        compiler_params=flash_tpu.compiler_params("parallel", "parallel"),
        cost_estimate=pl.CostEstimate(
            flops=0,  # The matrix unit is not used.
            transcendentals=size // width,
            bytes_accessed=(len(arrays) + 1) * size * arrays[0].dtype.itemsize,
        ),
        interpret=interpret,
        name=name,
    )(*arrays, *_rotation_factors(cos, sin), *(array[None] for array in scales))


def _rotation_factors(cos, sin) -> list[jax.Array]:
    """Returns cos and signed sin [B, T, H], the factors of a head and of its swapped halves."""
    factors = jnp.concatenate([cos, cos], axis=-1), jnp.concatenate([-sin, sin], axis=-1)
    return [factor[:, :, 0] for factor in factors]


def _columns_kernel(rows_ref, cos_ref, sin_ref, *refs, eps):
    *scales, outputs_ref = refs
    cos, sin = cos_ref[...], sin_ref[...]
    scale = scales[0][...] if scales else None
    for begin in range(0, rows_ref.shape[1], cos.shape[1]):
        columns = slice(begin, begin + cos.shape[1])
        rotated = _rotate(_norm(rows_ref[:, columns], scale, eps), cos, sin)
        outputs_ref[:, columns] = rotated.astype(outputs_ref.dtype)


def _columns_gradient_kernel(rows_ref, grad_ref, cos_ref, sin_ref, *refs, eps):
    cos, sin = cos_ref[...], sin_ref[...]
    normed = len(refs) == 3
    scale_ref, rows_grad_ref, scale_grad_ref = refs if normed else (None, *refs, None)
    total = jnp.zeros((1, cos.shape[1]), jnp.float32)
    for begin in range(0, rows_ref.shape[1], cos.shape[1]):
        columns = slice(begin, begin + cos.shape[1])
        grad = grad_ref[:, columns].astype(jnp.float32)
        # Swapping halves is its own inverse.
        grad = grad * cos + _swap_halves(grad * sin)
        if normed:
            x = rows_ref[:, columns].astype(jnp.float32)
            factor = jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
            x *= factor
            total += jnp.sum(grad * x, axis=0, keepdims=True)
            grad *= scale_ref[...].astype(jnp.float32)
            grad = factor * (grad - x * jnp.mean(grad * x, axis=-1, keepdims=True))
        rows_grad_ref[:, columns] = grad.astype(rows_grad_ref.dtype)
    if normed:
        scale_grad_ref[...] = total


def _heads(count, parts) -> tuple[list[int], int]:
    """Returns the heads of each part, out of `count`, and the number of grid steps over heads."""
    unit = count // sum(part.share for part in parts)
    heads = [unit * part.share for part in parts]
    return heads, min(part_heads // flash_tpu.heads_per_step(part_heads) for part_heads in heads)


def _kernel(*refs, parts, normed, eps):
    rows, refs, outputs = refs[: len(parts)], refs[len(parts) : -len(parts)], refs[-len(parts) :]
    cos, sin = (ref[...] for ref in refs[:2])
    scales = iter(refs[2:])
    for part, rows_ref, outputs_ref in zip(parts, rows, outputs, strict=True):
        scale = next(scales)[...] if normed and part.normed else None
        heads, _, width = outputs_ref.shape
        for head in range(heads):
            x = rows_ref[:, head * width : (head + 1) * width]
            x = _norm(x, scale, eps) if part.rotated or scale is not None else x
            x = _rotate(x, cos, sin) if part.rotated else x
            outputs_ref[head] = x.astype(outputs_ref.dtype)


def _norm(x, scale, eps):
    """Converts x to float32; if `scale` is given, also RMS-normalizes and multiplies by it."""
    wide = x.astype(jnp.float32)
    if scale is None:
        return wide
    wide *= jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    # Round where the reference rounds.
    wide = wide.astype(jnp.result_type(x, scale)).astype(jnp.float32)
    wide *= scale.astype(jnp.float32)
    return wide.astype(x.dtype).astype(jnp.float32)


def _rotate(x, cos, sin):
    return x * cos + _swap_halves(x) * sin


def _swap_halves(x):
    half = x.shape[-1] // 2
    return jnp.concatenate([x[:, half:], x[:, :half]], axis=-1)


def unsupported(rows, cos, sin, *scales, parts, width) -> str | None:
    """Returns why the kernel does not support a call, or None if it does."""
    length = rows.shape[1]
    if width != 2 * cos.shape[-1]:
        return f"{OP}: {2 * cos.shape[-1]} of {width} head dimensions are rotated, expected all"
    if width % flash_tpu.LANES:
        return f"{OP}: heads of {width} elements, expected a multiple of {flash_tpu.LANES}"
    if length > TILE_ROWS and length % TILE_ROWS:
        return f"{OP}: {length} rows, expected at most {TILE_ROWS} or a multiple of it"
    if cos.shape[:2] != rows.shape[:2]:
        return f"{OP}: angles {cos.shape} do not fit rows {rows.shape}"
    for scale in scales:
        if scale.dtype not in (rows.dtype, jnp.float32):
            return f"{OP}: a scale in {scale.dtype.name}, expected {rows.dtype.name}, as the rows"
    before = 0
    for part in parts:
        if before % part.share:
            return f"{OP}: a part of {part.share} shares after {before}, expected a multiple"
        before += part.share
    return None
