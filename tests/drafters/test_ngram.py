"""Prompt lookup against plain loops over the text, alone and through the engine."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.models import drafter

from dflash.drafters.ngram import find_last

LONGEST = 3
find = jax.jit(find_last, static_argnums=2)


def lookup(text, count, longest=LONGEST):
    """Returns the expected draft after all of `text`, found by loops."""
    end = len(text) - 1
    source = end - 1
    for length in range(min(longest, end), 0, -1):
        ends = range(length - 1, end)
        matches = [i for i in ends if text[i - length + 1 : i + 1] == text[end - length + 1 :]]
        if matches:
            source = matches[-1]
            break
    return [text[source + 1 + i % (end - source)] for i in range(count)]


@settings(max_examples=60)
@given(
    texts=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=14), min_size=3, max_size=3),
    longest=st.integers(1, 4),
)
def test_what_followed_the_longest_match_is_found(texts, longest):
    rows = np.full((3, 16), 2, np.int32)  # tokens past the end must not matter
    for row, text in zip(rows, texts, strict=True):
        row[: len(text)] = text
    end = np.array([len(text) - 1 for text in texts], np.int32)
    found = find(rows, end, longest)
    for text, source in zip(texts, np.asarray(found).tolist(), strict=True):
        last = len(text) - 1
        drafts = [text[source + 1 + i % (last - source)] for i in range(6)]
        assert drafts == lookup(text, 6, longest)


def test_a_match_does_not_wrap_around_the_start():
    """The second-last token would be found before the first one, where the row ends with it."""
    row = np.full((1, 16), 2, np.int32)
    row[0, :5] = [1, 0, 1, 2, 1]
    assert find(row, np.array([4]), LONGEST).tolist() == [2]


@pytest.mark.parametrize(
    ("text", "drafts"),
    [
        ([7, 8, 9, 1, 2, 3, 5, 5, 1, 2, 3], [5, 5, 1, 2]),  # three tokens match
        ([1, 2, 3, 9, 2, 3, 8, 1, 2, 3], [9, 2, 3, 8]),  # the longest match, not the last one
        ([3, 4, 3, 5, 3], [5, 3, 5, 3]),  # of several as long the last one, repeated
        ([1, 2, 3], [3, 3, 3, 3]),  # nothing matches
        ([6], [6, 6, 6, 6]),
    ],
)
def test_examples(text, drafts):
    model = drafter("ngram", block_size=5)
    state = jnp.zeros((1, 16), jnp.int32)
    tokens = jnp.asarray([text + [0] * (12 - len(text))])
    count = jnp.asarray([len(text) - 1])
    state = model.observe(state, jnp.zeros(1, jnp.int32), tokens, count, None, None)
    proposal, _ = model.draft(state, tokens[:, len(text) - 1], count, None, None)
    assert proposal.tokens.tolist() == [drafts]
    assert lookup(text, 4) == drafts
