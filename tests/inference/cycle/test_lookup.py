"""Tests of copies beside a drafter: the choice as a function, and through the engine."""

import jax
import jax.numpy as jnp
import numpy as np
from support.engines import decode, engine, expected, random_prompts
from support.models import drafter, make_sharding, zeros

from dflash.drafters.base import Proposal
from dflash.inference.cycle import lookup

DRAFTS = 3
TOKENS = jnp.array([[1, 2, 3, 4, 5, 1, 2, 0, 0], [7, 8, 9, 7, 8, 9, 7, 0, 0]])
END = jnp.array([6, 6])


def test_a_sequence_copies_while_copies_are_accepted_further():
    fresh = zeros(lookup.abstract(2, DRAFTS, make_sharding()))
    drafted = Proposal(jnp.full((2, DRAFTS), 6), probs=jnp.full((2, DRAFTS, 10), 0.1))
    state, proposal = fresh.beside(drafted, TOKENS, END)
    np.testing.assert_array_equal(proposal.tokens, drafted.tokens)
    # The first sequence goes on as its context did, and the second as its drafter said.
    committed, counts = jnp.array([[3, 4, 0, 0], [6, 6, 6, 1]]), jnp.array([2, 4])
    state = state.learn(committed, counts, DRAFTS)
    np.testing.assert_array_equal(state.accepted, [[0, 1], [1.5, 0]])
    state, proposal = state.beside(drafted, TOKENS, END)
    np.testing.assert_array_equal(proposal.tokens, [[3, 4, 5], [6, 6, 6]])
    np.testing.assert_array_equal(proposal.probs[0], jax.nn.one_hot(proposal.tokens[0], 10))
    np.testing.assert_array_equal(proposal.probs[1], drafted.probs[1])
    # Where the drafter is right again, it drafts again.
    state = state.learn(jnp.array([[6, 6, 6, 2], [0, 0, 0, 0]]), jnp.array([4, 0]), DRAFTS)
    np.testing.assert_array_equal(state.accepted, [[1.5, 0.5], [1.5, 0]])
    _, proposal = state.insert(jnp.int32(1)).beside(drafted, TOKENS, END)
    np.testing.assert_array_equal(proposal.tokens, drafted.tokens)


def test_fewer_drafts_leave_the_others_out():
    fresh = zeros(lookup.abstract(2, DRAFTS, make_sharding()))
    state, _ = fresh.beside(Proposal(jnp.full((2, 2), 3)), TOKENS, END)
    state = state.learn(jnp.full((2, 3), 3), jnp.array([3, 3]), 2)
    np.testing.assert_array_equal(state.accepted, [[1, 0.5], [1, 0]])
    assert state.learn(jnp.zeros((2, 1), int), jnp.ones(2, int), 0) is state


def test_output_is_that_of_plain_decoding():
    """The tiny target repeats itself, so an untrained drafter gives way to copies."""
    prompts = [prompt * 2 for prompt in random_prompts([9, 4, 12, 1])]
    run = engine(drafter("dflash", block_size=5), batch_size=3, max_length=64, lookup=True)
    for temperature in (0.0, 0.8):
        done = decode(run, prompts, 32, temperature=temperature)
        wanted = expected(prompts, [32] * 4, temperature=temperature)
        assert [(one.output_ids, one.finish_reason) for one in done] == wanted
        assert max(length for one in done for length in one.acceptance_lengths) == 5
