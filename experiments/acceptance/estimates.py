"""Estimates of a draft's chance to be accepted, beside what was accepted.

The chance that draft k of a cycle survives is the product of the first k acceptance rates, each
given that all drafts before are accepted. The rates are a drafter's confidence, or what acceptance
so far tells.

Calibration divides the log-odds of each position's rate by a temperature. The temperatures are
fitted one position after the other, each so that the survival up to its position becomes most
likely (sequential temperature scaling, arXiv 2607.05147).
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dflash.drafters.parts.bandit import Counts
from dflash.inference.cycle import choice, division
from dflash.inference.replay import Cycles

BINS = 10
SLOTS = 16  # Sequences that divide their rows.
TEMPERATURES = np.exp(np.linspace(np.log(0.25), np.log(4.0), 97))  # Those to choose from.
_LEAST = 1e-6  # Rates are at least this far from 0 and 1, so that their log-odds are finite.


class Drafts(NamedTuple):
    """Drafts of N cycles, by position.

    Attributes:
      counted: bool [N, G]; drafts that could be committed, by the length of the text.
      accepted: bool [N, G]; drafts that were accepted, and all before them.
    """

    counted: np.ndarray
    accepted: np.ndarray


class Bin(NamedTuple):
    """Drafts of similar predicted survival."""

    low: float
    predicted: float
    observed: float
    drafts: int


def drafts_of(cycles: Cycles, num_drafts: int) -> Drafts:
    """Returns the drafts of all cycles, text by text; cycles after a text's end count nothing."""
    position = np.arange(num_drafts)
    left, committed = cycles.remaining.reshape(-1, 1), cycles.committed.reshape(-1, 1)
    counted = (position + 1 < left) & (committed > 0)
    return Drafts(counted, counted & (position + 1 < committed))


def of_texts(cycles: Cycles, which: slice) -> Cycles:
    """Returns the cycles of some texts."""
    return jax.tree.map(lambda x: x[which], cycles)


def online_rates(cycles: Cycles, num_drafts: int) -> np.ndarray:
    """Returns the rates that acceptance before each cycle tells, [B, C, G].

    All texts are decoded at once, each in a slot of its own; see `choice.rates`.
    """
    return np.asarray(_online_rates(cycles.committed, cycles.remaining, num_drafts)).swapaxes(0, 1)


@functools.partial(jax.jit, static_argnums=2)
def _online_rates(committed: jax.Array, left: jax.Array, num_drafts: int) -> jax.Array:
    own, pool = jnp.zeros((committed.shape[0], num_drafts)), jnp.zeros(num_drafts)
    draft = jnp.arange(num_drafts)

    def step(counts, cycle):
        committed, left = (x[:, None] for x in cycle)
        tried = (draft < committed - 1 + (committed < left)) & (committed > 0)
        tried = tried.astype(jnp.float32)
        news = Counts(tried, tried * (draft < committed - 1))
        return choice.remember(*counts, news), choice.rates(*counts)

    return jax.lax.scan(step, (Counts(own, own), Counts(pool, pool)), (committed.T, left.T))[1]


def reliability(rates: np.ndarray, drafts: Drafts, count: int = BINS) -> list[Bin]:
    """Returns the bins of equal width that have drafts, by predicted survival.

    Args:
      rates: Rates of the positions, [N, G].
      drafts: What was accepted.
      count: Number of bins from 0 to 1.
    """
    predicted = np.cumprod(rates, axis=1)[drafts.counted]
    survived = drafts.accepted[drafts.counted]
    index = np.minimum((predicted * count).astype(int), count - 1)
    return [
        Bin(i / count, float(predicted[own].mean()), float(survived[own].mean()), int(own.sum()))
        for i in range(count)
        if (own := index == i).any()
    ]


def calibration_error(bins: Sequence[Bin]) -> float:
    """Returns the expected calibration error: the mean distance of a bin, weighted by drafts."""
    total = sum(one.drafts for one in bins)
    return sum(one.drafts * abs(one.predicted - one.observed) for one in bins) / max(total, 1)


def squared_error(rates: np.ndarray, drafts: Drafts) -> float:
    """Returns the mean squared error of the predicted survival (Brier score)."""
    survival = np.cumprod(rates, axis=1)
    return float(np.mean((survival - drafts.accepted)[drafts.counted] ** 2))


def fit_temperatures(rates: np.ndarray, drafts: Drafts) -> tuple[float, ...]:
    """Returns the temperature of each position, among `TEMPERATURES`; 1 where nothing is known."""
    odds, survival, fitted = _odds(rates), np.ones(len(rates)), []
    for k in range(rates.shape[1]):
        counted, survived = drafts.counted[:, k], drafts.accepted[:, k]
        if counted.any():
            chance = survival[counted, None] * _sigmoid(odds[counted, k : k + 1] / TEMPERATURES)
            chance = np.clip(chance, _LEAST, 1 - _LEAST)
            likely = np.where(survived[counted, None], np.log(chance), np.log1p(-chance))
            fitted.append(float(TEMPERATURES[likely.sum(axis=0).argmax()]))
        else:
            fitted.append(1.0)
        survival = survival * _sigmoid(odds[:, k] / fitted[-1])
    return tuple(fitted)


def calibrated(rates: np.ndarray, temperatures: Sequence[float]) -> np.ndarray:
    """Returns the rates [..., G] with the log-odds of each position divided by its temperature."""
    return _sigmoid(_odds(rates) / np.asarray(temperatures))


def _odds(rates: np.ndarray) -> np.ndarray:
    rates = np.clip(rates.astype(np.float64), _LEAST, 1 - _LEAST)
    return np.log(rates) - np.log1p(-rates)


def _sigmoid(odds: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-odds))


def divided_tokens(rates: np.ndarray, cycles: Cycles, mean_rows: int) -> float:
    """Returns the tokens per cycle and sequence if `SLOTS` sequences divide rows by these rates.

    Each slot decodes texts one after the other, until a slot has no more. A cycle that verifies
    fewer rows commits the tokens of these rows, and the next cycle is the recorded one.

    Args:
      rates: Rates of the drafts, [B, C, G].
      cycles: Cycles that verified every draft.
      mean_rows: Mean number of rows per sequence.
    """
    arrays = rates.astype(np.float32), cycles.committed, cycles.remaining
    slots = min(SLOTS, len(rates))
    streams = [
        [
            np.concatenate([array[i, cycles.committed[i] > 0] for i in range(k, len(array), slots)])
            for k in range(slots)
        ]
        for array in arrays
    ]
    shortest = min(map(len, streams[1]))
    rates, tokens, left = (
        jnp.stack([stream[:shortest] for stream in streams_of], axis=1) for streams_of in streams
    )
    active = jnp.ones(slots, bool)

    def committed(rates, tokens, left):
        chance = division.survival(rates, active, left, trees=False)
        return jnp.minimum(tokens, division.divide(chance, active, mean_rows, 1))

    return float(jax.vmap(committed)(rates, tokens, left).mean())
