"""Dispatches over the first slots of a batch, used while the other slots are empty.

A cycle computes rows for every slot that its program covers, empty ones included. With few
sequences in a large batch most of that work is wasted: each row adds time beyond some hundred rows
on a TPU, and from the first row on a CPU. So there is one program for each of a few *batch
buckets*, which are numbers of slots per replica. Sequences take the first free slot.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax

from dflash.parallel.sharding import zeros

_STEP = 4  # Ratio of consecutive batch buckets.


def bucket_sizes(slots_per_replica: int) -> tuple[int, ...]:
    """Returns the batch buckets: slots per replica that a dispatch may cover, ascending."""
    sizes = {1, slots_per_replica}
    size = slots_per_replica
    while size := size // _STEP:
        sizes.add(size)
    return tuple(sorted(sizes))


def over_first_slots(function: Callable, shapes: Any, num_replicas: int) -> Callable:
    """Wraps a function of the first slots' state as a function of the whole state.

    Only per-slot data, such as the drafter's context, is copied; the target's pages stay in place.

    Args:
      function: Function (target, drafter, state, …) -> (state, report).
      shapes: Abstract state of the first W slots of each replica, which `function` takes.
      num_replicas: Number of equal, consecutive parts that the slot axis is divided into.
    Returns:
      Function (target, drafter, state, …) -> (state, report); the report's other slots are zero.
    """

    def run(target, drafter, state, *arguments):
        first = take(state, shapes, num_replicas)
        after, report = function(target, drafter, first, *arguments)
        _, full_report = jax.eval_shape(function, target, drafter, state, *arguments)
        return put((state, zeros(full_report)), (after, report), num_replicas)

    return run


def take(batch: Any, shapes: Any, num_replicas: int, index: Any = 0) -> Any:
    """Returns the part of a pytree that belongs to some slots of each replica.

    Args:
      batch: Arrays of all slots.
      shapes: Abstract arrays of the part.
      num_replicas: Number of equal, consecutive parts that the slot axis is divided into.
      index: Number of the part among parts of its size, 0 for the first slots.
    """

    def leaf(x, like):
        axis = _axis(x.shape, like.shape)
        if axis is None:
            return x
        size = like.shape[axis] // num_replicas
        pieces = _pieces(x, axis, num_replicas)
        part = lax.dynamic_slice_in_dim(pieces, index * size, size, axis=axis + 1)
        return part.reshape(like.shape)

    return jax.tree.map(leaf, batch, shapes)


def put(batch: Any, part: Any, num_replicas: int, index: Any = 0) -> Any:
    """Writes a part back where `take` took it from; data of no slot is that of the part."""

    def leaf(x, new):
        axis = _axis(x.shape, new.shape)
        if axis is None:
            return new
        pieces, parts = _pieces(x, axis, num_replicas), _pieces(new, axis, num_replicas)
        start = index * parts.shape[axis + 1]
        return lax.dynamic_update_slice_in_dim(pieces, parts, start, axis=axis + 1).reshape(x.shape)

    return jax.tree.map(leaf, batch, part)


def _axis(batch: tuple[int, ...], part: tuple[int, ...]) -> int | None:
    """Returns the axis whose size depends on the number of slots; None if there is none."""
    axes = [i for i, (size, other) in enumerate(zip(batch, part, strict=True)) if size != other]
    if len(axes) > 1:
        raise ValueError(f"shapes {batch} and {part} differ in more than the number of slots")
    return axes[0] if axes else None


def _pieces(x: jax.Array, axis: int, count: int) -> jax.Array:
    """Splits an axis of `x` into `count` parts of equal size."""
    return x.reshape(*x.shape[:axis], count, x.shape[axis] // count, *x.shape[axis + 1 :])
