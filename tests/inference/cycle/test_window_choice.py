"""Tests of the choice of windows: against simulated drafters, and through the engine."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.models import make_sharding, zeros

from dflash.inference.cycle import window_choice
from dflash.inference.cycle.window_choice import WindowChoice

WINDOWS = (64, 256, 1024)
COUNT = len(WINDOWS) + 1
DRAFTS = 7
RUNS = 64  # Independent runs of a statistic.
LONG = jnp.full(2, 2000)  # Tokens of two sequences.


def blank(batch: int) -> WindowChoice:
    return zeros(window_choice.abstract(batch, WINDOWS, make_sharding()))


@functools.partial(jax.jit, static_argnames="cycles")
def simulate(choice, length, rates, key, cycles):
    """Runs cycles of drafters that accept each draft at a rate, float32 [B, W].

    Returns the choice after them, and the windows of all cycles, int32 [cycles, B].
    """

    def step(choice, key):
        choice = choice.choose(length)
        rate = jnp.take_along_axis(rates, choice.index[:, None], axis=1)
        hits = jax.random.uniform(key, (len(length), DRAFTS)) < rate
        accepted = jnp.cumprod(hits, axis=1).sum(axis=1)
        return choice.learn(length, accepted, jnp.full_like(accepted, DRAFTS)), choice.index

    return jax.lax.scan(step, choice, jax.random.split(key, cycles))


def run_often(rates, *later_rates, cycles=1000) -> np.ndarray:
    """Windows of the last cycles, int32 [RUNS, cycles, B], at the last one of some rates."""

    def run(key):
        choice = blank(len(rates))
        for each in (rates, *later_rates):
            choice, indices = simulate(choice, LONG[: len(rates)], each, key, cycles)
        return indices

    return np.asarray(jax.vmap(run)(jax.random.split(jax.random.key(0), RUNS)))


def where(best: int, more: float, levels=(0.4,)) -> jax.Array:
    """Rates [B, W] of sequences of these levels, which one window raises by a factor."""
    return jnp.array(levels)[:, None] * jnp.where(jnp.arange(COUNT) == best, more, 1.0)


@pytest.mark.parametrize("best", range(COUNT))
@pytest.mark.parametrize("levels", [(0.4,), (0.2, 0.6)], ids=str)
def test_the_best_window_is_found(levels, best):
    indices = run_often(where(best, 1.4, levels))
    assert np.mean(indices[:, :100] == best) > 0.35
    assert np.mean(indices[:, 500:] == best) > 0.75
    # The others are tried again, in case they have become better.
    tried = [np.unique(run).size for run in indices[:, 500:]]
    assert np.mean(tried) > COUNT - 0.5


@pytest.mark.parametrize(("before", "after"), [(0, 3), (3, 0)])
def test_a_window_that_becomes_the_best_is_found(before, after):
    indices = run_often(where(before, 1.4), where(after, 1.4))
    assert np.mean(indices[:, :20] == before) > 0.7
    assert np.mean(indices[:, 500:] == after) > 0.7


@pytest.mark.parametrize("gain", [0.0, 0.05, 0.2, 1.0])
def test_trials_cost_little(gain):
    """Whether the others are much worse or hardly: much is lost rarely, and little often."""
    rates = where(3, 1 + gain)
    found = np.asarray(rates)[0][run_often(rates)[:, 300:]]
    assert found.mean() > 0.95 * float(rates.max())


def test_only_windows_that_hide_something_are_chosen():
    length = jnp.array([64, 65, 256, 257, 1024, 1025])
    rates = jnp.full((6, COUNT), 0.5)
    _, indices = simulate(blank(6), length, rates, jax.random.key(0), cycles=300)
    chosen = [set(np.unique(column)) for column in np.asarray(indices).T]
    assert chosen == [{3}, {0, 3}, {0, 3}, {0, 1, 3}, {0, 1, 3}, {0, 1, 2, 3}]


def test_the_narrower_of_equal_windows_is_chosen():
    choice = blank(2).choose(jnp.array([2000, 30]))
    np.testing.assert_array_equal(choice.index, [0, 3])
    np.testing.assert_array_equal(choice.positions(), [64, 2**30])


def test_a_new_sequence_begins_with_what_others_have_found_out():
    rates = where(2, 2.0, (0.3, 0.3))
    choice, _ = simulate(blank(2), LONG, rates, jax.random.key(0), cycles=400)
    fresh = choice.insert(jnp.int32(1))
    np.testing.assert_array_equal([fresh.tried[1], fresh.accepted[1]], 0)
    np.testing.assert_array_equal(fresh.tried[0], choice.tried[0])
    assert int(fresh.choose(LONG).index[1]) == 2
    pool = {"pool_tried": choice.pool_tried, "pool_accepted": choice.pool_accepted}
    later = dataclasses.replace(blank(2), **pool)
    assert int(later.choose(LONG).index[0]) == 2
    assert window_choice.abstract(2, (), make_sharding()) is None


def test_a_cycle_that_tells_nothing_changes_nothing():
    choice = blank(2).choose(LONG)
    after = choice.learn(LONG, jnp.array([3, 2]), jnp.array([0, 4]))
    np.testing.assert_array_equal(after.tried[:, 0], [0, 3])
    np.testing.assert_array_equal(after.accepted[:, 0], [0, 2])
    np.testing.assert_array_equal(after.pool_accepted.sum(axis=0), [2, 0, 0, 0])
