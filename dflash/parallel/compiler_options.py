"""Compiler options of programs, by platform."""

import functools

import jax
import jax.numpy as jnp

from dflash.parallel.sharding import Sharding

# A CPU does not widen all narrow weights that a loop reads ahead of it; see `layers/linear.py`.
NARROW_IN_LOOPS = {"xla_disable_hlo_passes": "while-loop-invariant-code-motion"}
# With few rows the time of a cycle is that of reading the weights. A TPU reads them fastest in
# large pieces, with one product per fusion; see docs/results/tpu_compile.md.
_LARGE_TILES = ("xla_tpu_scoped_vmem_limit_kib", "65536")
_TPU_LOOP = (
    ("xla_tpu_dot_dot_fusion", "false"),
    ("xla_tpu_nested_dot_fusion", "false"),
    _LARGE_TILES,
)
# A train step gathers its weights while products of other ones run.
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
    """Compiler options of the decode loop over weights of this dtype."""
    if sharding.platform == "cpu":
        return dict(NARROW_IN_LOOPS) if dtype == jnp.bfloat16 else {}
    return _known(_TPU_LOOP, sharding)


def training_options(sharding: Sharding) -> dict[str, str]:
    """Compiler options of a train step."""
    return _known(_TPU_TRAINING, sharding) if sharding.mesh.size > 1 else {}


@functools.cache
def _known(options: tuple[tuple[str, str], ...], sharding: Sharding) -> dict[str, str]:
    """The options on a TPU that has room for them and whose compiler knows all, else none.

    They only affect speed, and another version of the compiler may lack some.
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
