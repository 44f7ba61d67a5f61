"""Compiles the engine's programs ahead of time, with compiler options for each platform."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from dflash.layers.linear import NARROW_IN_LOOPS
from dflash.parallel.sharding import Sharding

# With few rows the time of a cycle is that of reading the weights. A TPU reads them fastest in
# large pieces, with one product per fusion; see docs/results/tpu_compile.md.
_TPU_LOOP = {
    "xla_tpu_dot_dot_fusion": "false",
    "xla_tpu_nested_dot_fusion": "false",
    "xla_tpu_scoped_vmem_limit_kib": "65536",
}
_SMALL_VMEM = ("TPU v4",)


def loop_options(sharding: Sharding, dtype: jnp.dtype) -> dict[str, str]:
    """Compiler options of the decode loop over weights of this dtype."""
    if sharding.platform == "cpu":
        return dict(NARROW_IN_LOOPS) if dtype == jnp.bfloat16 else {}
    if sharding.platform == "tpu" and sharding.devices[0].device_kind not in _SMALL_VMEM:
        return dict(_TPU_LOOP)
    return {}


def known(options: dict[str, str], sharding: Sharding) -> dict[str, str]:
    """The options if the compiler of these devices knows them all, and none otherwise.

    For options that only affect speed, of which another version may lack some.
    """
    number = sharding.abstract((), (), jnp.float32)
    try:
        jax.jit(jnp.negative).lower(number).compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as error:
        if "No such compile option" not in str(error):
            raise
        return {}
    return options


def zeros(abstract: Any) -> Any:
    """Zeros in place of abstract arrays, inside a program."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), abstract)


def lower(
    function: Callable,
    *inputs: Any,
    out: Any,
    donate: tuple[int, ...] = (),
    options: dict[str, str] | None = None,
) -> jax.stages.Compiled:
    """Compiles `function` for abstract inputs.

    Args:
      function: pure.
      *inputs: abstract, and placed.
      out: abstract results with their shardings.
      donate: indices of inputs whose buffers are donated.
      options: compiler options.
    """
    shardings = jax.tree.map(lambda x: x.sharding, out)
    lowered = jax.jit(function, donate_argnums=donate, out_shardings=shardings).lower(*inputs)
    try:
        return lowered.compile(compiler_options=options or None)
    except jax.errors.JaxRuntimeError as error:
        # The options only affect speed, and another version of the compiler may lack them.
        if "No such compile option" not in str(error):
            raise
        return lowered.compile()
