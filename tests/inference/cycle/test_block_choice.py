"""Tests of the choice of block sizes: as pure functions, and against simulated drafters."""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.models import make_sharding, zeros

from dflash.inference.cycle import block_choice, by_confidence, choices, divided_rows, judge
from dflash.inference.cycle.block_choice import BlockChoice
from dflash.inference.cycle.rules import Rules

SIZES = (1, 2, 4, 8)
DRAFTS = SIZES[-1] - 1
BATCH = 3
FAR = jnp.full(BATCH, 1000)
EVERYONE = jnp.ones(BATCH, bool)
few = settings(max_examples=25)


def blank(batch: int, sizes: tuple[int, ...], seconds) -> BlockChoice:
    choice = zeros(block_choice.abstract(batch, sizes, make_sharding()))
    return dataclasses.replace(choice, seconds=jnp.asarray(seconds, jnp.float32))


choose = jax.jit(functools.partial(block_choice.choose, sizes=SIZES))
learn_cycle = jax.jit(
    functools.partial(block_choice.learn, sizes=SIZES), static_argnames="division"
)


def learn(choice: BlockChoice, accepted: jax.Array, active=True, size=None) -> BlockChoice:
    """`block_choice.learn` from sequences that go on; of a cycle of `size`, or the one chosen."""
    if size is not None:
        index = jnp.int32(SIZES.index(size))
        choice = dataclasses.replace(choice, best=index, index=index)
    committed = jnp.where(active, accepted + 1, 0)
    return learn_cycle(choice, committed, jnp.full(len(accepted), 1000))


def knowing(rates: np.ndarray, seconds, credit: float = 0.0) -> BlockChoice:
    """What somebody knows who has seen these rates, [B, G], for long enough to be sure."""
    choice = blank(BATCH, SIZES, seconds)
    tried = jnp.full((BATCH, DRAFTS), 1e6, jnp.float32)
    return dataclasses.replace(
        choice, tried=tried, accepted=tried * rates, credit=jnp.float32(credit)
    )


def test_sizes_go_from_plain_decoding_to_the_largest():
    assert choices.block_sizes(1) == (1,)
    assert choices.block_sizes(7) == (1, 2, 4, 7)
    assert choices.block_sizes(16) == (1, 2, 4, 8, 12, 16)


@few
@given(st.integers(0, 2**31))
def test_the_choice_is_the_most_expected_tokens_per_second(seed):
    rng = np.random.default_rng(seed)
    rates, left = rng.random((BATCH, DRAFTS)), rng.integers(1, 12, BATCH)
    active = rng.random(BATCH) < 0.7
    seconds = np.cumsum(rng.random(len(SIZES)) + 0.01)
    choice = choose(knowing(rates, seconds), jnp.array(active), jnp.array(left))
    speeds = []
    for size, cost in zip(SIZES, seconds, strict=True):
        tokens = 0.0
        for b in np.flatnonzero(active):
            survival = np.cumprod(rates[b])[: min(size, left[b]) - 1]
            tokens += 1 + survival.sum()
        speeds.append(tokens / cost)
    assert speeds[int(choice.index)] >= (1 - 1e-4) * max(speeds)
    assert int(choice.best) == int(choice.index)


def test_drafting_that_loses_is_left():
    choice = knowing(np.full((BATCH, DRAFTS), 0.3), [1.0, 1.5, 1.9, 2.7])
    assert int(choose(choice, EVERYONE, FAR).index) == 0


def test_at_the_last_token_nothing_is_drafted():
    choice = knowing(np.ones((BATCH, DRAFTS)), [1.0, 1.1, 1.2, 1.3])
    assert int(choose(choice, EVERYONE, FAR).index) == 3
    assert int(choose(choice, EVERYONE, jnp.ones(BATCH, jnp.int32)).index) == 0


def test_a_trial_waits_until_the_time_spent_pays_for_it():
    choice = knowing(np.zeros((BATCH, DRAFTS)), [1.0, 1.5, 1.9, 2.7])
    indices, cycles = [], 360
    for _ in range(cycles):
        choice = choose(choice, EVERYONE, FAR)
        indices.append(int(choice.index))
        choice = learn(choice, jnp.zeros(BATCH, int))
    trials = np.flatnonzero(indices)
    assert set(indices) == {0, 1}, "a trial is the next larger size"
    assert 2 <= len(trials) <= 4
    lost = 0.5 * len(trials)
    assert lost <= block_choice.TRIALS / np.sqrt(BATCH) * cycles + 1e-3
    assert np.ptp(np.diff(trials)) <= 2, "trials come at even distances"


def test_plain_cycles_earn_what_learning_from_them_earns():
    learned = earned = choose(
        knowing(np.zeros((BATCH, DRAFTS)), [1.0, 1.5, 1.9, 2.7]), EVERYONE, FAR
    )
    for cycle in range(120):
        if learned.index:
            break
        learned = choose(learn(learned, jnp.zeros(BATCH, int)), EVERYONE, FAR)
        earned = block_choice.earn(earned, EVERYONE)
        assert int(earned.index) == int(learned.index), f"cycle {cycle}"
        assert float(earned.credit) == pytest.approx(float(learned.credit))
    assert learned.index == 1, "a trial came"


def test_a_trial_has_the_size_that_promises_most_and_comes_once_its_loss_is_earned():
    """The first draft is often wrong, and the others hardly ever: short blocks gain nothing."""
    rates, seconds = np.full((BATCH, DRAFTS), 0.98), [1.0, 2.6, 2.8, 3.2]
    rates[:, 0] = 0.3
    chances = np.cumprod(rates[0])
    tokens = 1 + np.array([chances[: size - 1].sum() for size in SIZES])
    loss = np.array(seconds) - tokens
    assert np.argmin(loss[1:]) == 2
    poor = choose(knowing(rates, seconds, credit=0.99 * loss[3]), EVERYONE, FAR)
    assert (int(poor.best), int(poor.trial), int(poor.index)) == (0, 3, 0)
    assert float(poor.loss) == pytest.approx(loss[3], rel=1e-3)
    assert int(choose(knowing(rates, seconds, credit=1.01 * loss[3]), EVERYONE, FAR).index) == 3


def test_an_empty_batch_keeps_its_credit():
    choice = knowing(np.full((BATCH, DRAFTS), 0.3), [1.0, 1.5, 1.9, 2.7], credit=0.25)
    assert float(choose(choice, ~EVERYONE, FAR).credit) == 0.25


def test_a_trial_that_wins_is_followed_by_another():
    choice = knowing(np.full((BATCH, DRAFTS), 0.3), [1.0, 1.5, 1.9, 2.7], credit=0.5)
    for _ in range(3):
        choice = choose(choice, EVERYONE, FAR)
        assert (int(choice.best), int(choice.index)) == (0, 1)
        choice = learn(choice, jnp.ones(BATCH, int))
    # One that loses ends it.
    choice = learn(choose(choice, EVERYONE, FAR), jnp.zeros(BATCH, int))
    assert int(choose(choice, EVERYONE, FAR).index) == 0


def test_bad_luck_puts_off_a_trial_for_no_longer_than_its_expected_loss_does():
    choice = knowing(np.full((BATCH, DRAFTS), 0.45), [1.0, 1.5, 9.0, 9.0], credit=0.5)
    choice = choose(choice, EVERYONE, FAR)
    loss = float(choice.loss)
    assert int(choice.index) == 1
    assert 0 < loss < 0.1
    after = choose(learn(choice, jnp.zeros(BATCH, int)), EVERYONE, FAR)
    assert float(after.credit) == pytest.approx(-float(after.loss))
    assert float(after.loss) == pytest.approx(loss, rel=1e-3)
    earned = float(block_choice.earn(after, EVERYONE).credit) - float(after.credit)
    for _ in range(round(2 * loss / earned) + 1):
        after = block_choice.earn(after, EVERYONE)
    assert int(after.index) == 1


def test_what_was_not_tried_is_not_counted():
    choice = blank(BATCH, SIZES, np.ones(4))
    accepted = jnp.array([0, 2, 3])
    after = learn(choice, accepted, jnp.array([True, True, False]), size=4)
    np.testing.assert_array_equal(after.tried[:, :4], [[1, 0, 0, 0], [1, 1, 1, 0], [0, 0, 0, 0]])
    np.testing.assert_array_equal(after.accepted[:, :3], [[0, 0, 0], [1, 1, 0], [0, 0, 0]])
    assert not after.tried[:, 3:].any()
    np.testing.assert_array_equal(after.pool_tried[:4], [2, 1, 1, 0])
    np.testing.assert_array_equal(after.pool_accepted[:4], [1, 1, 0, 0])
    whole = learn(choice, jnp.full(BATCH, 3), size=4)
    np.testing.assert_array_equal(whole.accepted[0], [1, 1, 1, 0, 0, 0, 0])


def test_an_end_is_a_refusal_and_a_limit_is_not():
    choice = dataclasses.replace(
        blank(BATCH, SIZES, np.ones(4)), best=jnp.int32(3), index=jnp.int32(3)
    )
    # Of seven drafts two tokens came: the first sequence ended there, the second reached its limit.
    # The third brought all.
    left = jnp.array([1000, 2, 1000])
    after = learn_cycle(choice, jnp.array([2, 2, 8]), left)
    np.testing.assert_array_equal(after.tried.sum(axis=1), [2, 1, 7])
    np.testing.assert_array_equal(after.accepted.sum(axis=1), [1, 1, 7])


def test_a_new_sequence_knows_what_the_pool_knows():
    choice = blank(BATCH, SIZES, np.ones(4))
    for _ in range(100):
        choice = learn(choice, jnp.array([0, 7, 7]), size=8)
    rates = np.asarray(block_choice.rates(choice))
    assert rates[0, 0] < 0.12 < 0.9 < rates[1, 0]
    rates = np.asarray(block_choice.rates(block_choice.forget(choice, jnp.int32(0))))
    assert rates[0, 0] == pytest.approx(2 / 3, abs=0.05)
    assert rates[1, 0] > 0.9


def new_sequences(choice: BlockChoice) -> BlockChoice:
    for slot in range(BATCH):
        choice = block_choice.forget(choice, jnp.int32(slot))
    return choice


@pytest.mark.parametrize(("before", "now"), [(0, 7), (7, 0)])
def test_the_first_trials_of_a_run_outweigh_earlier_runs(before, now):
    choice = blank(BATCH, SIZES, [1.0, 2.0, 3.0, 4.0])
    for _ in range(100):
        choice = learn(choice, jnp.full(BATCH, before), size=8)
    kept = new_sequences(choice)
    choice = block_choice.carried(kept)
    assert int(choose(choice, EVERYONE, FAR).best) == (3 if before else 0)
    for _ in range(4):
        kept, choice = (learn(one, jnp.full(BATCH, now), size=8) for one in (kept, choice))
    assert int(choose(kept, EVERYONE, FAR).best) == (3 if before else 0)
    assert int(choose(choice, EVERYONE, FAR).best) == (3 if now else 0)


def test_a_run_keeps_the_rates_of_earlier_runs():
    choice = blank(BATCH, SIZES, np.ones(4))
    for _ in range(4):
        choice = learn(choice, jnp.full(BATCH, 2), size=8)
    assert choice.pool_tried.max() < block_choice.CARRIED
    few = block_choice.carried(choice)
    np.testing.assert_array_equal(few.pool_tried, choice.pool_tried)
    np.testing.assert_array_equal(few.pool_accepted, choice.pool_accepted)
    for _ in range(40):
        choice = learn(choice, jnp.full(BATCH, 2), size=8)
    many = block_choice.carried(choice)
    np.testing.assert_allclose(many.pool_tried.max(), block_choice.CARRIED, rtol=1e-6)
    ratios = (one.pool_accepted[:3] / one.pool_tried[:3] for one in (many, choice))
    np.testing.assert_allclose(*ratios, rtol=1e-6)


def test_a_draft_never_tried_is_thought_as_good_as_those_before_it():
    choice = blank(BATCH, SIZES, np.ones(4))
    assert np.asarray(block_choice.rates(choice)) == pytest.approx(block_choice.PRIOR)
    for accepted in [3, 0] * 100:
        choice = learn(choice, jnp.full(BATCH, accepted), size=4)
    fresh = np.asarray(block_choice.rates(block_choice.forget(choice, jnp.int32(0))))[0]
    assert fresh[0] == pytest.approx(0.5, abs=0.1)
    assert fresh[1] > 0.9
    # Three drafts of the four that were tried in two cycles were accepted.
    assert fresh[3:] == pytest.approx(0.75, abs=0.05)


def test_what_is_rarely_tried_is_forgotten_as_fast_as_the_rest():
    choice = blank(BATCH, SIZES, np.ones(4))
    for _ in range(100):
        choice = learn(choice, jnp.full(BATCH, 7), size=8)
    deep = float(choice.pool_tried[-1])
    for _ in range(100):
        choice = learn(choice, jnp.zeros(BATCH, int), size=4)
    assert choice.pool_tried[-1] < 0.02 * deep
    plain = learn(choice, jnp.zeros(BATCH, int), size=1)
    np.testing.assert_array_equal(plain.pool_tried, choice.pool_tried)


# --- rows that are divided among sequences -------------------------------------------------------


@few
@given(st.integers(0, 2**31), st.sampled_from([1, 2]))
def test_rows_go_to_the_likeliest_drafts_of_each_replica(seed, replicas):
    rng = np.random.default_rng(seed)
    batch, mean_rows = 4 * replicas, int(rng.integers(1, 5))
    rates = rng.choice([0.0, 0.5, 0.9, 1.0], (batch, DRAFTS))
    active, left = rng.random(batch) < 0.7, rng.integers(1, 12, batch)
    chances = block_choice.survival(jnp.array(rates), jnp.array(active), jnp.array(left))
    division = choices.Division((mean_rows,), replicas)
    tokens = divided_rows.expected_tokens(chances, jnp.array(active), SIZES, division)[0]
    chances = chances[:, : division.drafted(SIZES, mean_rows) - 1]
    rows = divided_rows.divide(chances, jnp.array(active), mean_rows, replicas)
    chances = np.asarray(chances)
    wanted = 0.0
    for mine in np.split(np.arange(batch), replicas):
        room = 4 * (mean_rows - 1)
        best = np.sort(chances[mine].ravel())[::-1][:room]
        got = sum(chances[b, : max(rows[b] - 1, 0)].sum() for b in mine)
        assert got == pytest.approx(best.sum(), rel=1e-5)
        assert rows[mine].sum() == active[mine].sum() + (best > 0).sum()
        wanted += best.sum() + active[mine].sum()
    assert (np.asarray(rows > 0) == active).all()
    assert float(tokens) == pytest.approx(wanted, rel=1e-5)


def test_a_division_is_chosen_where_sequences_differ():
    division = choices.Division((2, 4))
    rates = np.zeros((BATCH, DRAFTS))
    rates[0] = 0.95
    choice = knowing(rates, [1.0, 1.5, 1.9, 2.7, 1.5, 3.0])
    choice = block_choice.choose(choice, EVERYONE, FAR, SIZES, division)
    assert int(choice.index) == len(SIZES), "one sequence drafts, and two decode plainly"
    rows = divided_rows.divide(
        block_choice.survival(block_choice.rates(choice), EVERYONE, FAR), EVERYONE, 2, 1
    )
    assert rows.tolist() == [4, 1, 1]
    alike = knowing(np.full((BATCH, DRAFTS), 0.95), [1.0, 1.5, 1.9, 2.7, 1.5, 3.0])
    assert int(block_choice.choose(alike, EVERYONE, FAR, SIZES, division).index) == 3


def test_confidence_divides_rows_unless_a_rule_forbids_it():
    """Confidence depends on the drawn tokens, and a rejection rule would then be biased."""
    rates = np.zeros((BATCH, DRAFTS))
    rates[0] = 0.95
    state = types.SimpleNamespace(
        active=EVERYONE, length=jnp.ones(BATCH, jnp.int32), limit=FAR,
        adaptive=types.SimpleNamespace(choice=knowing(rates, np.ones(5))),
    )  # fmt: skip
    layout = types.SimpleNamespace(slots_per_replica=BATCH, num_replicas=1)

    def rules(verify="coupled", *, lookup=False, confident=True):
        drafter = types.SimpleNamespace(
            block_size=SIZES[-1], num_draft_tokens=DRAFTS, longest_context=None,
            has_confidence=confident, drafts_trees=False,
        )  # fmt: skip
        config = types.SimpleNamespace(verify=verify, lookup=lookup)
        return Rules.of(drafter, config, layout, adaptive_blocks=True)

    assert rules().division.by_confidence
    assert not rules("rejection").division.by_confidence
    assert not rules("block").division.by_confidence
    assert not rules(lookup=True).division.by_confidence, "copies have none"
    assert not rules(confident=False).division.by_confidence
    divide = functools.partial(judge.divide, state, DRAFTS, 2, rules())
    assert divide(jnp.array(rates[::-1])).counts.tolist() == [1, 1, 4]
    assert divide().counts.tolist() == [4, 1, 1]


def test_a_division_drafts_four_times_its_rows_or_the_largest_block():
    sizes = choices.block_sizes(16)
    whole = choices.division(16, 4, 1)
    assert [whole.drafted(sizes, mean) for mean in (1, 2, 4, 8)] == [4, 8, 16, 16]
    assert whole.drafted((1, 2, 3), 2) == 3
    confident = choices.division(16, 4, 1, by_confidence=True)
    assert [confident.drafted(sizes, mean) for mean in (1, 2, 4, 8)] == [2, 4, 8, 16]
    tree = choices.division(16, 4, 1, by_confidence=True, trees=True)
    assert [tree.drafted(sizes, mean) for mean in (1, 2, 4, 8)] == [4, 8, 16, 16]


def test_rates_of_trees_are_chances():
    """The likeliest draft comes first, and a sequence that accepts others than it keeps its own."""
    choice = dataclasses.replace(
        blank(2, (1, 2, 4), [1.0, 1.4, 1.6]), trees=True, index=jnp.int32(2)
    )
    # Of three drafts the second and the third follow the anchor and the first one.
    first, second = [False, True, False], [True, False, True]
    for paths in [(first, second)] * 300 + [(second, second)] * 30:
        on_path = jnp.array(paths)
        committed = 1 + on_path.sum(axis=1)
        choice = block_choice.learn(
            choice, committed, FAR[:2], (1, 2, 4), rows=jnp.array([4, 3]), on_path=on_path
        )
    known = block_choice.survival(block_choice.rates(choice), EVERYONE[:2], FAR[:2], trees=True)
    assert (np.diff(known, axis=1) <= 0).all()
    assert known[0, 0] == pytest.approx(0.4, abs=0.1), "the last 30 cycles count most"
    assert known[1, 0] > 0.95
    assert known[1, 1] < 0.1
    np.testing.assert_array_equal(choice.tried[1, 2:], 0)
    # At the limit the rejected drafts may have been too deep.
    ended = block_choice.learn(
        choice, jnp.array([2, 2]), jnp.array([2, 2]), (1, 2, 4), on_path=jnp.array([first, first])
    )
    np.testing.assert_array_equal(ended.tried, choice.tried)


def test_trials_go_from_division_to_division_and_to_the_largest_block():
    division = choices.Division((2, 4))
    larger = [np.flatnonzero(row).tolist() for row in block_choice._larger(SIZES, division)]
    assert larger == [[1, 2, 3], [2, 3], [3], [], [5], [3]]


def test_sequences_that_decode_plainly_beside_others_are_tried_again():
    division = choices.Division((2,))
    choice = knowing(np.zeros((BATCH, DRAFTS)), [1.0, 1.5, 1.9, 2.7, 1.5])
    choice = dataclasses.replace(
        choice, tried=jnp.minimum(choice.tried, 64), pool_tried=jnp.full(DRAFTS, 64.0),
        pool_accepted=jnp.full(DRAFTS, 48.0), index=jnp.int32(4), best=jnp.int32(4),
        promise=jnp.float32(1.0),
    )  # fmt: skip
    rows, committed = jnp.array([4, 1, 0]), jnp.array([1, 1, 0])
    for _ in range(64):
        choice = learn_cycle(choice, committed, FAR, division=division, rows=rows)
    first = np.asarray(block_choice.rates(choice))[:, 0]
    assert first[0] < 0.1
    assert first[1] > 0.2, "of which nothing has been heard for long"
    assert first[2] < 0.1, "nobody sits there"


# --- against simulated drafters ------------------------------------------------------------------

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
    sizes, batch = jnp.array(SIZES), len(choice.tried)

    def cycle(carry):
        choice, done, queue, own, key, seconds, tokens = carry
        left = NUM_TOKENS - done
        active = left > 0
        choice = block_choice.choose(choice, active, left, SIZES)
        drafts = sizes[choice.index] - 1
        key, noise = jax.random.split(key)
        right = jax.random.uniform(noise, own.shape) < own
        accepted = jnp.minimum(jnp.cumprod(right, axis=1).sum(axis=1), drafts)
        seconds += costs[choice.index]
        choice = learn(choice, accepted, active)
        committed = jnp.where(active, jnp.minimum(accepted + 1, left), 0)
        done += committed
        ended = active & (done >= NUM_TOKENS)
        place = queue + jnp.cumsum(ended) - 1
        fresh = ended & (place < len(rates))
        choice = dataclasses.replace(
            choice,
            tried=jnp.where(fresh[:, None], 0, choice.tried),
            accepted=jnp.where(fresh[:, None], 0, choice.accepted),
        )
        own = jnp.where(fresh[:, None], rates[place], own)
        done = jnp.where(fresh, 0, done)
        return choice, done, queue + ended.sum(), own, key, seconds, tokens + committed.sum()

    nothing = jnp.zeros(batch, jnp.int32)
    start = choice, nothing, jnp.int32(batch), rates[:batch], key
    carry = (*start, jnp.float32(0), jnp.int32(0))
    carry = jax.lax.while_loop(lambda carry: (carry[1] < NUM_TOKENS).any(), cycle, carry)
    return carry[-1], carry[-2]


def forced(index: int) -> np.ndarray:
    table = np.full(len(SIZES), np.inf, np.float32)
    table[index] = 1.0
    return table


@pytest.mark.parametrize("batch", [1, 4, 16])
def test_regret_against_the_best_fixed_size(batch):
    """Whatever cycles cost and drafts are worth: at most 3 % slower than the best fixed size."""
    rng, keys = np.random.default_rng(0), jax.random.split(jax.random.key(batch), RUNS)
    # With few sequences per slot the time is that of the last ones, which is luck.
    num_sequences = max(12, 6 * batch)

    def speed(table, costs, rates):
        costs = jnp.array(costs, jnp.float32)
        return float(simulate(blank(batch, SIZES, table), costs, rates, keys))

    found = {}
    for name, (mean, spread) in DRAFTERS.items():
        shift = rng.uniform(-spread, spread, (RUNS, num_sequences, 1))
        rates = jnp.array(np.clip(mean + shift, 0, 1), jnp.float32)
        # What a fixed size commits per cycle does not depend on what a cycle costs.
        fixed = [speed(forced(i), [1.0] * len(SIZES), rates) for i in range(len(SIZES))]
        for cost, table in TABLES.items():
            best = max(rate / each for rate, each in zip(fixed, table, strict=True))
            found[name, cost] = speed(table, table, rates) / best
    assert min(found.values()) > 0.97, found


CONFIDENT = choices.Division((2,), by_confidence=True, share=2)


def confident_choice(seconds, batch=BATCH):
    choice = zeros(block_choice.abstract(batch, (1, 2, 4), make_sharding(), CONFIDENT))
    return dataclasses.replace(choice, seconds=jnp.array(seconds))


def test_a_division_by_confidence_is_left_if_it_gains_nothing_and_tried_again_later():
    choice = confident_choice([1.0, 1.8, 3.0, 1.7])
    left, rows, chosen = FAR, jnp.full(BATCH, 2), []
    for cycle in range(800):
        choice = block_choice.choose(choice, EVERYONE, left, (1, 2, 4), CONFIDENT)
        divides = int(choice.index) == 3
        # Every second draft is accepted, whatever the confidence, and so no division gains.
        committed = jnp.full(BATCH, 1 + cycle % 2 if int(choice.index) else 1)
        how = (rows, None, jnp.full((BATCH, 3), 0.5)) if divides else ()
        choice = block_choice.learn(choice, committed, left, (1, 2, 4), CONFIDENT, *how)
        chosen.append(divides)
    first = chosen.index(True)
    tries = np.flatnonzero(chosen)
    assert first < 50
    assert 0 < np.mean(chosen[100:]) < 0.3
    assert np.diff(tries).max() > 20, "long stretches without"


def test_rates_of_cycles_divided_by_confidence_are_those_of_all_drafts():
    """Confidence is exact, so the drafts that get a row are accepted more often than others."""
    rng, batch, drafts, seen = np.random.default_rng(0), 16, 3, []
    choice = confident_choice([1.0, 1.8, 3.0, 1.7], batch)
    active, left = jnp.ones(batch, bool), jnp.full(batch, 1000)
    choice = dataclasses.replace(choice, index=jnp.int32(3), best=jnp.int32(3), promise=20.0)
    learn = jax.jit(lambda choice, *how: block_choice.learn(
        choice, how[0], left, (1, 2, 4), CONFIDENT, how[1], None, how[2]
    ))  # fmt: skip
    for _ in range(200):
        confidence = rng.uniform(0.2, 1.0, (batch, drafts)).astype(np.float32)
        accepted = np.cumprod(rng.uniform(size=confidence.shape) < confidence, axis=1).sum(axis=1)
        chances = block_choice.survival(jnp.array(confidence), active, left)
        rows = divided_rows.divide(chances, active, 2, 1)
        committed = np.minimum(1 + accepted, rows)
        seen.append((committed[rows > 1] > 1).mean())
        choice = learn(choice, committed, rows, confidence)
    assert np.mean(seen) > 0.7, "of the drafts with a row more are accepted"
    np.testing.assert_allclose(block_choice.rates(choice).mean(axis=0), 0.6, atol=0.06)


def test_confidence_in_trees_counts_for_each_draft_alone():
    confidence = jnp.array([[0.9, 0.5, 0.2]])
    counted = jnp.array([[False, True, True, True]])
    likely, weight = by_confidence.without_row(confidence, counted, trees=True)
    assert weight.tolist() == [[0, 1, 1, 0]]
    _, weight = by_confidence.without_row(confidence, counted, trees=False)
    np.testing.assert_allclose(weight, [[0, 1, 0.5, 0]])
    np.testing.assert_allclose(likely, [[0.9, 0.5, 0.2, 0]])
