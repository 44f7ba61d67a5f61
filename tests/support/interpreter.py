"""Runs Pallas TPU kernels in interpret mode, and lets no race pass."""

import jax
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu


def interpret(function, *arguments):
    """Compiles and runs `function`, which calls kernels in interpret mode.

    Stray reads raise by themselves and unwritten memory reads as NaN; races are only recorded, and
    for the last kernel alone, so that `function` should call one.
    """
    pltpu.reset_tpu_interpret_mode_state()
    result = jax.block_until_ready(jax.jit(function)(*arguments))
    assert interpret_pallas_call.races is not None, "no kernel was interpreted"
    assert not interpret_pallas_call.races.races_found
    return result
