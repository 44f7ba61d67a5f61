"""Dispatches over the first slots of a batch, for times when the others are empty.

A cycle computes rows for every slot that its program covers, empty ones too. With few sequences in
a large batch most of them are waste: beyond some hundred rows a TPU's cycle takes longer with each
of them, and a CPU's from the first on. So there is one program for each of a few *widths*: numbers
of slots of each share of the pool. Sequences take the first slot that is free.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax

from dflash.parallel.sharding import zeros

_STEP = 4  # each width is so many times the one before


def widths(slots_per_replica: int) -> tuple[int, ...]:
    """Slots of each share that a dispatch may cover, ascending, from 1 to all of them."""
    found = {1, slots_per_replica}
    width = slots_per_replica
    while width := width // _STEP:
        found.add(width)
    return tuple(sorted(found))


def over_first_slots(function: Callable, shapes: Any, num_replicas: int) -> Callable:
    """A function of the models and the first slots of a state, as one of the whole state.

    What a dispatch copies to and fro is what these slots own alone, such as the drafter's context;
    the target's pages stay in place.

    Args:
      function: (target, drafter, state) -> (state, report).
      shapes: the state that it takes: of W slots in each share, in place of all.
      num_replicas: consecutive pieces of equal size that slots, and what they own, come in.
    Returns:
      (target, drafter, state) -> (state, report); the report's other slots are all zeros.
    """

    def run(target, drafter, state):
        first = jax.tree.map(lambda x, y: _first(x, y.shape, num_replicas), state, shapes)
        after, report = function(target, drafter, first)
        _, whole = jax.eval_shape(function, target, drafter, state)
        before = state, zeros(whole)
        return jax.tree.map(lambda x, y: _put(x, y, num_replicas), before, (after, report))

    return run


def _first(x: jax.Array, shape: tuple[int, ...], num_replicas: int) -> jax.Array:
    """The part of `x` that has this shape: the beginning of every piece."""
    axis = _axis(x.shape, shape)
    if axis is None:
        return x
    pieces = _pieces(x, axis, num_replicas)
    return lax.slice_in_dim(pieces, 0, shape[axis] // num_replicas, axis=axis + 1).reshape(shape)


def _put(x: jax.Array, part: jax.Array, num_replicas: int) -> jax.Array:
    """`x` with a part in the place that `_first` took it from."""
    axis = _axis(x.shape, part.shape)
    if axis is None:
        return part
    pieces, parts = _pieces(x, axis, num_replicas), _pieces(part, axis, num_replicas)
    return lax.dynamic_update_slice_in_dim(pieces, parts, 0, axis=axis + 1).reshape(x.shape)


def _axis(whole: tuple[int, ...], part: tuple[int, ...]) -> int | None:
    """The dimension that counts slots, or what they own; None if there is none."""
    axes = [i for i, (one, other) in enumerate(zip(whole, part, strict=True)) if one != other]
    if len(axes) > 1:
        raise ValueError(f"shapes {whole} and {part} differ in more than the number of slots")
    return axes[0] if axes else None


def _pieces(x: jax.Array, axis: int, count: int) -> jax.Array:
    """`x` with a dimension split into `count` pieces of equal size."""
    return x.reshape(*x.shape[:axis], count, x.shape[axis] // count, *x.shape[axis + 1 :])
