"""Assembly and checks of float32 weights on a CPU, in C++ (weights_cpu.cc).

XLA transposes element by element, which takes about five times as long as copying consecutive
memory, and its copies of parts read the memory that they overwrite. The kernels do neither.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from dflash.kernels import library_cpu

_MIN_SIZE = 2**12  # Elements; below, a call costs more than it saves.


def is_supported(array: jax.Array) -> bool:
    """Returns whether the kernels serve an array on one CPU."""
    return array.dtype == jnp.float32 and array.size >= _MIN_SIZE and library_cpu.is_available()


def is_finite(array: jax.Array) -> jax.Array:
    """Returns whether all numbers of an array are finite, bool [].

    Call it only where `is_supported` is true.
    """
    return jax.ffi.ffi_call(library_cpu.FINITE, jax.ShapeDtypeStruct((), jnp.bool))(array)


def assemble(
    parts: Sequence[jax.Array],
    shape: tuple[int, ...],
    *,
    transposed: bool = False,
    layer: int | None = None,
) -> jax.Array:
    """Returns parts side by side, as a matrix or in panels.

    Call it only where `is_supported` is true for all parts.

    Args:
      parts: Matrices [F, D] if `transposed`; otherwise arrays that are [D, F] in another shape, and
        have layers as their second dimension if `layer` is given.
      shape: Shape of the result, [D, sum of F], or that of its panels; see `matmul_cpu.to_panels`.
      layer: Layer to take from all parts; None if they hold one layer.
    """
    layers = 1 if layer is None else parts[0].shape[1]
    call = jax.ffi.ffi_call(library_cpu.ASSEMBLE, jax.ShapeDtypeStruct(shape, jnp.float32))
    attributes = {"layer": np.int64(layer or 0), "layers": np.int64(layers)}
    return call(*parts, transposed=np.bool_(transposed), **attributes)
