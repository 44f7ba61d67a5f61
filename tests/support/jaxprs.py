"""What a program holds in memory, read off its jaxpr."""

import jax
from jax.extend import core


def largest_array(function, *arguments) -> int:
    """Elements of the largest array that `function` computes, in loops and checkpoints too."""
    return max(_sizes(jax.make_jaxpr(function)(*arguments).jaxpr))


def _sizes(jaxpr):
    for equation in jaxpr.eqns:
        yield from (getattr(variable.aval, "size", 0) for variable in equation.outvars)
        for inner in core.jaxprs_in_params(equation.params):
            yield from _sizes(inner)
