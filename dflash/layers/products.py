"""Products of rows and weights, and what keeps XLA from computing them in a slower form."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from dflash.kernels import matmul_cpu
from dflash.layers.cache import batch_axes
from dflash.parallel.sharding import Sharding


def project(
    x: jax.Array,
    weights: jax.Array,
    sharding: Sharding,
    *,
    transposed: bool = False,
    dtype: jnp.dtype | None = None,
    contracted: str | None = None,
) -> jax.Array:
    """Computes x [..., D] @ weights [D, F], or weights [F, D] if transposed.

    Args:
      x: Rows [..., D].
      weights: [D, F], or [F, D] if `transposed`, or panels; see `matmul_cpu.to_panels`.
      transposed: Contract with the last dimension of `weights`.
      dtype: Dtype of the result; None for the promoted dtype of x and weights.
      contracted: Logical axis of D, which matters if sums over devices need an order.
    """
    dtype = dtype or jnp.result_type(x, weights)
    if sharding.exact and sharding.size(contracted) > 1:
        return _sum_in_order(x, weights, sharding, contracted, dtype)
    if weights.ndim == 3 or matmul_cpu.is_supported(x, weights, sharding):
        return _product(x, weights, transposed, dtype, "kernel")
    weights = widen_late(x, weights, sharding)
    if weights.dtype.itemsize == 1:
        weights = weights.astype(x.dtype)
    method = "widened" if sharding.platform == "cpu" else "plain"
    if not _is_single_row(x, sharding):
        return _product(x, weights, transposed, dtype, method)
    pair = jnp.pad(x, (*((0, 0),) * (x.ndim - 2), (0, 1), (0, 0)))
    return _product(pair, weights, transposed, dtype, method)[..., :1, :]


def _sum_in_order(x, weights, sharding: Sharding, contracted: str, dtype) -> jax.Array:
    """Computes x @ weights, and adds the parts of the devices in the devices' order.

    An all-reduce adds the parts of an element in an order that depends on where in the array the
    element is, so equal rows at different places differ. As there, parts are in `dtype`.
    """
    batch, _ = batch_axes(x.shape[0], sharding)
    middle = (None,) * (x.ndim - 2)

    def add(rows, weights):
        weights = weights.astype(rows.dtype) if weights.dtype.itemsize == 1 else weights
        part = jnp.einsum("...d,df->...f", rows, weights, preferred_element_type=jnp.float32)
        parts = jax.lax.all_gather(part.astype(dtype), sharding.axes(contracted))
        return (functools.reduce(jnp.add, parts.astype(jnp.float32)).astype(dtype),)

    names = (batch, *middle, contracted), (contracted, None)
    (total,) = sharding.map(add, names, [(batch, *middle, None)])(x, weights)
    return total


def _is_single_row(x: jax.Array, sharding: Sharding) -> bool:
    """Returns whether each device has a single row of x, on a TPU.

    XLA multiplies a single row on the vector units, which it expects to take three times as long as
    reading the weights; two rows go through the matrix unit.
    """
    if sharding.platform != "tpu" or x.ndim < 2 or x.shape[-2] != 1:
        return False
    return math.prod(x.shape[:-1]) <= sharding.size("batch")


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _product(x, weights, transposed, dtype, method):
    """Computes x @ weights, with a custom gradient that differs only in the order of factors.

    In the gradient of the weights, x comes first. In the opposite order, a CPU transposes a copy of
    the outputs' gradient, the larger factor, which takes a fifth of a training step.

    Args:
      x: Rows [..., D].
      weights: [D, F], or [F, D] if `transposed`.
      method: "plain", "widened", or "kernel", that of `kernels/matmul_cpu.py`. Widened products are
        computed in float32 and rounded: XLA on a CPU uses the matrix units for bfloat16 factors
        only if the product is in float32.
    """
    if method == "kernel":
        return matmul_cpu.matmul(x, weights, transposed=transposed).astype(dtype)
    equation = "...d,fd->...f" if transposed else "...d,df->...f"
    return _multiply(equation, x, weights, dtype, method != "plain")


def _product_forward(x, weights, transposed, dtype, method):
    return _product(x, weights, transposed, dtype, method), (x, weights)


def _product_backward(transposed, dtype, method, residuals, cotangents):
    x, weights = residuals
    widened = method != "plain"
    # Cast the gradient of float32 logits to the factors' dtype, so that no factor is widened.
    cotangents = cotangents.astype(jnp.result_type(x, weights))
    to_x = "...f,fd->...d" if transposed else "...f,df->...d"
    by_x = _multiply(to_x, cotangents, weights, x.dtype, widened)
    if jnp.issubdtype(weights.dtype, jnp.integer):  # quantized weights are not trained
        return by_x, np.zeros(weights.shape, jax.dtypes.float0)
    rows, cotangents = (array.reshape(-1, array.shape[-1]) for array in (x, cotangents))
    by_weights = _multiply("rd,rf->df", rows, cotangents, weights.dtype, widened)
    return by_x, by_weights.T if transposed else by_weights


def _multiply(equation: str, a, b, dtype: jnp.dtype, widened: bool) -> jax.Array:
    product = jnp.promote_types(dtype, jnp.result_type(a, b))
    if widened and product == jnp.bfloat16:
        product = jnp.float32
    return jnp.einsum(equation, a, b, preferred_element_type=product).astype(dtype)


_product.defvjp(_product_forward, _product_backward)


def matmul_precision(dtype: jnp.dtype) -> str:
    """Returns the `jax.default_matmul_precision` for computing in `dtype`."""
    # Users choose float32 for exactness, but a TPU multiplies float32 in bfloat16 by default.
    return "highest" if dtype == jnp.float32 else "default"


def finish(product: jax.Array, sharding: Sharding) -> jax.Array:
    """Keeps XLA on a TPU from fusing a matrix product with the split of its columns into heads.

    The fused form needs transposed weights: XLA would copy the weights of every layer ahead of each
    dispatch, which doubles their memory.

    Args:
      product: Output of a linear map, returned unchanged.
    """
    return jax.lax.optimization_barrier(product) if sharding.platform == "tpu" else product


def widen_late(x: jax.Array, weights: jax.Array, sharding: Sharding) -> jax.Array:
    """Keeps XLA on a CPU from holding float32 copies of all narrower weights at once.

    A CPU multiplies bfloat16 and 8-bit weights as float32. XLA would convert every matrix ahead of
    time, outside the decode loop, which takes three times the memory of the weights. An artificial
    dependency on x delays the conversion until the matrix is multiplied. It does nothing on other
    platforms. Inside a loop, XLA must also be kept from hoisting the conversion out of it; see
    `NARROW_IN_LOOPS`.

    Args:
      x: Rows that the weights are about to be multiplied with.
      weights: Weights, returned bit for bit unless x begins with a NaN.
    """
    if sharding.platform != "cpu" or weights.dtype.itemsize >= jnp.dtype(jnp.float32).itemsize:
        return weights
    first = x.reshape(-1)[0]  # XLA recognizes and removes simpler dependencies.
    filler = jnp.nan if jnp.issubdtype(weights.dtype, jnp.floating) else 0
    other = jnp.asarray(filler, weights.dtype)
    return jnp.where(first != first, other, weights)
