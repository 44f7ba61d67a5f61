"""Measures a cycle of each block size, with the program that decodes.

A table in which every size but one takes infinitely long forces that size, so nothing is compiled
only to measure. All slots are busy, with sequences of half the maximal length. No two of them are
alike: equal rows would all choose the same experts, and a cycle of many rows seem cheap.
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

from dflash.inference import adaptive
from dflash.inference.pages import Layout
from dflash.inference.request import Sampling
from dflash.inference.state import DecodeState, Report

ROUNDS = 5
_PRIME = 7919  # neighbours' tokens lie far apart


def occupy(
    state: DecodeState,
    seconds: jax.Array,
    *,
    layout: Layout,
    sampling: Sampling,
    vocab_size: int,
) -> DecodeState:
    """A state with a sequence in every slot, of half the maximal length.

    Args:
      state: any.
      seconds: float32 [W, S]; of a cycle of each size.
      layout: of the state.
      sampling: how sequences draw their tokens.
      vocab_size: of the target.
    """
    table = jnp.array([layout.standing_pages(slot) for slot in range(layout.batch_size)])
    params = state.sampling.filled(sampling)
    empty = jax.tree.map(jnp.zeros_like, state.adaptive)
    # An argument of the program, or the compiler would compute caches ahead and keep them.
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
    """An array of this shape in which no two rows are alike; smaller ones as they are."""
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
    sizes: tuple[int, ...],
    state: DecodeState,
    occupied: Callable[[DecodeState, np.ndarray], DecodeState],
    generate: Callable[[DecodeState], tuple[DecodeState, Report]],
    rounds: int = ROUNDS,
) -> tuple[float, ...]:
    """Seconds of a cycle of each size: medians over rounds in which each has its turn.

    Args:
      sizes: S block sizes.
      state: any; consumed.
      occupied: `occupy`, compiled.
      generate: the engine's.
      rounds: number of rounds that count, after one that does not.
    Returns:
      the table of the first process, on all of them.
    """
    samples: list[list[float]] = [[] for _ in sizes]
    for _ in range(rounds + 1):
        for i, taken in enumerate(samples):
            state = jax.block_until_ready(occupied(state, adaptive.only(i, sizes)))
            begin = time.perf_counter()
            state, report = jax.block_until_ready(generate(state))
            taken.append((time.perf_counter() - begin) / int(report.cycles))
    table = np.array([statistics.median(taken[1:]) for taken in samples], np.float32)
    # More rows never take less time: where they seem to, it is noise, which must not make a larger
    # block look cheaper than plain decoding.
    table = np.minimum.accumulate(table[::-1])[::-1]
    if jax.process_count() > 1:
        table = multihost_utils.broadcast_one_to_all(table)
    return tuple(table.tolist())
