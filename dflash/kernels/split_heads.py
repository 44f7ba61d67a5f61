"""Splitting of a projection's columns into heads, with normalization and rotation of each head.

In plain JAX this takes a dozen small operations per layer, because a TPU uses different layouts for
rows and for the heads of a few rows: with 16 rows they take longer than reading the layer's keys
and values. The kernel does it in one operation, with heads before rows, as attention reads them.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dflash.kernels import implementation as implementations
from dflash.kernels import library_cpu
from dflash.kernels import split_heads_tpu as tpu


class Part(NamedTuple):
    """Contiguous columns of a projection, such as those of all queries.

    Attributes:
      share: Number of heads, relative to that of other parts.
      rotated: Whether heads are rotated by the angles of their positions.
      normed: Whether heads are normalized before, if there are norms.
    """

    share: int = 1
    rotated: bool = True
    normed: bool = True


def split_heads(
    rows: jax.Array,
    cos_sin: tuple[jax.Array, jax.Array],
    scales: Sequence[jax.Array] = (),
    *,
    parts: Sequence[Part] = (Part(),),
    width: int | None = None,
    eps: float = 0.0,
    implementation: str = "auto",
) -> tuple[jax.Array, ...]:
    """Splits projected rows into normalized and rotated heads.

    Args:
      rows: [B, T, n·H]; the columns of each part are contiguous, and so are those of each head.
      cos_sin: Cos and sin of the rows' positions, each float32 [B, T, 1, H/2]. If their last
        dimension is smaller, only the first elements of a head are rotated.
      scales: [H] for each normed part; scale of the RMS norm that is applied to its heads before
        the rotation. Empty for no norms.
      parts: Parts of the columns, in order.
      width: Elements per head, H; None for twice the last dimension of cos and sin.
      implementation: Implementation to run; see `implementation.run`. Only the reference computes
        gradients of the angles.
    Returns:
      Heads [B, T, n, H] of each part, in the dtype of `rows`.
    Raises:
      ValueError: Shapes are inconsistent.
    """
    width = width or 2 * cos_sin[0].shape[-1]
    shares = sum(part.share for part in parts)
    shapes = [scale.shape for scale in scales]
    expected = [(width,)] * sum(part.normed for part in parts)
    if rows.shape[-1] % (width * shares) or shapes not in ([], expected):
        raise ValueError(
            f"split_heads: rows {rows.shape} and scales {shapes} do not fit "
            f"{shares} × n heads of {width}"
        )
    arrays = (rows, *cos_sin, *scales)
    options = {"parts": tuple(parts), "eps": eps}
    reference = functools.partial(_reference, width=width, **options)
    unsupported = tpu.unsupported(*arrays, parts=parts, width=width)
    run = functools.partial(implementations.run, implementation, unsupported=unsupported)
    is_float = rows.dtype in (jnp.float32, jnp.bfloat16)
    has_cpu_kernel = is_float and library_cpu.is_available()
    plain = functools.partial(
        run,
        reference=reference,
        pallas=functools.partial(tpu.split_heads_tpu, **options),
        cpu=functools.partial(_on_cpu, width=width, **options) if has_cpu_kernel else None,
    )
    if implementation == "reference":
        return plain(*arrays)
    in_place = len(parts) == 1 and parts[0].rotated

    def forward(*arrays):
        """Computes heads in their own columns, the layout that attention in training reads."""

        def columns(*arrays, interpret):
            return tpu.rotate_columns(*arrays, eps=eps, interpret=interpret)

        def rows_of(*arrays):
            return reference(*arrays)[0].reshape(arrays[0].shape)

        if not in_place:
            return reference(*arrays), arrays
        rotated = run(*arrays, reference=rows_of, pallas=columns)
        return (rotated.reshape(*rotated.shape[:2], -1, width),), arrays

    def backward(arrays, cotangents):
        rows, cos, sin, *scales = arrays

        def by_reference(rows, grad, cos, sin, *scales):
            heads = grad.reshape(*grad.shape[:2], -1, width)
            return gradients(rows, (heads,), cos, sin, *scales)

        def gradients(rows, grads, cos, sin, *scales):
            pull = jax.vjp(lambda rows, *scales: reference(rows, cos, sin, *scales), rows, *scales)
            return pull[1](grads)

        def columns(*arrays, interpret):
            return tpu.rotate_columns_gradients(*arrays, eps=eps, interpret=interpret)

        if in_place:
            grad = cotangents[0].reshape(rows.shape)
            grads = run(rows, grad, cos, sin, *scales, reference=by_reference, pallas=columns)
        else:
            grads = gradients(rows, cotangents, cos, sin, *scales)
        return grads[0], None, None, *grads[1:]

    with_gradient = jax.custom_vjp(plain)
    with_gradient.defvjp(forward, backward)
    return with_gradient(*arrays)


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """Normalizes x [..., D] by its root mean square in float32, then multiplies by scale [D].

    A scale in the dtype of x multiplies rounded rows; a float32 scale multiplies float32 rows.

    Source: Zhang and Sennrich 2019.
    """
    wide = x.astype(jnp.float32)
    wide *= jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (scale * wide.astype(jnp.result_type(x, scale))).astype(x.dtype)


def rotate(x: jax.Array, cos_sin: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotates heads x [B, T, n, H] in float32, by cos and sin as in `split_heads`."""
    cos, sin = cos_sin
    to_rotate, unrotated = jnp.split(x, [2 * cos.shape[-1]], axis=-1)
    first, second = jnp.split(to_rotate.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    rotated = rotated.astype(x.dtype)
    return jnp.concatenate([rotated, unrotated], axis=-1) if unrotated.shape[-1] else rotated


def _on_cpu(rows, cos, sin, *scales, parts, width, eps):
    """Splits rows in C++ (split_heads_cpu.cc), in float32, and rounds the heads.

    XLA computes the cosines and sines of the positions anew in each of half a dozen fusions per
    layer, which takes longer than all else that the fusions compute.
    """
    unit = rows.shape[-1] // width // sum(part.share for part in parts)
    shapes = [(*rows.shape[:2], unit * part.share, width) for part in parts]
    results = tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
    forms = [flag for part in parts for flag in (bool(scales) and part.normed, part.rotated)]
    angles = (
        jnp.broadcast_to(factor, (*rows.shape[:2], 1, factor.shape[-1])) for factor in (cos, sin)
    )
    call = jax.ffi.ffi_call(library_cpu.SPLIT_HEADS, results, vmap_method="sequential")
    norm_scales = jnp.stack(scales).astype(jnp.float32) if scales else jnp.zeros((0, width))
    wide = rows.astype(jnp.float32)
    heads = call(wide, *angles, norm_scales, eps=np.float32(eps), forms=np.array(forms, np.int64))
    return tuple(part.astype(rows.dtype) for part in heads)


def _reference(rows, cos, sin, *scales, parts, width, eps):
    heads = rows.reshape(*rows.shape[:2], -1, width)
    unit = heads.shape[2] // sum(part.share for part in parts)
    outputs, begin, scales = [], 0, iter(scales)
    for part in parts:
        part_heads = heads[:, :, begin : begin + unit * part.share]
        begin += part_heads.shape[2]
        scale = next(scales, None) if part.normed else None
        part_heads = part_heads if scale is None else rms_norm(part_heads, scale, eps)
        part_heads = rotate(part_heads, (cos, sin)) if part.rotated else part_heads
        outputs.append(part_heads)
    return tuple(outputs)
