"""Measures the time of a cycle of each block size or division, with the program that decodes.

A table in which every size but one takes infinitely long forces that size, so no program is
compiled only for the measurement. All slots hold sequences of one length, with distinct rows:
equal rows would choose the same experts, and cycles of many rows would seem cheap.
"""

import dataclasses
import math
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from dflash.inference.cycle import choice
from dflash.inference.cycle.state import DecodeState, Report
from dflash.inference.pages import Layout
from dflash.inference.request import RequestSampling
from dflash.inference.shapes import Shapes

ROUNDS, FEWEST = 5, 2  # Rounds at most, and at least.
ENOUGH = 30.0  # Seconds of dispatches after which no further round begins.
LONG = 0.5  # Seconds of a dispatch that far memory hardly lengthens, so that it counts alone.
_PRIME = 7919  # Spreads the tokens of neighboring slots.


def occupy(
    state: DecodeState,
    seconds: jax.Array,
    length: jax.Array,
    *,
    layout: Layout,
    sampling: RequestSampling,
    vocab_size: int,
) -> DecodeState:
    """Returns a state with a sequence of the same length in every slot.

    Args:
      state: Any state of the batch.
      seconds: float32 [W, 2, S]; times of cycles, see `ChosenRows`.
      length: int32 []; length of the sequences.
    """
    table = jnp.array([layout.standing_pages(slot) for slot in range(layout.batch_size)])
    params = state.sampling.filled(sampling)
    empty = jax.tree.map(jnp.zeros_like, state.choice)
    # Depends on an argument, so that XLA does not fold the caches into constants of the program.
    phase = state.length[0].astype(jnp.float32)
    layers, drafter = jax.tree.map(lambda x: _fill(x, phase), (state.cache.layers, state.drafter))
    return dataclasses.replace(
        state,
        length=jnp.full_like(state.length, length),
        anchor=(_PRIME * (1 + jnp.arange(layout.batch_size))) % vocab_size,
        limit=jnp.full_like(state.limit, layout.max_length),
        active=jnp.ones_like(state.active),
        sampling=params,
        cache=dataclasses.replace(state.cache, layers=layers, page_table=table.astype(jnp.int32)),
        drafter=drafter,
        choice=empty.starting(seconds),
    )


def _fill(rows: jax.Array, phase: jax.Array) -> jax.Array:
    """Fills an array of 3 or more dimensions with distinct rows; returns other arrays unchanged."""
    is_eight_bits = rows.dtype == jnp.int8
    if rows.ndim < 3 or not (is_eight_bits or jnp.issubdtype(rows.dtype, jnp.floating)):
        return rows
    angle = phase
    for axis, size in enumerate(rows.shape):
        place = jax.lax.broadcasted_iota(jnp.float32, rows.shape, axis)
        angle = angle * math.sqrt(2) + place * (1 + 1 / (1 + size))
    filled = jnp.sin(angle)
    return (jnp.round(filled) if is_eight_bits else filled).astype(rows.dtype)


def measure(
    shapes: Shapes,
    program: Callable[..., jax.stages.Compiled],
    generate: Callable[..., tuple[DecodeState, Report]],
) -> np.ndarray:
    """Measures an engine's seconds per cycle in every batch bucket.

    Args:
      program: Returns a compiled program by name; `Engine.program`.
      generate: Runs a dispatch; `Engine.generate`.
    Returns:
      Seconds per cycle, float32 [W, 2, S]; see `ChosenRows`.
    """
    rules, layout, shape = shapes.rules, shapes.layout, shapes.seconds().shape
    groups = len(rules.block_sizes), len(rules.choices.mean_rows)
    lengths = timed_lengths(layout.max_length)
    plain = np.broadcast_to(only(choice.PLAIN, len(rules.choices)), shape)

    def occupied(state: DecodeState, seconds: np.ndarray, length: int) -> DecodeState:
        return program("occupied")(state, np.broadcast_to(seconds, shape), np.int32(length))

    def measure_bucket(bucket: int) -> np.ndarray:
        def run(state: DecodeState) -> tuple[DecodeState, Report]:
            return generate(state, bucket)

        return cycle_seconds(groups, lengths, program("new_state")(plain), occupied, run)

    return np.stack([measure_bucket(bucket) for bucket in layout.bucket_sizes])


def cycle_seconds(
    groups: tuple[int, ...],
    lengths: tuple[int, int],
    state: DecodeState,
    occupied: Callable[[DecodeState, np.ndarray, int], DecodeState],
    generate: Callable[[DecodeState], tuple[DecodeState, Report]],
    rounds: int = ROUNDS,
) -> np.ndarray:
    """Measures seconds per cycle of each choice of rows, the least over interleaved rounds.

    Other work on the machine only ever adds time. Where dispatches take long, two rounds suffice:
    they are means over a long time. The mean of two dispatches counts: the first one reads its
    weights and rows from far memory, because filling the caches has displaced them from near
    memory, as a prefill does in a run. That lengthens the shortest cycles most.

    Args:
      groups: Numbers of choices, S together, whose rows ascend: block sizes, and divisions.
      lengths: Two lengths of the sequences, ascending.
      state: Any state of the batch; consumed.
      occupied: Compiled `occupy`, given a table for one length and batch bucket, and the length.
    Returns:
      Seconds per cycle by length and choice, float32 [2, S]; all processes return those of the
      first one.
    """
    count, spent, samples = sum(groups), 0.0, []
    while len(samples) < min(rounds, FEWEST) or (len(samples) < rounds and spent < ENOUGH):
        samples.append(np.empty((len(lengths), count), np.float32))
        for at, index in np.ndindex(samples[-1].shape):
            state = occupied(state, only(index, count), lengths[at])
            state, seconds, samples[-1][at, index] = _sample(generate, state)
            spent += seconds
    # More rows and longer sequences never take less time, so make each group ascend: noise must not
    # make a larger block look cheaper than plain decoding.
    parts = np.split(np.min(samples, axis=0), np.cumsum(groups)[:-1], axis=1)
    return np.concatenate([_ascending(_ascending(part, 0), 1) for part in parts], axis=1)


def _sample(
    generate: Callable[[DecodeState], tuple[DecodeState, Report]], state: DecodeState
) -> tuple[DecodeState, float, float]:
    """Returns the state after one or two dispatches, their seconds, and the seconds per cycle."""
    state, first, cycles = _timed(generate, jax.block_until_ready(state))
    if first > LONG:
        return state, first, first / cycles
    state, second, more = _timed(generate, state)
    # All sequences may have ended in the first dispatch.
    mean = (first / cycles + second / more) / 2 if more else first / cycles
    return state, first + second, mean


def _ascending(table: np.ndarray, axis: int) -> np.ndarray:
    """Returns the table with no number larger than one after it along the axis."""
    return np.flip(np.minimum.accumulate(np.flip(table, axis), axis), axis)


def _timed(
    generate: Callable[[DecodeState], tuple[DecodeState, Report]], state: DecodeState
) -> tuple[DecodeState, float, int]:
    """Returns the state after a dispatch, the first process's seconds, and the number of cycles."""
    begin = time.perf_counter()
    state, report = jax.block_until_ready(generate(state))
    seconds = np.float32(time.perf_counter() - begin)
    if jax.process_count() > 1:  # All must go on in the same way.
        seconds = multihost_utils.broadcast_one_to_all(seconds)
    return state, float(seconds), int(report.cycles)


def timed_lengths(max_length: int) -> tuple[int, int]:
    """Returns the two lengths at which cycles are timed, given the maximal one."""
    return max(1, max_length // 8), max(1, max_length // 2)


def only(index: int, count: int) -> np.ndarray:
    """Returns a table, float32 [S], that forces one of S = `count` choices.

    All others are infinitely slow in it.
    """
    seconds = np.full(count, np.inf, np.float32)
    seconds[index] = 1.0
    return seconds
