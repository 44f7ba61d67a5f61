"""Product of rows with a weight matrix on a CPU, in C++ (matmul_cpu.cc).

XLA takes half as long again for six rows as for one, though reading the weights takes the time of
both. The kernel reads them at nearly the speed of memory, and bfloat16 or int8 weights without a
float32 copy. A row's result does not depend on the rows beside it.

The kernel is compiled at its first use; see `runs/cpu_kernels.py`. Without a compiler, XLA computes
the products.
"""

import ctypes
import functools
import math
import pathlib
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np

from dflash.parallel.sharding import Sharding
from dflash.runs import cpu_kernels

_SOURCE = pathlib.Path(__file__).with_suffix(".cc")
_TARGET = "dflash_matmul"
_DTYPES = (jnp.float32, jnp.bfloat16, jnp.int8)
_MAX_ROWS = 256  # The kernel was compared with XLA up to this number.
_MIN_SIZE = 2**16  # Elements of the matrix.
_COMPILING = threading.Lock()  # Programs are traced by several threads.


def is_supported(x: jax.Array, weights: jax.Array, sharding: Sharding) -> bool:
    """Returns whether the kernel multiplies rows x [..., D] with a matrix of weights.

    Args:
      x: Rows, float32 or bfloat16.
      weights: Matrix, float32, bfloat16 or int8, on the one CPU of the mesh.
      sharding: Mesh and platform of the arrays.
    """
    return (
        sharding.platform == "cpu"
        and sharding.mesh.size == 1
        and weights.ndim == 2
        and weights.size >= _MIN_SIZE
        and weights.dtype in _DTYPES
        and x.dtype in (jnp.float32, jnp.bfloat16)
        and math.prod(x.shape[:-1]) <= _MAX_ROWS
        and is_available()
    )


def matmul(x: jax.Array, weights: jax.Array, *, transposed: bool = False) -> jax.Array:
    """Returns x [..., D] @ weights [D, F], or [F, D] if `transposed`, as float32 [..., F].

    Sums are in float32. Call it only where `is_supported` is true.
    """
    outputs = weights.shape[0 if transposed else 1]
    rows = x.reshape(-1, x.shape[-1]).astype(jnp.float32)
    result = jax.ShapeDtypeStruct((len(rows), outputs), jnp.float32)
    call = jax.ffi.ffi_call(_TARGET, result, vmap_method="sequential")
    product = call(rows, weights, transposed=np.bool_(transposed))
    return product.reshape(*x.shape[:-1], outputs)


def is_available() -> bool:
    """Returns whether the kernel is there; the first call compiles and registers it."""
    with _COMPILING:
        return _register()


@functools.cache
def _register() -> bool:
    """Makes the kernel known to XLA; returns False, after a line on stderr, if that fails."""
    compiler = cpu_kernels.find_compiler()
    if cpu_kernels.is_off() or compiler is None:
        return False
    try:
        library = cpu_kernels.compile_library(compiler, _SOURCE, jax.ffi.include_dir())
        handler = jax.ffi.pycapsule(ctypes.cdll.LoadLibrary(str(library)).DflashMatmul)
    except (OSError, AttributeError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        print(f"CPU kernels off: {_first_error(said)}", file=sys.stderr, flush=True)
        return False
    jax.ffi.register_ffi_target(_TARGET, handler, platform="cpu")
    return True


def _first_error(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line.lower()), lines[0] if lines else "")
