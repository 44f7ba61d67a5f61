"""Product of rows with a weight matrix on a CPU, in C++ (matmul_cpu.cc).

XLA takes half as long again for six rows as for one, though reading the weights takes the time of
both. The kernel reads them at nearly the speed of memory, and bfloat16 or int8 weights without a
float32 copy. A row's result does not depend on the rows beside it.

The kernel is compiled at its first use, by the C++ compiler of the machine, for its processor:

    ~/.cache/dflash/kernels/0.10.2-1c8c1bf5ef1e-3f08….so

Without a compiler, XLA computes the products. The environment variable DFLASH_CPU_KERNELS is a
directory for the compiled kernel, or "off".
"""

import ctypes
import functools
import hashlib
import math
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import threading

import jax
import jax.numpy as jnp
import numpy as np

from dflash.parallel.sharding import Sharding
from dflash.runs import compilation_cache
from dflash.storage import files, paths

VARIABLE = "DFLASH_CPU_KERNELS"
OFF = "off"

_SOURCE = pathlib.Path(__file__).with_suffix(".cc")
_COMPILERS = ("c++", "g++", "clang++")
_FLAGS = ("-O2", "-march=native", "-std=c++17", "-shared", "-fPIC", "-w")
_SECONDS = 300  # Limit for compiling.
_TARGET = "dflash_matmul"
_DTYPES = (jnp.float32, jnp.bfloat16, jnp.int8)
# The kernel gains nothing for more rows, nor for smaller matrices, which stay in the cache.
_MAX_ROWS = 256
_MIN_SIZE = 2**16
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
    where, compiler = os.environ.get(VARIABLE), find_compiler()
    if where == OFF or compiler is None:
        return False
    directory = pathlib.Path(where) if where else paths.cache_directory("kernels")
    try:
        library = compile_library(compiler, directory)
        handler = jax.ffi.pycapsule(ctypes.cdll.LoadLibrary(str(library)).DflashMatmul)
    except (OSError, AttributeError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        print(f"CPU kernels off: {_first_error(said)}", file=sys.stderr, flush=True)
        return False
    jax.ffi.register_ffi_target(_TARGET, handler, platform="cpu")
    return True


def find_compiler() -> str | None:
    """Returns the path of the C++ compiler: $CXX, or the first one of the path."""
    names = (os.environ.get("CXX"), *_COMPILERS)
    return next((found for name in names if name and (found := shutil.which(name))), None)


def compile_library(compiler: str, directory: pathlib.Path) -> pathlib.Path:
    """Returns the library for this processor, after compiling it unless it is in the directory.

    Raises:
      OSError: The directory cannot be used, or others may write to it.
      subprocess.SubprocessError: The compiler fails, or takes too long.
    """
    source = _SOURCE.read_bytes()
    digest = hashlib.sha256(source + " ".join((compiler, *_FLAGS)).encode()).hexdigest()[:12]
    library = directory / f"{compilation_cache.machine()}-{digest}.so"
    files.make_private(directory)
    for path in (directory, library):
        if path.exists() and (problem := compilation_cache.why_unsafe(path)):
            raise OSError(f"{path}: {problem}")
    if not library.exists():
        if sys.stderr.isatty():
            print("compiling CPU kernels, once …", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(dir=directory) as scratch:
            made = pathlib.Path(scratch) / "library.so"
            include = f"-I{jax.ffi.include_dir()}"
            command = [compiler, *_FLAGS, include, str(_SOURCE), "-o", str(made)]
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=_SECONDS)
            made.replace(library)
    return library


def _first_error(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line.lower()), lines[0] if lines else "")
