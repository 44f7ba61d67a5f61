"""Product of rows with a weight matrix on a CPU, in C++ (matmul_cpu.cc).

XLA takes half as long again for six rows as for one, though reading the weights takes the time of
both. The kernel reads them at nearly the speed of memory, and bfloat16 or int8 weights without a
float32 copy. A row's result does not depend on the rows beside it.
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
      sharding: Mesh and platform of the arrays.
    """
    return (
        weights.ndim == 2
        and weights.size >= _MIN_SIZE
        and weights.dtype in _DTYPES
        and x.dtype in (jnp.float32, jnp.bfloat16)
        and math.prod(x.shape[:-1]) <= _MAX_ROWS
        and library_cpu.serves(sharding)
    )


def matmul(x: jax.Array, weights: jax.Array, *, transposed: bool = False) -> jax.Array:
    """Returns x [..., D] @ weights [D, F], or [F, D] if `transposed`, as float32 [..., F].

    Sums are in float32. Call it only where `is_supported` is true.
    """
    outputs = weights.shape[0 if transposed else 1]
    rows = x.reshape(-1, x.shape[-1]).astype(jnp.float32)
    result = jax.ShapeDtypeStruct((len(rows), outputs), jnp.float32)
    call = jax.ffi.ffi_call(library_cpu.MATMUL, result, vmap_method="sequential")
    product = call(rows, weights, transposed=np.bool_(transposed))
    return product.reshape(*x.shape[:-1], outputs)
