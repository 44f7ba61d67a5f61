"""Measures the time of a cycle of each block size or division, with the program that decodes.

A table in which every size but one takes infinitely long forces that size, so no program is
compiled only for the measurement. All slots hold sequences of half the maximal length, with
distinct rows: equal rows would choose the same experts, and cycles of many rows would seem cheap.
"""

import dataclasses
import math
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from dflash.inference.cycle import adaptive
from dflash.inference.cycle.state import DecodeState, Report
from dflash.inference.pages import Layout
from dflash.inference.request import RequestSampling

ROUNDS = 5
_PRIME = 7919  # Spreads the tokens of neighboring slots.


def occupy(
    state: DecodeState,
    seconds: jax.Array,
    *,
    layout: Layout,
    sampling: RequestSampling,
    vocab_size: int,
) -> DecodeState:
    """Returns a state with a sequence of half the maximal length in every slot.

    Args:
      state: Any state of the batch.
      seconds: float32 [W, S]; seconds per cycle by batch bucket and choice of rows.
      layout: Layout of the batch.
      sampling: Sampling parameters of the sequences.
      vocab_size: Vocabulary size of the target.
    """
    table = jnp.array([layout.standing_pages(slot) for slot in range(layout.batch_size)])
    params = state.sampling.filled(sampling)
    empty = jax.tree.map(jnp.zeros_like, state.adaptive)
    # Depends on an argument, so that XLA does not fold the caches into constants of the program.
    phase = state.length[0].astype(jnp.float32)
    layers, drafter = jax.tree.map(lambda x: _fill(x, phase), (state.cache.layers, state.drafter))
    return dataclasses.replace(
        state,
        length=jnp.full_like(state.length, max(1, layout.max_length // 2)),
        anchor=(_PRIME * (1 + jnp.arange(layout.batch_size))) % vocab_size,
        limit=jnp.full_like(state.limit, layout.max_length),
        active=jnp.ones_like(state.active),
        sampling=params,
        cache=dataclasses.replace(state.cache, layers=layers, page_table=table.astype(jnp.int32)),
        drafter=drafter,
        adaptive=adaptive.with_seconds(empty, seconds),
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


def cycle_seconds(
    groups: tuple[int, ...],
    state: DecodeState,
    occupied: Callable[[DecodeState, np.ndarray], DecodeState],
    generate: Callable[[DecodeState, int], tuple[DecodeState, Report]],
    rounds: int = ROUNDS,
) -> tuple[float, ...]:
    """Measures seconds per cycle of each choice of rows, as medians over interleaved rounds.

    The second of two dispatches counts: the first one reads its weights and rows from far memory,
    because filling the caches has displaced them from near memory.

    Args:
      groups: Numbers of choices, S together, whose rows ascend: block sizes, and divisions.
      state: Any state of the batch; consumed.
      occupied: Compiled `occupy`.
      generate: Runs a dispatch, given the index of the choice that all its cycles take.
      rounds: Number of rounds.
    Returns:
      Seconds per cycle of each choice; all processes return those of the first one.
    """
    count = sum(groups)
    samples: list[list[float]] = [[] for _ in range(count)]
    for _ in range(rounds):
        for i, taken in enumerate(samples):
            state = jax.block_until_ready(occupied(state, adaptive.only(i, count)))
            state, warm_up = _timed(generate, state, i)
            state, seconds = _timed(generate, state, i)
            # All sequences may have ended in the first dispatch.
            taken.append(warm_up if seconds is None else seconds)
    table = np.array([statistics.median(taken) for taken in samples], np.float32)
    # More rows never take less time, so make each group ascend: noise must not make a larger block
    # look cheaper than plain decoding.
    parts = np.split(table, np.cumsum(groups)[:-1])
    table = np.concatenate([np.minimum.accumulate(part[::-1])[::-1] for part in parts])
    if jax.process_count() > 1:
        table = multihost_utils.broadcast_one_to_all(table)
    return tuple(table.tolist())


def _timed(
    generate: Callable[[DecodeState, int], tuple[DecodeState, Report]],
    state: DecodeState,
    choice: int,
) -> tuple[DecodeState, float | None]:
    """Returns the state after a dispatch, and its seconds per cycle; None if it ran no cycle."""
    begin = time.perf_counter()
    state, report = jax.block_until_ready(generate(state, choice))
    seconds, cycles = time.perf_counter() - begin, int(report.cycles)
    return state, seconds / cycles if cycles else None
