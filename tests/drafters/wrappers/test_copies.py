import jax
import jax.numpy as jnp
import numpy as np
from support.models import make_sharding, zeros

from dflash.drafters.base import Drafter, Proposal
from dflash.drafters.wrappers.copies import WithCopies

DRAFTS = 3
# The context ends with what began it, so the copy goes on with 3, 4, 5.
CONTEXT = np.array([[1, 2, 3, 4, 5, 1]] * 2, np.int32)
ANCHOR, END = np.array([2, 2], np.int32), np.array([6, 6], np.int32)


class Sixes(Drafter):
    """Drafts the token 6, with a probability of 1/10 each."""

    num_draft_tokens = DRAFTS

    def init_state(self, batch, max_length):
        return ()

    def draft(self, state, anchor, position, sampler, heads):
        probs = jnp.full((len(anchor), DRAFTS, 10), 0.1)
        return Proposal(jnp.full((len(anchor), DRAFTS), 6), probs=probs), state

    def observe(self, state, position, tokens, num_committed, features, heads):
        return state


DRAFTER = WithCopies(Sixes(), make_sharding())
# Jitted, as every operation by itself would compile a program.
_observe = jax.jit(lambda *arguments: DRAFTER.observe(*arguments, None, None))
_draft = jax.jit(
    lambda count, state: DRAFTER.draft_fewer(count, state, ANCHOR, END, None, None),
    static_argnums=0,
)


def informed():
    """The state of two sequences after their context, the anchor not included."""
    tokens = np.concatenate([CONTEXT, ANCHOR[:, None]], axis=1)
    state = zeros(DRAFTER.init_state(2, 32))
    return _observe(state, np.zeros(2, np.int32), tokens, np.array([6, 6]))


def draft(state, count=DRAFTS):
    return _draft(count, state)


def observe(state, following, counts):
    """Lets the rows of a cycle be observed, and goes back to where it began."""
    tokens = np.concatenate([ANCHOR[:, None], following], axis=1).astype(np.int32)
    return _observe(state, END, tokens, np.array(counts))


def test_a_sequence_copies_while_copies_are_accepted_further():
    proposal, state = draft(informed())
    np.testing.assert_array_equal(proposal.tokens, 6)
    # The first sequence goes on as its context did, and the second as its drafter said.
    state = observe(state, [[3, 4, 0, 0], [6, 6, 6, 1]], [2, 4])
    np.testing.assert_array_equal(state.outer.copies, [True, False])
    proposal, state = draft(state)
    np.testing.assert_array_equal(proposal.tokens, [[3, 4, 5], [6, 6, 6]])
    np.testing.assert_array_equal(proposal.probs[0], np.eye(10)[proposal.tokens[0]])
    np.testing.assert_allclose(proposal.probs[1], 0.1)
    # Where the drafter is right again, it drafts again.
    state = observe(state, [[6, 6, 6, 2], [0, 0, 0, 0]], [4, 0])
    np.testing.assert_array_equal(state.outer.copies, [False, False])


def test_a_new_sequence_begins_with_its_drafter():
    _, state = draft(informed())
    state = observe(state, [[3, 4, 0, 0]] * 2, [2, 2])
    assert state.outer.copies.all()
    fresh = zeros(DRAFTER.init_state(1, 32))
    state = DRAFTER.insert(state, fresh, jnp.int32(0), jnp.int32(1))
    np.testing.assert_array_equal(state.outer.copies, [True, False])


def test_fewer_drafts_and_plain_cycles_leave_the_others_out():
    _, state = draft(informed(), 2)
    state = observe(state, [[3, 3, 3]] * 2, [3, 3])
    np.testing.assert_array_equal(state.outer.accepted.accepted, [[0, 1]] * 2)
    after = observe(state, [[3]] * 2, [1, 1])
    np.testing.assert_array_equal(after.outer.accepted.tried, state.outer.accepted.tried)


def test_cached_rows_bring_their_history():
    state = informed()
    rows = DRAFTER.read_rows(state, jnp.int32(1), jnp.int32(2), 4)
    np.testing.assert_array_equal(rows[1], [3, 4, 5, 1])
    copy = DRAFTER.write_rows(zeros(DRAFTER.init_state(1, 32)), jnp.int32(0), jnp.int32(2), rows)
    np.testing.assert_array_equal(copy.outer.token_ids[0, :6], [0, 0, 3, 4, 5, 1])
