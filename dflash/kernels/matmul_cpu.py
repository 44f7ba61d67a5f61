"""Product of rows with a weight matrix on a CPU, in C++ (matmul_cpu.cc).

XLA takes half as long again for six rows as for one, though reading the weights takes the time of
both. The kernel reads them at nearly the speed of memory, and bfloat16 or int8 weights without a
float32 copy. A row's result does not depend on the rows beside it.

Panels are a layout of the matrix in which the kernel reads memory in order: the W columns that it
sums at once side by side, then the next W, [F/W, D, W]. W depends on the processor.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from dflash.kernels import library_cpu
from dflash.parallel.sharding import Sharding

_DTYPES = (jnp.float32, jnp.bfloat16, jnp.int8)
_MAX_ROWS = 256  # The kernel was compared with XLA up to this number.
_MIN_SIZE = 2**16  # Elements of the matrix.


def is_supported(x: jax.Array, weights: jax.Array, sharding: Sharding) -> bool:
    """Returns whether the kernel multiplies rows x [..., D] with a matrix of weights.

    Args:
      x: Rows, float32 or bfloat16.
      weights: Matrix, float32, bfloat16 or int8, on the one CPU of the mesh.
    """
    return (
        weights.ndim == 2
        and weights.size >= _MIN_SIZE
        and weights.dtype in _DTYPES
        and x.dtype in (jnp.float32, jnp.bfloat16)
        and math.prod(x.shape[:-1]) <= _MAX_ROWS
        and library_cpu.serves(sharding)
    )


def fits_panels(weights: jax.Array | jax.ShapeDtypeStruct, sharding: Sharding) -> bool:
    """Returns whether a matrix of weights [D, F] can be multiplied in panels."""
    return (
        weights.ndim == 2
        and weights.size >= _MIN_SIZE
        and weights.dtype in _DTYPES
        and library_cpu.serves(sharding)
        and weights.shape[1] % library_cpu.panel_columns() == 0
    )


def to_panels(weights: jax.Array) -> jax.Array:
    """Returns the panels [F/W, D, W] of a matrix [D, F]."""
    return weights.reshape(len(weights), -1, library_cpu.panel_columns()).swapaxes(0, 1)


def matmul(x: jax.Array, weights: jax.Array, *, transposed: bool = False) -> jax.Array:
    """Returns x [..., D] @ weights [D, F], or [F, D] if `transposed`, as float32 [..., F].

    Sums are in float32. Call it only where `is_supported` is true, or with panels of weights.
    """
    panels = weights.ndim == 3
    outputs = (
        weights.shape[0] * weights.shape[2] if panels else weights.shape[0 if transposed else 1]
    )
    rows = x.reshape(-1, x.shape[-1]).astype(jnp.float32)
    result = jax.ShapeDtypeStruct((len(rows), outputs), jnp.float32)
    call = jax.ffi.ffi_call(library_cpu.MATMUL, result, vmap_method="sequential")
    product = call(rows, weights, transposed=np.bool_(transposed))
    return product.reshape(*x.shape[:-1], outputs)
