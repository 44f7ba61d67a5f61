"""Tests of acceptance: coupled against plain Python, rejection against exact distributions."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
from hypothesis import given
from hypothesis import strategies as st
from support.rejection import VOCAB, chi_square, make_params

from dflash.drafters.parts import token_tree
from dflash.inference.cycle import tree as trees
from dflash.inference.cycle import verify
from dflash.inference.logits import sampling
from dflash.inference.logits.sampling import SequenceSampler

coupled_chain = jax.jit(verify.coupled_chain)


@given(
    st.lists(st.integers(0, 2), min_size=4, max_size=4),
    st.lists(st.integers(0, 2), min_size=5, max_size=5),
)
def test_the_longest_equal_prefix_is_accepted(draft, sampled):
    result = coupled_chain(np.array([draft], np.int32), np.array([sampled], np.int32))
    count = 0
    while count < 4 and draft[count] == sampled[count]:
        count += 1
    assert result.num_accepted.tolist() == [count]
    assert result.next_token.tolist() == [sampled[count]]
    assert result.path is None


def test_shapes_that_do_not_fit_are_named():
    with pytest.raises(ValueError, match=r"\(2, 3\) does not fit sampled \(2, 3\)"):
        verify.coupled_chain(np.zeros((2, 3), np.int32), np.zeros((2, 3), np.int32))
    with pytest.raises(ValueError, match=r"drawn_from \(2, 2\), logits \(2, 4, 6\) differ"):
        verify.rejection_tree(
            np.zeros((2, 3), np.int32), np.zeros((2, 2, VOCAB)), np.zeros((2, 2), np.int32),
            np.zeros((2, 4, VOCAB)), np.zeros((2, 4), np.int32), make_params(2),
            jax.eval_shape(trees.from_parents, np.zeros((2, 3), np.int32)),
        )  # fmt: skip
    with pytest.raises(ValueError, match=r"draft_probs \(2, 2, 6\), logits \(2, 4, 6\) differ"):
        verify.rejection_chain(
            np.zeros((2, 3), np.int32), np.zeros((2, 2, VOCAB)), np.zeros((2, 4, VOCAB)),
            np.zeros((2, 4), np.int32), make_params(2),
        )  # fmt: skip


# --- rejection: whatever was drafted, the output follows the target ------------------------------


SAMPLES = 40_000


@jax.jit
def two_tokens(target_logits, draft_logits, params, verified):
    """The first two tokens of each sequence: of one cycle, or of two if the first ends early.

    Also returns how many drafts of the first cycle were accepted.

    Args:
      target_logits: [1 + V + V², V]; after no token, after one (by token), after two.
      draft_logits: [1 + V, V]; after no token, after one: the drafter knows no more.
      verified: [B]; drafts of each sequence that have a row.
    """
    batch = params.temperature.shape[0]
    start = jnp.zeros((batch,), jnp.int32)

    def cycle(so_far, position):
        """One cycle of two drafts after no token or one: `so_far` is the row of the logits."""
        position = jnp.full(so_far.shape, position)
        positions = position[:, None] + jnp.arange(3)
        before = draft_logits[so_far][:, None]
        first = sampling.sample(before, positions[:, :1], params, sampling.DRAFT)
        after = draft_logits[1 + first]
        second = sampling.sample(after, positions[:, 1:2], params, sampling.DRAFT)
        draft = jnp.concatenate([first, second], axis=1)
        probs = sampling.probabilities(jnp.concatenate([before, after], axis=1), params)
        one = so_far * VOCAB + 1 + first[:, 0]
        two = one * VOCAB + 1 + second[:, 0]
        rows = jnp.stack([so_far, one, two], axis=1)
        # The second cycle looks past two tokens, at what does not count.
        logits = target_logits[jnp.minimum(rows, target_logits.shape[0] - 1)]
        with_row = jnp.where(jnp.arange(2) < verified[:, None], draft, -1)
        result = verify.rejection_chain(with_row, probs, logits, positions, params)
        is_next = jnp.arange(2) == result.num_accepted[:, None]
        tokens = jnp.where(is_next, result.next_token[:, None], draft)
        return 1 + tokens[:, 0], (tokens, result.num_accepted)

    _, (tokens, accepted) = jax.lax.scan(cycle, start, jnp.arange(2))
    second = jnp.where(accepted[0] >= 1, tokens[0, :, 1], tokens[1, :, 0])
    return tokens[0, :, 0], second, accepted[0]


@functools.cache
def joint_pvalue(*, parts: bool = False) -> tuple[float, float]:
    """How well the joint distribution of two tokens fits the target's, by chi-square.

    Also returns the mean number of drafts of the first cycle that were accepted.

    Args:
      parts: a third of the sequences each verify no draft, one draft, and both.
    """
    rng = np.random.default_rng(0)
    target_logits = rng.normal(size=(1 + VOCAB + VOCAB**2, VOCAB)).astype(np.float32)
    draft_logits = rng.normal(size=(1 + VOCAB, VOCAB)).astype(np.float32)
    verified = np.arange(SAMPLES) % 3 if parts else np.full(SAMPLES, 2)
    given = target_logits, draft_logits, make_params(SAMPLES), verified
    first, second, accepted = two_tokens(*given)
    p_first = scipy.special.softmax(target_logits[0].astype(np.float64))
    p_second = scipy.special.softmax(target_logits[1 : 1 + VOCAB].astype(np.float64), axis=-1)
    pvalue = chi_square(np.asarray(first), np.asarray(second), p_first[:, None] * p_second)
    return pvalue, float(np.mean(accepted))


def test_rejection_follows_the_target():
    pvalue, _ = joint_pvalue()
    assert pvalue > 1e-3


def test_drafts_that_are_not_verified_end_a_chain():
    pvalue, accepted = joint_pvalue(parts=True)
    assert pvalue > 1e-3
    assert 0.1 < accepted < joint_pvalue()[1] - 0.1


def test_greedy_rejection_is_greedy_decoding():
    rng = np.random.default_rng(1)
    batch, drafts = 64, 3
    logits = rng.normal(size=(batch, drafts + 1, VOCAB)).astype(np.float32)
    best = np.argmax(logits, axis=-1)
    draft = np.where(rng.random((batch, drafts)) < 0.7, best[:, :-1], (best[:, :-1] + 1) % VOCAB)
    result = jax.jit(verify.rejection_chain)(
        draft,
        np.eye(VOCAB, dtype=np.float32)[draft],
        logits,
        np.tile(np.arange(drafts + 1), (batch, 1)),
        make_params(batch, temperature=0.0),
    )
    coupled = coupled_chain(draft, best)
    np.testing.assert_array_equal(result.num_accepted, coupled.num_accepted)
    np.testing.assert_array_equal(result.next_token, coupled.next_token)
    assert set(np.asarray(result.num_accepted)) == set(range(drafts + 1))


# --- trees ---------------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnums=0)
def two_tokens_by_tree(rule, target_logits, draft_logits, params):
    """As `two_tokens`, of trees of 7 nodes over two slots with marginals [1 + V, 2, V]."""
    budget = 7
    sampler = SequenceSampler(params, with_probs=True)

    def cycle(so_far, position):
        position = jnp.full(so_far.shape, position)
        slots = position[:, None] + jnp.arange(2)
        proposal = token_tree.propose(draft_logits[so_far], slots, sampler, budget)
        tree = trees.from_parents(proposal.parents, 2)
        states = [so_far]
        for g in range(budget):
            before = jnp.take_along_axis(
                jnp.stack(states, axis=1), proposal.parents[:, g : g + 1], axis=1
            )
            states.append(before[:, 0] * VOCAB + 1 + proposal.tokens[:, g])
        rows = jnp.minimum(jnp.stack(states, axis=1), target_logits.shape[0] - 1)
        result = rule(
            proposal.tokens, proposal.probs, proposal.drawn_from, target_logits[rows],
            position[:, None] + tree.depth, params, tree,
        )  # fmt: skip
        tokens = jnp.take_along_axis(proposal.tokens, result.path[:, 1:] - 1, axis=1)
        is_next = jnp.arange(2) == result.num_accepted[:, None]
        tokens = jnp.where(is_next, result.next_token[:, None], tokens)
        return 1 + tokens[:, 0], (tokens, result.num_accepted)

    start = jnp.zeros(params.temperature.shape, jnp.int32)
    _, (tokens, accepted) = jax.lax.scan(cycle, start, jnp.arange(2))
    second = jnp.where(accepted[0] >= 1, tokens[0, :, 1], tokens[1, :, 0])
    return tokens[0, :, 0], second, accepted[0]


def tree_pvalue(
    rule=verify.rejection_tree, *, top_k: int = 0, seed: int = 0, samples: int = SAMPLES
) -> tuple[float, list[int]]:
    """As `joint_pvalue`; and how often each number of drafts was accepted."""
    rng = np.random.default_rng(seed)
    target_logits = rng.normal(size=(1 + VOCAB + VOCAB**2, VOCAB)).astype(np.float32)
    draft_logits = rng.normal(size=(1 + VOCAB, 2, VOCAB)).astype(np.float32)
    params = make_params(samples)
    params = dataclasses.replace(params, top_k=np.full(samples, top_k, np.int32))
    first, second, accepted = two_tokens_by_tree(rule, target_logits, draft_logits, params)
    one = jax.tree.map(lambda leaf: np.asarray(leaf)[:1], params)
    probs = jax.jit(sampling.probabilities)(target_logits[None, : 1 + VOCAB], one)
    probs = np.asarray(probs, np.float64)[0]
    pvalue = chi_square(np.asarray(first), np.asarray(second), probs[0][:, None] * probs[1:])
    return pvalue, np.bincount(accepted, minlength=3).tolist()


def test_rejection_of_trees_follows_the_target():
    pvalue, accepted = tree_pvalue()
    assert pvalue > 1e-3
    assert min(accepted) > SAMPLES / 50, "every depth must happen"


def test_trees_of_which_each_sequence_verifies_a_part():
    """The first nodes, from none to all: of siblings too, one may be verified and another not."""

    def first(draft, *rest):
        lengths = jnp.arange(draft.shape[0]) % (draft.shape[1] + 1)
        verified = jnp.where(jnp.arange(draft.shape[1]) < lengths[:, None], draft, -1)
        return verify.rejection_tree(verified, *rest)

    pvalue, accepted = tree_pvalue(first)
    assert pvalue > 1e-3
    assert min(accepted) > SAMPLES / 100, "every depth must happen"


def test_siblings_that_nobody_drew():
    """Two tokens of a slot can be drawn; only the third sibling is one that the target may want."""
    samples = SAMPLES // 4
    pvalue, accepted = tree_pvalue(top_k=2, seed=4, samples=samples)
    assert pvalue > 1e-3
    assert min(accepted[:2]) > samples / 50


def test_greedy_rejection_of_trees_is_greedy_decoding():
    """Also beside sequences that sample."""
    batch, slots, budget = 64, 3, 9
    rng = np.random.default_rng(1)
    temperature = np.where(np.arange(batch) % 4, 0.0, 1.0).astype(np.float32)
    params = dataclasses.replace(make_params(batch), temperature=temperature)
    target = rng.normal(size=(batch, 1, VOCAB))
    guess = target + 0.8 * rng.normal(size=(batch, slots, VOCAB))
    rows = target + 0.3 * rng.normal(size=(batch, budget + 1, VOCAB))
    guess, rows = guess.astype(np.float32), rows.astype(np.float32)

    @jax.jit
    def decide(guess, rows):
        positions = jnp.tile(jnp.arange(slots), (batch, 1))
        sampler = SequenceSampler(params, with_probs=True)
        proposal = token_tree.propose(guess, positions, sampler, budget)
        tree = trees.from_parents(proposal.parents, slots)
        result = verify.rejection_tree(
            proposal.tokens, proposal.probs, proposal.drawn_from, rows, tree.depth, params, tree
        )
        return result, verify.coupled_tree(proposal.tokens, jnp.argmax(rows, axis=-1), tree)

    result, wanted = decide(guess, rows)
    greedy = temperature == 0
    np.testing.assert_array_equal(result.num_accepted[greedy], wanted.num_accepted[greedy])
    np.testing.assert_array_equal(result.next_token[greedy], wanted.next_token[greedy])
    assert set(np.asarray(result.num_accepted[greedy])) == set(range(slots + 1))
