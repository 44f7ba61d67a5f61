"""Compiler options of programs, by platform."""

import functools

import jax
import jax.numpy as jnp

from dflash.parallel.sharding import Sharding

# Keeps XLA on a CPU from widening all narrow weights ahead of a loop; see `layers/linear.py`.
NARROW_IN_LOOPS = {"xla_disable_hlo_passes": "while-loop-invariant-code-motion"}
# With few rows, reading the weights dominates a cycle. A TPU reads them fastest in large tiles,
# with one matmul per fusion; see docs/results/tpu_compile.md.
_LARGE_TILES = ("xla_tpu_scoped_vmem_limit_kib", "65536")
_TPU_LOOP = (
    ("xla_tpu_dot_dot_fusion", "false"),
    ("xla_tpu_nested_dot_fusion", "false"),
    _LARGE_TILES,
)
# Overlap the all-gather of weights with other matmuls of the train step.
_TPU_TRAINING = (
    ("xla_enable_async_all_gather", "true"),
    ("xla_tpu_enable_async_collective_fusion", "true"),
    ("xla_tpu_enable_async_collective_fusion_fuse_all_gather", "true"),
    ("xla_tpu_enable_async_collective_fusion_multiple_steps", "true"),
    ("xla_tpu_overlap_compute_collective_tc", "true"),
    _LARGE_TILES,
)
_SMALL_VMEM = ("TPU v4",)


def loop_options(sharding: Sharding, dtype: jnp.dtype) -> dict[str, str]:
    """Returns the compiler options of the decode loop for weights of this dtype."""
    if sharding.platform == "cpu":
        return dict(NARROW_IN_LOOPS) if dtype == jnp.bfloat16 else {}
    return _known(_TPU_LOOP, sharding)


def training_options(sharding: Sharding) -> dict[str, str]:
    """Returns the compiler options of a train step."""
    return _known(_TPU_TRAINING, sharding) if sharding.mesh.size > 1 else {}


@functools.cache
def _known(options: tuple[tuple[str, str], ...], sharding: Sharding) -> dict[str, str]:
    """Returns `options` on a TPU that supports them all, and no options otherwise.

    The options only affect speed. Other versions of the compiler may lack some of them.
    """
    if sharding.platform != "tpu" or sharding.devices[0].device_kind in _SMALL_VMEM:
        return {}
    number = sharding.abstract((), (), jnp.float32)
    try:
        jax.jit(jnp.negative).lower(number).compile(compiler_options=dict(options))
    except jax.errors.JaxRuntimeError as error:
        if "No such compile option" not in str(error):
            raise
        return {}
    return dict(options)
