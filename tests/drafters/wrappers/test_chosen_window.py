"""Tests of the choice of windows: its regret on simulated drafters, and what it learns from."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.models import make_sharding, zeros

from dflash.drafters.base import Drafter, Proposal
from dflash.drafters.wrappers.chosen_window import ChosenWindow

WINDOWS = (64, 256, 1024)
COUNT, DRAFTS, RUNS = len(WINDOWS) + 1, 7, 40
LONG = np.array([4096, 4096])


class Windowed(Drafter):
    """Drafts zeros, through a window that its state notes."""

    windows = WINDOWS
    num_draft_tokens = DRAFTS
    seen = None

    def init_state(self, batch, max_length):
        return make_sharding().abstract((batch,), (None,), jnp.int32)

    def within(self, windows):
        narrowed = Windowed()
        narrowed.seen = windows
        return narrowed

    def draft(self, state, anchor, position, sampler, heads):
        return Proposal(jnp.zeros((len(anchor), DRAFTS), jnp.int32)), self.seen

    def observe(self, state, position, tokens, num_committed, features, heads):
        return state


DRAFTER = ChosenWindow(Windowed(), make_sharding())


def blank(batch: int):
    return zeros(DRAFTER.init_state(batch, 8192))


@jax.jit
def draft(state, length):
    anchor = jnp.zeros(len(length), jnp.int32)
    proposal, state = DRAFTER.draft(state, anchor, length - 1, None, None)
    return proposal.tokens, state, jnp.searchsorted(jnp.array(WINDOWS), state.inner)


@jax.jit
def observe(state, length, accepted):
    tokens = jnp.zeros((len(length), DRAFTS + 2), jnp.int32)
    return DRAFTER.observe(state, length - 1, tokens, accepted + 1, None, None)


@functools.partial(jax.jit, static_argnames="cycles")
def simulate(state, length, rates, key, cycles):
    """Runs cycles of drafters that accept each draft at a rate, float32 [B, W].

    Returns the state after them, and the windows of all cycles, int32 [cycles, B].
    """

    def step(state, key):
        _, state, index = draft(state, length)
        rate = jnp.take_along_axis(rates, index[:, None], axis=1)
        hits = jax.random.uniform(key, (len(length), DRAFTS)) < rate
        return observe(state, length, jnp.cumprod(hits, axis=1).sum(axis=1)), index

    return jax.lax.scan(step, state, jax.random.split(key, cycles))


def run_often(rates, *later_rates) -> np.ndarray:
    """Windows of the last cycles, int32 [RUNS, cycles, B], at the last one of some rates."""

    def run(key):
        state = blank(len(rates))
        for each in (rates, *later_rates):
            state, indices = simulate(state, LONG[: len(rates)], each, key, 1000)
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
def test_regret_against_the_best_window(gain):
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


def test_a_new_sequence_begins_with_what_others_have_found_out():
    rates = where(2, 2.0, (0.3, 0.3))
    state, _ = simulate(blank(2), LONG, rates, jax.random.key(0), cycles=400)
    fresh = jax.jit(DRAFTER.insert)(state, blank(1), np.int32(0), np.int32(1))
    counts, before = (jax.tree.map(np.asarray, one.outer.counts) for one in (fresh, state))
    np.testing.assert_array_equal([counts.tried[1], counts.accepted[1]], 0)
    np.testing.assert_array_equal(counts.tried[0], before.tried[0])
    assert draft(fresh, LONG)[2].tolist()[1] == 2
    later = DRAFTER.with_learnt(blank(2), DRAFTER.learnt(state))
    assert draft(later, LONG)[2].tolist()[0] == 2


def test_drafts_without_a_row_were_not_rejected():
    tokens, state, _ = draft(blank(2), LONG)
    verified = np.where(np.arange(DRAFTS) < [[2], [DRAFTS]], tokens, -1).astype(np.int32)
    sampled = np.zeros((2, DRAFTS + 1), np.int32)
    state = jax.jit(lambda state: DRAFTER.review(state, Proposal(verified), sampled))(state)
    after = jax.tree.map(np.asarray, observe(state, LONG, np.array([2, 2])).outer.counts)
    np.testing.assert_array_equal(after.tried[:, 0], [2, 3])
    np.testing.assert_array_equal(after.accepted[:, 0], [2, 2])


def test_rows_without_a_draft_tell_nothing():
    _, state, _ = draft(blank(2), LONG)
    once = observe(state, LONG, np.array([3, -1]))
    np.testing.assert_array_equal(np.sum(once.outer.counts.accepted, axis=1), [3, 0])
    twice = observe(once, LONG, np.array([0, 0]))
    np.testing.assert_array_equal(twice.outer.counts.tried, once.outer.counts.tried)
    np.testing.assert_array_equal(twice.shared.tried, once.shared.tried)
