"""Masks of allowed tokens and bad sequences, for every row of a proposal."""

import numpy as np

from dflash.text.token_rules import TokenRules

END = 40


def masks(rules, output=(), drafts=(), parents=None, *, first_end=0, ends=(END,)):
    """Returns the tokens below 42 that each row allows."""
    matcher = rules.matcher(None)
    matcher.advance(output)
    words = np.full((1 + len(drafts), 2), -1, np.int32)
    matcher.fill(words, drafts, parents, ends=ends, first_end=first_end)
    bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")[:, :42]
    return [set(np.flatnonzero(row).tolist()) for row in bits]


ALL = set(range(42))


def test_allowed_tokens():
    assert masks(TokenRules((3, 35))) == [{3, 35}]
    assert masks(TokenRules((3, END)), drafts=(3, 3)) == [{3, END}] * 3
    assert masks(TokenRules((3, END)), drafts=(3,), first_end=1) == [{3}, {3, END}]


def test_bad_sequences_end_with_a_token_that_is_not_allowed():
    rules = TokenRules(bad=((7,), (1, 2), (1, 1, 3)))
    assert masks(rules) == [ALL - {7}]
    assert masks(rules, (1,)) == [ALL - {7, 2}]
    assert masks(rules, (1, 1)) == [ALL - {7, 2, 3}]
    assert masks(rules, (2, 1), (1, 5)) == [ALL - {7, 2}, ALL - {7, 2, 3}, ALL - {7}]


def test_rows_of_a_tree_follow_their_own_path():
    rules = TokenRules(bad=((1, 2), (4, 2, 3)))
    rows = masks(rules, (4,), (1, 2, 5), (0, 0, 2))
    assert rows == [ALL, ALL - {2}, ALL - {3}, ALL]


def test_an_output_ends_as_an_error_where_no_token_is_left():
    rules = TokenRules((1, 2), ((1,), (2,)))
    assert masks(rules) == [{END}]
    matcher = rules.matcher(None)
    matcher.fill(np.full((1, 2), -1, np.int32), ends=(END,))
    assert not matcher.may_end
