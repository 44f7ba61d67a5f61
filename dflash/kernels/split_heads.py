"""Splits the columns of a projection into heads, and norms and rotates each.

In plain JAX this is a dozen small operations a layer, for a TPU keeps rows and heads of a few rows
in different layouts: with 16 rows they take longer than reading the layer's keys and values. The
kernel does it in one, and leaves the heads outside of the rows, as attention reads them.
"""

import functools

import jax
import jax.numpy as jnp

from dflash.kernels import implementation as implementations
from dflash.kernels import split_heads_tpu as tpu


def split_heads(
    rows: jax.Array,
    cos_sin: tuple[jax.Array, jax.Array],
    scale: jax.Array | None = None,
    *,
    eps: float = 0.0,
    implementation: str = "auto",
) -> jax.Array:
    """Rotated heads of projected rows.

    Args:
      rows: [B, T, n·H]; the columns of one head lie together.
      cos_sin: of the rows' positions, each float32 [B, T, 1, H/2].
      scale: [H]; of a root-mean-square norm of each head, before it is rotated. None: no norm.
      eps: of the norm.
      implementation: see `implementation.run`. Gradients are those of the reference.
    Returns:
      [B, T, n, H]; in the dtype of `rows` times that of `scale`.
    Raises:
      ValueError: shapes that do not fit each other.
    """
    width = 2 * cos_sin[0].shape[-1]
    if rows.shape[-1] % width or (scale is not None and scale.shape != (width,)):
        shape = None if scale is None else scale.shape
        raise ValueError(f"split_heads: rows {rows.shape}, scale {shape}, heads of {width}")
    arrays = (rows, *cos_sin, *(() if scale is None else (scale,)))
    reference = functools.partial(_reference, eps=eps)
    run = functools.partial(
        implementations.run,
        implementation,
        reference=reference,
        pallas=functools.partial(tpu.split_heads_tpu, eps=eps),
        unsupported=tpu.unsupported(*arrays),
    )
    if implementation == "reference":
        return run(*arrays)
    with_gradient = jax.custom_vjp(run)
    with_gradient.defvjp(
        lambda *arrays: jax.vjp(reference, *arrays), lambda vjp, slopes: vjp(slopes)
    )
    return with_gradient(*arrays)


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """x [..., D] over its root mean square, in float32, times scale [D].

    Source: Zhang and Sennrich 2019.
    """
    wide = x.astype(jnp.float32)
    wide *= jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return scale * wide.astype(x.dtype)


def rotate(x: jax.Array, cos_sin: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotates x [B, T, heads, H] by the angles of its positions, in float32."""
    cos, sin = cos_sin
    left, right = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)
    return rotated.astype(x.dtype)


def _reference(rows, cos, sin, scale=None, *, eps):
    heads = rows.reshape(*rows.shape[:2], -1, 2 * cos.shape[-1])
    return rotate(heads if scale is None else rms_norm(heads, scale, eps), (cos, sin))
