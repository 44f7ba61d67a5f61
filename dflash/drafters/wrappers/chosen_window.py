"""Chooses how much of its context a drafter sees, for each sequence and every cycle.

After contexts longer than those that it was trained on, a drafter may accept more if it sees only
the last positions. The choices are a few windows that are narrower than the sequence, and the whole
context. A cycle tells how many drafts were accepted through the window that it used: the acceptance
rate is the fraction of accepted drafts among those up to the first rejected one. A window hardly
changes the time of a cycle, so the highest rate wins, and the narrower of two windows with the same
rate.

The prior of a sequence's rates comes from a pool of all sequences. Pooled rates are hopeful, see
`bandit`, so that a window which was hardly tried, or not for long, is tried again. Everything
depends on tokens alone.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from dflash.drafters.parts.bandit import Counts
from dflash.drafters.wrappers.wrapper import Wrapper, WrapperState

_WHOLE = 2**30  # A window wider than any context.

# The prior of a pooled rate is PRIOR; that of a sequence's rate is the pooled one times the
# sequence's ease, which is its acceptance relative to what the pool lets expect. Weights and
# memories count drafts; after MEMORY drafts, statistics of a sequence have faded to 1/e, and after
# POOL_MEMORY those of the pool.
PRIOR, PRIOR_WEIGHT = 0.5, 8.0
POOL_WEIGHT, EASE_WEIGHT = 64.0, 8.0
MEMORY, POOL_MEMORY = 128.0, 1024.0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WindowState:
    """Acceptance by window, and the window of the current cycle, of each sequence.

    Attributes:
      counts: Counts of the drafts up to the first rejected one, by choice, [B, W].
      index: int32 [B]; choice in the current cycle.
      verified: int32 [B]; drafts that can be accepted in the current cycle; 0 if there are none.
    """

    counts: Counts
    index: jax.Array
    verified: jax.Array


class ChosenWindow(Wrapper):
    """Drafter that sees the last positions of each context, or all of them.

    There are W choices: the windows, from the narrowest on, and the whole context. The pool has one
    row for each number of windows that are narrower than a sequence, 0 … W - 1, since windows that
    help after long contexts may not help after shorter ones.
    """

    def init_state(self, batch, max_length):
        """Returns an abstract state; zeros mean no statistics."""
        choices = len(self.inner.windows) + 1
        of_each = self.per_sequence(batch, choices, dtype=jnp.float32)
        pool = self.sharding.abstract((choices, choices), (None, None), jnp.float32)
        ints = self.per_sequence(batch, dtype=jnp.int32)
        outer = WindowState(Counts(of_each, of_each), ints, ints)
        return WrapperState(self.inner.init_state(batch, max_length), outer, Counts(pool, pool))

    def draft_fewer(self, count, state, anchor, position, sampler, heads):
        """Chooses each sequence's window, and drafts; see `Drafter.draft_fewer`."""
        narrower = self._count_narrower(position)
        choices = np.arange(len(self.inner.windows) + 1)
        allowed = (choices < narrower[:, None]) | (choices == choices[-1])
        estimates = rates(state.outer.counts, state.shared, narrower)
        index = jnp.argmax(jnp.where(allowed, estimates, -jnp.inf), axis=1).astype(jnp.int32)
        drafter = self.inner.within(jnp.array((*self.inner.windows, _WHOLE), jnp.int32)[index])
        where = state.inner, anchor, position, sampler, heads
        proposal, inner = self.draft_inner(drafter, count, *where)
        verified = jnp.full_like(index, min(count, self.longest_path - 1))
        outer = dataclasses.replace(state.outer, index=index, verified=verified)
        return proposal, state._replace(inner=inner, outer=outer)

    def review(self, state, proposal, sampled):
        """Notes how many drafts had a row, since others were not rejected."""
        inner = self.inner.review(state.inner, proposal, sampled)
        rows = (proposal.tokens >= 0).sum(axis=1, dtype=jnp.int32)
        outer = dataclasses.replace(state.outer, verified=jnp.minimum(state.outer.verified, rows))
        return state._replace(inner=inner, outer=outer)

    def observe(self, state, position, tokens, num_committed, features, heads):
        """Learns from what was accepted, if it was drafted; see `Drafter.observe`."""
        inner = self.inner.observe(state.inner, position, tokens, num_committed, features, heads)
        outer, pool = state.outer, state.shared
        verified = jnp.where(num_committed > 0, outer.verified, 0)
        used = jax.nn.one_hot(outer.index, pool.tried.shape[0])
        tried, accepted = (
            jnp.clip(count, 0, verified).astype(jnp.float32)[:, None] * used
            for count in (num_committed, num_committed - 1)
        )
        of_pool = jax.nn.one_hot(self._count_narrower(position), used.shape[1]).T
        news = Counts(of_pool @ tried, of_pool @ accepted)
        pool_fade = (1 - 1 / POOL_MEMORY) ** news.tried.sum(axis=1, keepdims=True)
        fade = (1 - 1 / MEMORY) ** tried.sum(axis=1, keepdims=True)
        counts = outer.counts.after(Counts(tried, accepted), fade)
        outer = WindowState(counts, outer.index, jnp.zeros_like(outer.verified))
        return WrapperState(inner, outer, pool.after(news, pool_fade))

    def _count_narrower(self, position: jax.Array) -> jax.Array:
        """Returns the number of windows that are narrower than each sequence, int32 [B]."""
        windows = jnp.array(self.inner.windows)
        return (windows <= position[:, None]).sum(axis=1, dtype=jnp.int32)


def rates(by_sequence: Counts, pool: Counts, narrower: jax.Array) -> jax.Array:
    """Returns estimated acceptance rates, float32 [B, W], those that are uncertain raised.

    Args:
      by_sequence: Counts of each sequence, [B, W].
      pool: Counts of all sequences, [W, W].
      narrower: int32 [B]; number of windows that are narrower than each sequence.
    """
    pooled = pool.rates(PRIOR, PRIOR_WEIGHT)
    expected = (by_sequence.tried * pooled[narrower]).sum(axis=1) + EASE_WEIGHT
    ease = (by_sequence.accepted.sum(axis=1) + EASE_WEIGHT) / expected
    prior = ease[:, None] * pool.hopeful_rates(PRIOR, PRIOR_WEIGHT)[narrower]
    return by_sequence.rates(prior, POOL_WEIGHT)
