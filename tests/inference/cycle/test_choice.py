"""Tests of the choice of rows: its regret on scripted streams, and what it learns from a cycle."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engines import engine
from support.models import drafter, make_sharding, zeros

from dflash.drafters.base import Proposal
from dflash.inference import timing
from dflash.inference.cycle import choice as choices
from dflash.inference.cycle import division
from dflash.inference.cycle.block import Block
from dflash.inference.cycle.choice import ChosenRows
from dflash.inference.cycle.choices import Choices
from dflash.inference.cycle.verify import VerifyResult

SIZES = (1, 2, 4, 8)
DRAFTS = SIZES[-1] - 1
FAR = 1000
few = settings(max_examples=25)


def blank(batch: int, seconds, among: Choices | None = None) -> ChosenRows:
    """A choice that knows the times of cycles, and nothing else."""
    among = among or Choices(SIZES)
    table = np.broadcast_to(np.asarray(seconds, np.float32), (1, 2, len(among)))
    abstract = choices.abstract(among, batch, 8, jnp.float32, make_sharding())
    return zeros(abstract).starting(table)


def block(counts, num_drafts: int = DRAFTS, parents=None, confidence=None) -> Block:
    """A block of which each sequence verifies so many rows; divided if there is confidence."""
    batch = len(counts)
    tokens, anchor = jnp.zeros((batch, num_drafts), jnp.int32), jnp.zeros(batch, jnp.int32)
    whole = Block.of(Proposal(tokens, parents, confidence=confidence), anchor, anchor, 99)
    packing = None if confidence is None else "packed"
    return dataclasses.replace(whole, counts=jnp.asarray(counts), packing=packing)


@jax.jit
def choose(choice: ChosenRows, active, left) -> ChosenRows:
    return choice.choose(active, left)


def learn(choice: ChosenRows, rows: Block, accepted, left=FAR, active=True) -> ChosenRows:
    """What a choice knows after a cycle on chains."""
    accepted, active = jnp.asarray(accepted), jnp.asarray(active)
    committed = jnp.where(active, jnp.minimum(accepted + 1, left), 0)
    return choice.learn(rows, VerifyResult(accepted, None, accepted), committed, left)


@functools.partial(jax.jit, static_argnames="num_drafts")
def learn_from(choice: ChosenRows, counts, accepted, active=True, num_drafts=DRAFTS) -> ChosenRows:
    """`learn`, compiled, from blocks of so many rows."""
    return learn(choice, block(counts, num_drafts), accepted, active=active)


rates_of = jax.jit(lambda choice: choices.rates(choice.by_sequence, choice.pool))
survival = jax.jit(division.survival, static_argnames="trees")
divide = jax.jit(division.divide, static_argnums=(2, 3))
expected_tokens = jax.jit(division.expected_tokens, static_argnums=2)


# --- regret ---------------------------------------------------------------------------------------

NUM_TOKENS = 128  # of each sequence
# Seconds of a cycle, a plain one taking 1: rows are nearly free, or cost as on a CPU, or dearly.
TABLES = {
    "flat": [1.0, 1.15, 1.16, 1.18],
    "even": [1.0, 1.4, 1.6, 2.0],
    "steep": [1.0, 1.9, 2.6, 4.0],
}
# Acceptance rates of each draft, and by how much sequences differ.
DRAFTERS = {
    "never": (np.zeros(DRAFTS), 0.0),
    "poor": (np.full(DRAFTS, 0.3), 0.1),
    "fair": (np.linspace(0.75, 0.55, DRAFTS), 0.0),
    "good": (np.linspace(0.85, 0.75, DRAFTS), 0.1),
    "sure": (np.full(DRAFTS, 0.98), 0.0),
    "mixed": (np.full(DRAFTS, 0.6), 0.35),
}
RUNS = 8  # of each simulation: a single one varies by several per cent


@jax.jit
def simulate(choice, costs, rates, keys):
    """Tokens per second of several runs together, with rates [runs, N, G] and keys [runs]."""
    runs = jax.vmap(simulate_once, (None, None, 0, 0))(choice, costs, rates, keys)
    tokens, seconds = jax.tree.map(jnp.sum, runs)
    return tokens / seconds


def simulate_once(choice, costs, rates, key):
    """Tokens and seconds of decoding N sequences whose drafts are accepted with rates [N, G].

    Args:
      choice: a chooser that knows nothing yet; how many sequences run at a time.
      costs: what cycles take, whatever the chooser was told.
    """
    sizes, batch = jnp.array(SIZES), len(choice.by_sequence.tried)

    def cycle(carry):
        choice, done, queue, by_sequence, key, seconds, tokens = carry
        left = NUM_TOKENS - done
        active = left > 0
        choice = choice.choose(active, left)
        rows = sizes[choice.index]
        key, noise = jax.random.split(key)
        right = jax.random.uniform(noise, by_sequence.shape) < by_sequence
        accepted = jnp.minimum(jnp.cumprod(right, axis=1).sum(axis=1), rows - 1)
        seconds += costs[choice.index]
        choice = learn(choice, block(jnp.full(batch, rows)), accepted, left, active)
        committed = jnp.where(active, jnp.minimum(accepted + 1, left), 0)
        done += committed
        ended = active & (done >= NUM_TOKENS)
        place = queue + jnp.cumsum(ended) - 1
        fresh = ended & (place < len(rates))
        forgotten = jax.tree.map(lambda x: jnp.where(fresh[:, None], 0, x), choice.by_sequence)
        choice = dataclasses.replace(choice, by_sequence=forgotten)
        by_sequence = jnp.where(fresh[:, None], rates[place], by_sequence)
        done = jnp.where(fresh, 0, done)
        return (
            choice, done, queue + ended.sum(), by_sequence, key, seconds, tokens + committed.sum(),
        )  # fmt: skip

    nothing = jnp.zeros(batch, jnp.int32)
    start = choice, nothing, jnp.int32(batch), rates[:batch], key
    carry = (*start, jnp.float32(0), jnp.int32(0))
    carry = jax.lax.while_loop(lambda carry: (carry[1] < NUM_TOKENS).any(), cycle, carry)
    return carry[-1], carry[-2]


@pytest.mark.parametrize("batch", [1, 4, 16])
def test_regret_against_the_best_fixed_size(batch):
    """Whatever cycles cost and drafts are worth: at most 3 % slower than the best fixed size."""
    rng, keys = np.random.default_rng(0), jax.random.split(jax.random.key(batch), RUNS)
    # With few sequences per slot the time is that of the last ones, which is luck.
    num_sequences = max(12, 6 * batch)

    def speed(table, costs, rates):
        choice = blank(batch, table)
        # No trial is due that was not paid for.
        earned = dataclasses.replace(choice.trial, credit=jnp.float32(0))
        choice = dataclasses.replace(choice, trial=earned)
        return float(simulate(choice, jnp.array(costs, jnp.float32), rates, keys))

    found = {}
    for name, (mean, spread) in DRAFTERS.items():
        shift = rng.uniform(-spread, spread, (RUNS, num_sequences, 1))
        rates = jnp.array(np.clip(mean + shift, 0, 1), jnp.float32)
        # What a fixed size commits per cycle does not depend on what a cycle costs.
        tables = [timing.only(i, len(SIZES)) for i in range(len(SIZES))]
        fixed = [speed(table, [1.0] * len(SIZES), rates) for table in tables]
        for cost, table in TABLES.items():
            best = max(rate / each for rate, each in zip(fixed, table, strict=True))
            found[name, cost] = speed(table, table, rates) / best
    assert min(found.values()) > 0.97, found


@jax.jit
def learn_and_choose(choice: ChosenRows, rows, accepted) -> ChosenRows:
    choice = learn(choice, block(rows), jnp.minimum(accepted, rows - 1))
    return choice.choose(jnp.ones(len(rows), bool), jnp.full(len(rows), FAR))


def run(choice: ChosenRows, accept, cycles: int) -> np.ndarray:
    """The choices of some cycles; accept(cycle) is the drafts that the largest block accepts."""
    sizes, indices = choice.choices.block_sizes, []
    batch = len(choice.by_sequence.tried)
    choice = choose(choice, np.ones(batch, bool), np.full(batch, FAR))
    for cycle in range(cycles):
        indices.append(int(choice.index))
        rows = np.full(batch, sizes[indices[-1]])
        choice = learn_and_choose(choice, rows, np.full(batch, accept(cycle)))
    return np.array(indices)


@pytest.mark.parametrize(("before", "now"), [(0, DRAFTS), (DRAFTS, 0)])
def test_a_text_that_changes_is_followed(before, now):
    indices = run(blank(4, TABLES["even"]), lambda cycle: before if cycle < 150 else now, 400)
    best = {0: 0, DRAFTS: len(SIZES) - 1}
    assert np.mean(indices[50:150] == best[before]) > 0.9
    assert np.mean(indices[-100:] == best[now]) > 0.9


def test_trials_cost_a_small_fraction_of_the_time():
    indices = run(blank(4, TABLES["even"]), lambda cycle: 0, 1000)
    assert 0 < np.mean(indices[100:] > 0) < 0.02


def test_another_run_begins_with_what_was_learnt_and_doubts_it():
    choice = blank(4, TABLES["even"])
    for _ in range(100):
        choice = learn_from(choice, np.full(4, 8), np.full(4, DRAFTS))
    fresh = blank(4, TABLES["even"]).with_learnt(choice.learnt)
    assert run(fresh, lambda cycle: DRAFTS, 1)[0] == 3
    assert np.mean(run(fresh, lambda cycle: 0, 60)[20:] == 0) > 0.9


@few
@given(st.integers(0, 2**31))
def test_the_choice_is_the_most_expected_tokens_per_second(seed):
    rng, batch = np.random.default_rng(seed), 3
    rates, left = rng.random((batch, DRAFTS)), rng.integers(1, 12, batch)
    active = rng.random(batch) < 0.7
    seconds = np.cumsum(rng.random(len(SIZES)) + 0.01)
    tried = jnp.full((batch, DRAFTS), 1e6, jnp.float32)
    choice = blank(batch, seconds)
    sure = dataclasses.replace(choice.by_sequence, tried=tried, accepted=tried * rates)
    poor = dataclasses.replace(choice.trial, credit=jnp.float32(0))
    choice = dataclasses.replace(choice, by_sequence=sure, trial=poor)
    choice = choose(choice, active, left)
    speeds = []
    for size, cost in zip(SIZES, seconds, strict=True):
        tokens = 0.0
        for b in np.flatnonzero(active):
            survival = np.cumprod(rates[b])[: min(size, left[b]) - 1]
            tokens += 1 + survival.sum()
        speeds.append(tokens / cost)
    assert speeds[int(choice.trial.best)] >= (1 - 1e-4) * max(speeds)


# --- what a cycle tells ---------------------------------------------------------------------------


def test_what_was_not_tried_is_not_counted():
    accepted, active = np.array([0, 2, 3]), np.array([True, True, False])
    after = learn_from(blank(3, np.ones(4)), np.full(3, 4), accepted, active)
    np.testing.assert_array_equal(
        after.by_sequence.tried[:, :4], [[1, 0, 0, 0], [1, 1, 1, 0], [0, 0, 0, 0]]
    )
    np.testing.assert_array_equal(
        after.by_sequence.accepted[:, :3], [[0, 0, 0], [1, 1, 0], [0, 0, 0]]
    )
    assert not after.by_sequence.tried[:, 3:].any()
    np.testing.assert_array_equal(after.pool.tried[:4], [2, 1, 1, 0])
    np.testing.assert_array_equal(after.pool.accepted[:4], [1, 1, 0, 0])


def test_an_end_is_a_refusal_and_a_limit_is_not():
    # Of seven drafts two tokens came: the first sequence ended there, the second reached its limit.
    # The third brought all.
    left, committed = np.array([1000, 2, 1000]), np.array([2, 2, 8])
    result = VerifyResult(np.full(3, 7), None, committed)
    step = jax.jit(lambda choice: choice.learn(block([8, 8, 8]), result, committed, left))
    after = step(blank(3, np.ones(4)))
    np.testing.assert_array_equal(after.by_sequence.tried.sum(axis=1), [2, 1, 7])
    np.testing.assert_array_equal(after.by_sequence.accepted.sum(axis=1), [1, 1, 7])


def test_a_plain_cycle_earns_and_teaches_nothing():
    choice = blank(2, TABLES["even"])
    for _ in range(10):
        choice = learn_from(choice, np.array([8, 8]), np.zeros(2, int))
    choice = choose(choice, np.ones(2, bool), np.full(2, FAR))
    broke = dataclasses.replace(choice.trial, credit=-choice.trial.loss)
    choice = dataclasses.replace(choice, trial=broke)
    after = learn_from(choice, np.array([1, 1]), np.zeros(2, int), num_drafts=0)
    np.testing.assert_array_equal(after.by_sequence.tried, choice.by_sequence.tried)
    assert float(after.trial.credit) > float(choice.trial.credit)


def test_a_new_sequence_knows_what_the_pool_knows():
    choice = blank(3, np.ones(4))
    for _ in range(100):
        choice = learn_from(choice, np.full(3, 8), np.array([0, 7, 7]))
    rates = np.asarray(rates_of(choice))
    assert rates[0, 0] < 0.12 < 0.9 < rates[1, 0]
    rates = np.asarray(rates_of(jax.jit(ChosenRows.insert)(choice, 0)))
    assert rates[0, 0] == pytest.approx(2 / 3, abs=0.05)
    assert rates[1, 0] > 0.9


def test_rates_of_trees_are_chances():
    """The likeliest draft comes first, and a sequence that accepts others than it keeps its own."""
    choice = blank(2, [1.0, 1.4, 1.6], Choices((1, 2, 4), trees=True))
    # Of three drafts the second and the third follow the anchor and the first one.
    parents = np.array([[0, 0, 1]] * 2)
    first, second = [0, 2, 0], [0, 1, 3]  # Rows of the two paths.

    @jax.jit
    def step(choice, accepted, paths, committed, left):
        result = VerifyResult(accepted, paths, accepted)
        return choice.learn(block([4, 3], 3, parents=parents), result, committed, left)

    for paths in [(first, second)] * 300 + [(second, second)] * 30:
        accepted = np.array([1 if path is first else 2 for path in paths])
        choice = step(choice, accepted, np.array(paths), accepted + 1, np.full(2, FAR))
    known = survival(rates_of(choice), np.ones(2, bool), np.full(2, FAR), trees=True)
    known = np.asarray(known)
    assert (np.diff(known, axis=1) <= 0).all()
    assert known[0, 0] == pytest.approx(0.4, abs=0.1), "the last 30 cycles count most"
    assert known[1, 0] > 0.95
    assert known[1, 1] < 0.1
    np.testing.assert_array_equal(np.asarray(choice.by_sequence.tried)[1, 2:], 0)
    # At the limit the rejected drafts may have been too deep.
    ended = step(choice, accepted, np.array(paths), np.array([2, 2]), np.array([2, 2]))
    np.testing.assert_array_equal(ended.by_sequence.tried, choice.by_sequence.tried)


# --- rows that are divided among sequences -------------------------------------------------------

CONFIDENT = Choices((1, 2, 4), (2,))


@few
@given(st.integers(0, 2**31), st.sampled_from([1, 2]))
def test_rows_go_to_the_likeliest_drafts_of_each_replica(seed, replicas):
    rng = np.random.default_rng(seed)
    batch, mean_rows = 4 * replicas, int(rng.integers(1, 5))
    rates = rng.choice([0.0, 0.5, 0.9, 1.0], (batch, DRAFTS))
    active, left = rng.random(batch) < 0.7, rng.integers(1, 12, batch)
    among = Choices(SIZES, (mean_rows,), replicas)
    chances = np.asarray(survival(rates, active, left, trees=False))
    (tokens,) = expected_tokens(chances, active, among).tolist()
    chances = chances[:, : among.drafted(mean_rows) - 1]
    rows = np.asarray(divide(chances, active, mean_rows, replicas))
    wanted = 0.0
    for mine in np.split(np.arange(batch), replicas):
        room = 4 * (mean_rows - 1)
        best = np.sort(chances[mine].ravel())[::-1][:room]
        got = sum(chances[b, : max(rows[b] - 1, 0)].sum() for b in mine)
        assert got == pytest.approx(best.sum(), rel=1e-5)
        assert rows[mine].sum() == active[mine].sum() + (best > 0).sum()
        wanted += best.sum() + active[mine].sum()
    assert ((rows > 0) == active).all()
    assert tokens == pytest.approx(wanted, rel=1e-5)


def test_a_division_is_left_if_it_gains_nothing_and_tried_again_later():
    choice, chosen, batch = blank(3, [1.0, 1.8, 3.0, 1.7], CONFIDENT), [], 3
    everyone, far = np.ones(batch, bool), np.full(batch, FAR)

    @functools.partial(jax.jit, static_argnums=1)
    def step(choice, divides, rows, accepted):
        confidence = jnp.full((batch, 3), 0.5) if divides else None
        return learn(choice, block(rows, 3, confidence=confidence), accepted)

    for cycle in range(800):
        choice = choose(choice, everyone, far)
        divides = int(choice.index) == 3
        # Every second draft is accepted, whatever the confidence, and so no division gains.
        rows, accepted = (2 if int(choice.index) else 1), cycle % 2 if int(choice.index) else 0
        choice = step(choice, divides, np.full(batch, rows), np.full(batch, accepted))
        chosen.append(divides)
    assert chosen.index(True) < 50
    assert 0 < np.mean(chosen[100:]) < 0.3
    assert np.diff(np.flatnonzero(chosen)).max() > 20, "long stretches without"


def test_rates_of_cycles_divided_by_confidence_are_those_of_all_drafts():
    """Confidence is exact, so the drafts that get a row are accepted more often than others."""
    rng, batch, drafts, seen = np.random.default_rng(0), 16, 3, []
    choice = blank(batch, [1.0, 1.8, 3.0, 1.7], CONFIDENT)
    active, left = np.ones(batch, bool), np.full(batch, FAR)
    third = jnp.int32(3)
    trial = dataclasses.replace(choice.trial, best=third, other=third)
    choice = dataclasses.replace(choice, trial=trial, promise=jnp.float32(20.0))
    step = jax.jit(
        lambda choice, rows, confidence, accepted: learn(
            choice, block(rows, drafts, confidence=confidence), accepted
        )
    )
    for _ in range(200):
        confidence = rng.uniform(0.2, 1.0, (batch, drafts)).astype(np.float32)
        accepted = np.cumprod(rng.uniform(size=confidence.shape) < confidence, axis=1).sum(axis=1)
        chances = survival(confidence, active, left, trees=False)
        rows = np.asarray(divide(chances, active, 2, 1))
        accepted = np.minimum(accepted, rows - 1)
        seen.append((accepted[rows > 1] > 0).mean())
        choice = step(choice, rows, confidence, accepted)
    assert np.mean(seen) > 0.7, "of the drafts with a row more are accepted"
    rates = np.asarray(rates_of(choice))
    np.testing.assert_allclose(rates.mean(axis=0), 0.6, atol=0.06)


def test_all_sizes_up_to_the_largest_are_choices():
    alone, several = (engine(drafter("ngram"), batch_size=size).layout for size in (1, 2))

    def names(size, layout, **how):
        model = drafter("dspark", block_size=size)
        return Choices.of(model, layout, adaptive=True, **how).names

    assert names(7, alone, divides=True) == ("1", "2", "4", "7")
    assert names(7, several, divides=True) == ("1", "2", "4", "7", "~2", "~4")
    assert names(7, several, divides=False) == ("1", "2", "4", "7")
