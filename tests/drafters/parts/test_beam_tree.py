"""Tests of beam trees: against the same search over lists, one node at a time."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

from dflash import errors
from dflash.drafters.eagle3_config import BeamTree
from dflash.drafters.parts import beam_tree
from dflash.drafters.parts.sampler import Candidates

VOCAB = 7


def make_scores(depth: int, seed: int, *, ties: bool) -> np.ndarray:
    """Scores after each prefix, which its last token and its length stand for: [D, V, V]."""
    rng = np.random.default_rng(seed)
    if ties:
        return -rng.integers(0, 3, (depth, VOCAB, VOCAB)).astype(np.float32)
    logits = rng.normal(size=(depth, VOCAB, VOCAB)) * 2
    return scipy.special.log_softmax(logits, axis=-1).astype(np.float32)


def plain_tree(scores: np.ndarray, options: BeamTree) -> list[tuple[int, ...]]:
    """Returns the paths of the drafts, best first, and of equal ones the first that was created."""

    def children(path, total):
        of = scores[len(path), path[-1] if path else 0]
        order = np.argsort(-of, kind="stable")[: options.top_k]
        return [((*path, int(token)), np.float32(total + of[token])) for token in order]

    level = created = children((), np.float32(0))
    for _ in range(options.depth - 1):
        best = sorted(level, key=lambda node: -node[1])[: options.top_k]
        level = [child for node in best for child in children(*node)]
        created = created + level
    order = sorted(range(len(created)), key=lambda i: -created[i][1])[: options.budget]
    return [created[i][0] for i in order]


@functools.partial(jax.jit, static_argnums=1)
def grow(scores, options):
    """Grows a tree over scores [B, D, V, V]; the carry holds what each row saw on its way."""
    batch = jnp.arange(scores.shape[0])[:, None]

    def best(of):
        values, tokens = jax.lax.top_k(of, options.top_k)
        return Candidates(tokens, values, None)

    def extend(carried, beam, level):
        before = jnp.take_along_axis(carried, beam.parents, axis=1)
        carried = before * VOCAB + beam.tokens + 1
        return best(scores[batch, level, beam.tokens]), carried

    first = best(scores[:, :1, 0])
    start = jnp.zeros((scores.shape[0], options.top_k), jnp.int32)
    return beam_tree.grow(first, start, extend, options)


def paths(proposal, b):
    found = []
    for token, parent in zip(
        proposal.tokens[b].tolist(), proposal.parents[b].tolist(), strict=True
    ):
        found.append((*(found[parent - 1] if parent else ()), token))
    return found


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        BeamTree(budget=12, top_k=3, depth=4),
        BeamTree(budget=30, top_k=3, depth=4),  # all of them
        BeamTree(budget=5, top_k=1, depth=5),
        BeamTree(budget=4, top_k=VOCAB, depth=1),
    ],
    ids=str,
)
def test_the_tree_is_that_of_a_plain_search(options, ties):
    scores = np.stack([make_scores(options.depth, seed, ties=ties) for seed in range(5)])
    proposal = grow(scores, options)
    for b in range(5):
        assert paths(proposal, b) == plain_tree(scores[b], options)


def test_drafts_are_certain_where_probabilities_are_wanted():
    first = Candidates(
        jnp.array([[[4, 1]]]), jnp.array([[[-0.1, -2.0]]]), jnp.full((1, 1, VOCAB), 1 / VOCAB)
    )
    proposal = beam_tree.grow(first, (), None, BeamTree(budget=2, top_k=2, depth=1))
    np.testing.assert_array_equal(proposal.probs, jax.nn.one_hot(proposal.tokens, VOCAB))


def test_trees_that_cannot_be_grown():
    beam_tree.check(BeamTree(budget=30, top_k=3, depth=4), 3)
    with pytest.raises(errors.ConfigError, match=r"tree\.budget: 31 .* capacity of 30 drafts"):
        beam_tree.check(BeamTree(budget=31, top_k=3, depth=4), 3)
    with pytest.raises(
        errors.ConfigError, match=r"tree\.top_k: 3 exceeds the draft vocabulary of 2 tokens"
    ):
        beam_tree.check(BeamTree(budget=1, top_k=3, depth=4), 2)
