"""Expected cycles equal those of all outcomes, enumerated."""

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.inference import rounds

GENERATORS = st.integers(0, 2**32 - 1).map(np.random.default_rng)


def enumerate_cycles(chances, count: int, begin: int = 0) -> float:
    """Sums over every outcome of every draft of every cycle of one answer."""
    if begin >= count:
        return 0.0
    total, drafts = 0.0, chances.shape[1]
    for outcome in itertools.product((True, False), repeat=drafts):
        chance = np.prod(np.where(outcome, chances[begin], 1 - chances[begin]))
        committed = 1 + next((h for h in range(drafts) if not outcome[h]), drafts)
        total += chance * (1 + enumerate_cycles(chances, count, begin + committed))
    return total


@settings(max_examples=40, deadline=None)
@given(rng=GENERATORS, drafts=st.integers(0, 3), certain=st.booleans())
def test_expected_cycles_are_those_of_all_outcomes(rng, drafts, certain):
    counts = np.array([0, 1, 2, 5, 6])
    chances = rng.random((len(counts), 6, drafts))
    chances = np.round(chances) if certain else chances
    found = rounds.expected_cycles(chances, counts)
    wanted = [enumerate_cycles(*one) for one in zip(chances, counts.tolist(), strict=True)]
    np.testing.assert_allclose(found, wanted, rtol=1e-12)


def test_certain_drafts_commit_a_block_a_cycle():
    found = rounds.expected_cycles(np.ones((3, 12, 3)), np.array([12, 9, 1]))
    np.testing.assert_array_equal(found, [3, 3, 1])


@given(rng=GENERATORS)
def test_what_follows_an_answer_does_not_count(rng):
    chances = rng.random((1, 7, 3))
    other = np.where(np.arange(7)[:, None] + 1 + np.arange(3) > 4, rng.random((7, 3)), chances[0])
    one, two = (rounds.expected_cycles(x, np.array([4])) for x in (chances, other[None]))
    np.testing.assert_array_equal(one, two)
