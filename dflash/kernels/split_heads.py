"""Splits the columns of a projection into heads, and norms and rotates each.

In plain JAX this is a dozen small operations a layer, because a TPU keeps rows and heads of a few
rows in different layouts: with 16 rows they take longer than reading the layer's keys and values.
The kernel does it in one, with heads before rows, as attention reads them.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from dflash.kernels import implementation as implementations
from dflash.kernels import split_heads_tpu as tpu


class Part(NamedTuple):
    """Columns of a projection that lie together, such as those of all queries.

    Attributes:
      share: how many heads it has, in proportion to the other parts.
      rotated: by the angles of the rows' positions, after the norm if there is one; otherwise its
        heads are the columns, unchanged.
    """

    share: int = 1
    rotated: bool = True


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
    """Heads of projected rows.

    Args:
      rows: [B, T, n·H]; the columns of one head lie together, and those of one part.
      cos_sin: of the rows' positions, each float32 [B, T, 1, H/2], or narrower: then only the first
        numbers of a head are rotated.
      scales: [H] for each part that is rotated, of a root-mean-square norm of each of its heads
        before that. Empty: no norms.
      parts: what the columns are, in their order.
      width: H; None: twice the angles'.
      eps: of the norms.
      implementation: see `implementation.run`. Angles get no gradient but by the reference.
    Returns:
      [B, T, n, H] for each part; rotated ones in the dtype of `rows` times that of their scale.
    Raises:
      ValueError: shapes that do not fit each other.
    """
    width = width or 2 * cos_sin[0].shape[-1]
    shares = sum(part.share for part in parts)
    shapes = [scale.shape for scale in scales]
    wanted = [(width,)] * sum(part.rotated for part in parts)
    if rows.shape[-1] % (width * shares) or shapes not in ([], wanted):
        raise ValueError(
            f"split_heads: rows {rows.shape}, scales {shapes}, {shares} × n heads of {width}"
        )
    arrays = (rows, *cos_sin, *scales)
    options = {"parts": tuple(parts), "eps": eps}
    reference = functools.partial(_reference, width=width, **options)
    unsupported = tpu.unsupported(*arrays, parts=parts, width=width)
    run = functools.partial(implementations.run, implementation, unsupported=unsupported)
    plain = functools.partial(
        run, reference=reference, pallas=functools.partial(tpu.split_heads_tpu, **options)
    )
    if implementation == "reference":
        return plain(*arrays)
    in_place = len(parts) == 1 and parts[0].rotated

    def forward(*arrays):
        """Heads stay in their columns, for attention in training."""

        def columns(*arrays, interpret):
            return tpu.turn_columns(*arrays, eps=eps, interpret=interpret)

        def rows_of(*arrays):
            return reference(*arrays)[0].reshape(arrays[0].shape)

        if not in_place:
            return reference(*arrays), arrays
        turned = run(*arrays, reference=rows_of, pallas=columns)
        return (turned.reshape(*turned.shape[:2], -1, width),), arrays

    def backward(arrays, cotangents):
        rows, cos, sin, *scales = arrays

        def by_reference(rows, grad, cos, sin, *scales):
            heads = grad.reshape(*grad.shape[:2], -1, width)
            return gradients(rows, (heads,), cos, sin, *scales)

        def gradients(rows, grads, cos, sin, *scales):
            pull = jax.vjp(lambda rows, *scales: reference(rows, cos, sin, *scales), rows, *scales)
            return pull[1](grads)

        def columns(*arrays, interpret):
            return tpu.turn_columns_gradients(*arrays, eps=eps, interpret=interpret)

        if in_place:
            grad = cotangents[0].reshape(rows.shape)
            found = run(rows, grad, cos, sin, *scales, reference=by_reference, pallas=columns)
        else:
            found = gradients(rows, cotangents, cos, sin, *scales)
        return found[0], None, None, *found[1:]

    with_gradient = jax.custom_vjp(plain)
    with_gradient.defvjp(forward, backward)
    return with_gradient(*arrays)


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """x [..., D] over its root mean square, in float32, times scale [D].

    Source: Zhang and Sennrich 2019.
    """
    wide = x.astype(jnp.float32)
    wide *= jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return scale * wide.astype(x.dtype)


def rotate(x: jax.Array, cos_sin: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotates x [B, T, heads, H], or its beginning, by the angles of its positions, in float32."""
    cos, sin = cos_sin
    turned, rest = jnp.split(x, [2 * cos.shape[-1]], axis=-1)
    left, right = jnp.split(turned.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)
    rotated = rotated.astype(x.dtype)
    return jnp.concatenate([rotated, rest], axis=-1) if rest.shape[-1] else rotated


def _reference(rows, cos, sin, *scales, parts, width, eps):
    heads = rows.reshape(*rows.shape[:2], -1, width)
    unit = heads.shape[2] // sum(part.share for part in parts)
    found, begin, scales = [], 0, iter(scales)
    for part in parts:
        own = heads[:, :, begin : begin + unit * part.share]
        begin += own.shape[2]
        if part.rotated:
            scale = next(scales, None)
            own = rotate(own if scale is None else rms_norm(own, scale, eps), (cos, sin))
        found.append(own)
    return tuple(found)
