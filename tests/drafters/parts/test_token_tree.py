"""Tests of trees from marginals: exactly the best prefixes, against a heap in plain Python."""

import functools
import heapq
import itertools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.models import greedy

from dflash import errors
from dflash.drafters.parts import token_tree

few = settings(max_examples=40)
# Draft positions, vocabulary, budget: deep and broad trees, budgets under and over both.
SHAPES = [(4, 5, 16), (1, 7, 7), (3, 2, 14), (5, 3, 1), (2, 40, 64), (15, 9, 32), (6, 2, 4)]
shapes = st.sampled_from(SHAPES)
seeds = st.integers(0, 2**31 - 1)
best_first = jax.jit(token_tree.best_first, static_argnums=1)


def draw_scores(seed: int, depths: int, vocab: int) -> np.ndarray:
    """Returns sorted scores [B, D, V]: smooth, with many ties, or with excluded tokens."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(depths, vocab)) * rng.choice([0.3, 1.0, 4.0], size=(depths, 1))
    smooth = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    ties = -rng.integers(0, 3, (depths, vocab))
    holes = np.where(rng.random((depths, vocab)) < 0.6, -np.inf, smooth)
    return -np.sort(-np.stack([smooth, ties, holes]), axis=-1).astype(np.float32)


def heap_sums(scores: np.ndarray, budget: int) -> list[float]:
    """Returns the best sums in descending order, by best-first search over prefixes."""
    depths, vocab = scores.shape
    heap = [(-(np.float32(0) + scores[0, 0]), (0,))]
    found = []
    while heap and len(found) < budget:
        cost, prefix = heapq.heappop(heap)
        found.append(-cost)
        before = functools.reduce(
            lambda total, at: total + scores[at], enumerate(prefix[:-1]), np.float32(0)
        )
        if prefix[-1] + 1 < vocab:  # the next sibling
            sibling = before + scores[len(prefix) - 1, prefix[-1] + 1]
            heapq.heappush(heap, (-sibling, (*prefix[:-1], prefix[-1] + 1)))
        if len(prefix) < depths:  # the first child
            child = -cost + scores[len(prefix), 0]
            heapq.heappush(heap, (-child, (*prefix, 0)))
    return found


def prefixes(nodes: token_tree.Nodes, b: int) -> list[tuple[int, ...]]:
    """Returns the ranks along the path to each node."""
    found: list[tuple[int, ...]] = []
    parts = (np.asarray(part[b]) for part in (nodes.depth, nodes.rank, nodes.parents))
    for depth, rank, parent in zip(*parts, strict=True):
        before = found[parent - 1] if parent else ()
        assert depth == len(before), "a child continues the draft position of its parent"
        found.append((*before, int(rank)))
    return found


@few
@given(shapes, seeds)
def test_the_best_prefixes_exactly(shape, seed):
    depths, vocab, budget = shape
    scores = draw_scores(seed, depths, vocab)
    nodes = best_first(scores[..., :budget], budget)
    for b, own in enumerate(scores):
        found = prefixes(nodes, b)
        assert len(set(found)) == budget
        sums = [
            functools.reduce(lambda total, at: total + own[at], enumerate(prefix), np.float32(0))
            for prefix in found
        ]
        assert sums == heap_sums(own, budget)
        for row, prefix in enumerate(found):
            assert prefix[:-1] in {(), *found[:row]}, "a parent stands before its children"
            elders = {(*prefix[:-1], rank) for rank in range(prefix[-1])}
            assert elders <= set(found[:row]), "elder siblings stand before younger ones"


def test_the_search_itself_against_all_prefixes():
    """The heap is right too: against every prefix there is."""
    for seed in range(20):
        for scores in draw_scores(seed, 3, 4):
            everything = [
                functools.reduce(lambda total, at: total + scores[at], enumerate(prefix), 0)
                for length in (1, 2, 3)
                for prefix in itertools.product(range(4), repeat=length)
            ]
            np.testing.assert_allclose(
                heap_sums(scores, 84), sorted(everything, reverse=True), rtol=1e-5
            )


def test_a_confident_drafter_gets_a_chain_and_an_uncertain_one_a_broad_tree():
    shares = np.array([[0.9, 0.06, 0.04], [0.4, 0.35, 0.25]], np.float32)
    sure, unsure = np.tile(np.log(shares)[:, None, None], (1, 1, 4, 1))
    assert best_first(sure, 4).depth.tolist() == [[0, 1, 2, 3]]
    bush = best_first(unsure, 4)
    assert prefixes(bush, 0) == [(0,), (1,), (2,), (0, 0)]


def test_tokens_of_a_proposal():
    logits = np.log(np.array([[[0.1, 0.7, 0.2], [0.05, 0.15, 0.8]]], np.float32))
    propose = jax.jit(lambda *rows: token_tree.propose(*rows, greedy(1), 4))
    proposal = propose(logits, np.arange(2)[None])
    # 0.7: 1; 0.56: 1 2; 0.2: 2; 0.16: 2 2
    assert proposal.tokens.tolist() == [[1, 2, 2, 2]]
    assert proposal.parents.tolist() == [[0, 1, 0, 3]]
    assert proposal.probs is None


@pytest.mark.parametrize(
    ("depths", "vocab", "capacity"),
    [(1, 24, "24 drafts at 1 draft position of"), (3, 4, "84 drafts at 3")],
)
def test_a_budget_larger_than_the_capacity_of_the_block(depths, vocab, capacity):
    whole = sum(vocab**depth for depth in range(1, depths + 1))
    token_tree.check_budget(whole, depths, vocab)
    with pytest.raises(errors.ConfigError) as caught:
        token_tree.check_budget(whole + 1, depths, vocab)
    (line,) = caught.value.problems
    assert line.startswith(f"drafter.tree.budget: {whole + 1} exceeds the block's capacity")
    assert capacity in line
