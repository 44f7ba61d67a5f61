"""Tests of beam trees: against the published formulas over lists of paths, written without them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.drafters.parts import beam_tree
from dflash.drafters.parts.sampler import Candidates

TOKENS = 7


def make_scores(depth: int, seed: int, *, ties: bool) -> np.ndarray:
    """Log-probabilities of tokens after each position and token: [D, V, V]."""
    rng = np.random.default_rng(seed)
    if ties:
        return -rng.integers(0, 3, (depth, TOKENS, TOKENS)).astype(np.float32)
    logits = rng.normal(size=(depth, TOKENS, TOKENS)) * 2
    return scipy.special.log_softmax(logits, axis=-1).astype(np.float32)


def extended(scores, paths):
    """Returns all paths that are one token longer, with their scores, by parent, then by rank."""
    found = []
    for path, total in paths:
        of = scores[len(path), path[-1] if path else 0]
        found += [((*path, int(b)), total + of[b]) for b in np.argsort(-of, kind="stable")]
    return found


def best(paths, count):
    return sorted(paths, key=lambda path: -path[1])[:count]


def published_tree(scores, width, budget):
    """UBTree, appendix A: the `budget` best of the `width` best paths of every length."""
    frontier, kept = [((), np.float32(0))], []
    for _ in scores:
        frontier = best(extended(scores, frontier), width)
        kept += frontier
    return best(kept, budget)


def eagle_tree(scores, width, budget):
    """EAGLE-2: `width` children of the `width` best paths, and the best of all children."""
    frontier, created = [((), np.float32(0))], []
    for _ in scores:
        children = [child for path in frontier for child in best(extended(scores, [path]), width)]
        created += children
        frontier = best(children, width)
    return best(created, budget)


@functools.partial(jax.jit, static_argnames=("width", "budget", "with_leaves"))
def grow(scores, *, width, budget, with_leaves):
    """Grows trees over scores [B, D, V, V]."""
    batch = jnp.arange(scores.shape[0])[:, None]

    def likeliest(of):
        values, tokens = jax.lax.top_k(of, width)
        return Candidates(tokens, values, None)

    def extend(carried, beam, level):
        return likeliest(scores[batch, level, beam.tokens]), carried

    form = {"budget": budget, "depth": scores.shape[1], "with_leaves": with_leaves}
    return beam_tree.grow(likeliest(scores[:, :1, 0]), (), extend, **form)


def paths_of(proposal, b):
    found = []
    for token, parent in zip(
        proposal.tokens[b].tolist(), proposal.parents[b].tolist(), strict=True
    ):
        found.append((*(found[parent - 1] if parent else ()), token))
    return found


def check(scores, width, budget, with_leaves):
    formula = eagle_tree if with_leaves else published_tree
    proposal = grow(scores, width=width, budget=budget, with_leaves=with_leaves)
    assert (np.asarray(proposal.parents) <= np.arange(budget)).all(), "parents before children"
    for b, of in enumerate(scores):
        paths, totals = zip(*formula(of, width, budget), strict=True)
        assert paths_of(proposal, b) == list(paths)
        assert {path[:-1] for path in paths} <= {(), *paths}, "prefix-closed"
        np.testing.assert_allclose(proposal.confidence[b], np.exp(totals), rtol=1e-5)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(
    ("with_leaves", "width", "budget", "depth"),
    [
        (False, 3, 7, 4),
        (False, 3, 12, 4),  # all that are kept
        (False, TOKENS, 20, 4),
        (False, 1, 5, 5),
        (False, TOKENS, 4, 1),
        (True, 3, 12, 4),
        (True, 3, 30, 4),  # all of them
        (True, 1, 5, 5),
    ],
)
def test_trees_are_those_of_the_published_formulas(with_leaves, width, budget, depth, ties):
    scores = np.stack([make_scores(depth, seed, ties=ties) for seed in range(5)])
    check(scores, width, budget, with_leaves)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**31), st.booleans(), st.booleans())
def test_trees_of_random_scores_are_those_of_the_published_formulas(seed, ties, with_leaves):
    scores = np.stack([make_scores(5, seed + i, ties=ties) for i in range(8)])
    check(scores, 3, 11, with_leaves)


def test_drafts_are_certain_where_probabilities_are_wanted():
    first = Candidates(
        jnp.array([[[4, 1]]]), jnp.array([[[-0.1, -2.0]]]), jnp.full((1, 1, TOKENS), 1 / TOKENS)
    )
    proposal = beam_tree.grow(first, (), None, budget=2, depth=1)
    np.testing.assert_array_equal(proposal.probs, jax.nn.one_hot(proposal.tokens, TOKENS))
