"""Splitting of rows into normalized and rotated heads on a CPU, in C++ (split_heads_cpu.cc).

XLA computes the cosines and sines of the positions anew in each of half a dozen fusions per layer,
which takes longer than all else that the fusions compute.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from dflash.kernels import library_cpu


def is_supported(rows: jax.Array) -> bool:
    """Returns whether the kernel splits these rows."""
    return rows.dtype == jnp.float32 and library_cpu.is_available()


def split_heads(
    rows: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    *scales: jax.Array,
    parts: Sequence,
    width: int,
    eps: float,
) -> tuple[jax.Array, ...]:
    """Computes `split_heads.split_heads`, whose arguments these are."""
    unit = rows.shape[-1] // width // sum(part.share for part in parts)
    shapes = [(*rows.shape[:2], unit * part.share, width) for part in parts]
    results = tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
    forms = [flag for part in parts for flag in (bool(scales) and part.normed, part.rotated)]
    angles = (
        jnp.broadcast_to(factor, (*rows.shape[:2], 1, factor.shape[-1])) for factor in (cos, sin)
    )
    call = jax.ffi.ffi_call(library_cpu.SPLIT_HEADS, results, vmap_method="sequential")
    norm_scales = jnp.stack(scales).astype(jnp.float32) if scales else jnp.zeros((0, width))
    return tuple(
        call(rows, *angles, norm_scales, eps=np.float32(eps), forms=np.array(forms, np.int64))
    )
