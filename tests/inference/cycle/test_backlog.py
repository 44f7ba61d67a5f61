"""Tests of rows put aside: a drafter that takes them in late drafts as if it never missed them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.models import ARCHITECTURE, drafter, greedy, make_sharding, takes, target, zeros

from dflash.config import registry
from dflash.drafters.base import Drafter
from dflash.inference.cycle import backlog

NAMES = [name for name in sorted(registry.DRAFTERS) if takes(name, "block_size")]
BATCH, CONTEXT, ROWS = 3, 7, 4
WAITING = np.array([0, 1, ROWS])  # rows that each sequence has put aside
GREEDY = greedy(BATCH)


@pytest.mark.parametrize("name", NAMES)
def test_late_rows_are_as_good_as_any(name):
    """Sequences of a batch have put aside no row, one and several; drafts are exactly the same."""
    model, heads = drafter(name, block_size=4), target()
    rng = np.random.default_rng(0)
    width = len(model.feature_layers) * ARCHITECTURE.hidden_size
    features = jnp.array(rng.normal(size=(BATCH, CONTEXT + ROWS, width)), jnp.float32)
    tokens = jnp.array(rng.integers(0, ARCHITECTURE.vocab_size, (BATCH, CONTEXT + ROWS + 1)))
    tokens = tokens.astype(jnp.int32)

    def rows(start, count):
        return tokens[:, start : start + count + 1], features[:, start : start + count]

    @functools.partial(jax.jit, static_argnums=0)
    def observe(late):
        state = zeros(model.init_state(BATCH, 64 + backlog.ROWS))
        position, everyone = jnp.zeros(BATCH, jnp.int32), jnp.full(BATCH, CONTEXT)
        following, seen = rows(0, CONTEXT)
        state = model.observe(state, position, following, everyone, seen, heads)
        waiting = zeros(backlog.abstract(BATCH, width, jnp.float32, make_sharding()))
        # What stands in the rows of a slot that is new is left over from the one before it.
        waiting = backlog.Backlog(waiting.count, waiting.tokens + 5, waiting.features + 1)
        position += CONTEXT
        anchor = tokens[:, CONTEXT]
        for i in range(ROWS):
            count = (i < jnp.array(WAITING)).astype(jnp.int32)
            following, seen = rows(CONTEXT + i, 1)
            # Where nothing is committed the row is the anchor, as in a cycle.
            following = jnp.where(count[:, None] > 0, following, anchor[:, None])
            if late:
                waiting = waiting.append(following, count, seen)
            else:
                state = model.observe(state, position, following, count, seen, heads)
            anchor = jnp.where(count > 0, following[:, 1], anchor)
            position += count
        if late:
            active = jnp.ones(BATCH, bool)
            state, waiting = waiting.clear(model, state, anchor, position, active, heads)
        proposal, _ = model.draft(state, anchor, position, GREEDY, heads)
        return proposal.tokens, waiting.count

    at_once, _ = observe(False)
    late, count = observe(True)
    np.testing.assert_array_equal(late, at_once)
    np.testing.assert_array_equal(count, 0)


class Recorder(Drafter):
    """Keeps what it is shown as its state."""

    def observe(self, state, position, tokens, num_committed, features, heads):
        return position, tokens, num_committed


def test_the_anchor_follows_the_last_row_that_counts():
    """Of a sequence without rows it comes first, where some drafters run it at once."""
    tokens = 100 + jnp.arange(BATCH * (backlog.ROWS + 1)).reshape(BATCH, -1)
    features = jnp.zeros((BATCH, backlog.ROWS, 1))
    waiting = backlog.Backlog(jnp.array(WAITING), tokens, features)
    anchor, position = jnp.array([1, 2, 3]), jnp.array([9, 9, 9])
    active = jnp.array([True, True, False])
    shown, after = waiting.clear(Recorder(), None, anchor, position, active, None)
    start, tokens_shown, count = map(np.asarray, shown)
    np.testing.assert_array_equal(count, [0, 1, 0])  # the last sequence is not active
    np.testing.assert_array_equal(start, [9, 8, 9])
    np.testing.assert_array_equal(tokens_shown[np.arange(BATCH), count], anchor)
    np.testing.assert_array_equal(tokens_shown[1, 0], tokens[1, 0])
    np.testing.assert_array_equal(after.count, 0)
