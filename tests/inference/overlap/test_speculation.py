"""Tests of speculation: every foreseen outcome is found, and no other one."""

import jax
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.inference.overlap import drafting

VOCABULARY = 9
guess, look_up = jax.jit(drafting.guess), jax.jit(drafting.look_up)


@st.composite
def rounds(draw):
    """Distinct best tokens after the anchor and after each draft, [1, K + 1, F + 1]."""
    count, fan_out = draw(st.sampled_from([1, 4])), draw(st.sampled_from([1, 3]))
    ranked = [draw(st.permutations(range(VOCABULARY)))[: fan_out + 1] for _ in range(count + 1)]
    return np.array([ranked], np.int32)


@settings(max_examples=30)
@given(rounds())
def test_exactly_the_guessed_outcomes_are_found_each_with_its_own_drafts(ranked):
    drafts, bonus = ranked[:, :-1, 0], np.asarray(guess(ranked))
    count, fan_out = drafts.shape[1], bonus.shape[2]
    numbers = np.arange(bonus.size * count, dtype=np.int32).reshape(*bonus.shape, count)
    for accepted in range(count + 1):
        draft = drafts[0, accepted] if accepted < count else -1
        wanted = [token for token in ranked[0, accepted] if token != draft][:fan_out]
        assert bonus[0, accepted].tolist() == wanted
        for token in range(VOCABULARY):
            outcome = np.array([accepted]), np.array([token])
            found, ahead = map(np.asarray, look_up(bonus, numbers, *outcome))
            assert found[0] == (token in wanted)
            if token in wanted:
                own = numbers[0, accepted, wanted.index(token)]
                assert ahead[0].tolist() == own.tolist()


def test_a_continuation_is_the_accepted_drafts_and_the_bonus_token():
    anchor, drafts = np.array([7], np.int32), np.array([[1, 2]], np.int32)
    bonus = np.array([[[3, 4], [5, 6], [8, 0]]], np.int32)
    tokens, counts = map(np.asarray, drafting.continuations(anchor, drafts, bonus))
    outcomes = [row[: n + 1].tolist() for row, n in zip(tokens, counts, strict=True)]
    assert outcomes == [[7, 3], [7, 4], [7, 1, 5], [7, 1, 6], [7, 1, 2, 8], [7, 1, 2, 0]]
