"""Compiles the engine's programs ahead of time."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


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
    return lowered.compile(compiler_options=options or None)
