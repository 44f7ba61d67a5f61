"""Chooses how much of its context a drafter sees, for each sequence and every cycle.

After contexts longer than those that it was trained on, a drafter may accept more if it sees only
the last positions. The choices are a few windows that are narrower than the sequence, and the whole
context. A cycle tells how many drafts were accepted through the window that it used: the acceptance
rate is the fraction of accepted drafts among those up to the first rejected one. A window hardly
changes the time of a cycle, so the highest rate wins, and the narrower of two windows with the same
rate.

The prior of a sequence's rates comes from a pool of all sequences. A pooled rate is raised by about
its standard error, so that a window which was hardly tried, or not for long, is tried again. A
window whose rate is lower by a fraction d is then tried in about a fraction 1 / (1 + d · sqrt(n))²
of the cycles, where n is the number of accepted drafts that the pool remembers, so trials cost
little whether d is small or large. Everything depends on tokens alone.
"""

import dataclasses

import jax
import jax.numpy as jnp

from dflash.parallel.sharding import Sharding

_WHOLE = 2**30  # A window wider than any context.

# The prior of a pooled rate is PRIOR; that of a sequence's rate is the pooled one times the
# sequence's ease, which is its acceptance relative to what the pool lets expect. Weights and
# memories count drafts; after MEMORY drafts, statistics of a sequence have faded to 1/e, and after
# POOL_MEMORY those of the pool.
PRIOR, PRIOR_WEIGHT = 0.5, 8.0
POOL_WEIGHT, EASE_WEIGHT = 64.0, 8.0
MEMORY, POOL_MEMORY = 128.0, 1024.0
ERRORS = 0.7  # Number of standard errors by which a pooled rate is raised.


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WindowChoice:
    """Acceptance by window, and the windows of the current cycle.

    There are W choices: the windows, from the narrowest on, and the whole context. The pool has one
    row for each number of windows that are narrower than a sequence, 0 … W - 1, since windows that
    help after long contexts may not help after shorter ones.

    Attributes:
      tried: float32 [B, W]; drafts that were verified, up to the first rejected one of a cycle,
        with exponential decay.
      accepted: float32 [B, W]; accepted ones among them.
      pool_tried: float32 [W, W]; sum of `tried` over all sequences, past ones included.
      pool_accepted: float32 [W, W]; sum of `accepted` over all sequences, past ones included.
      index: int32 [B]; choice of each sequence in the current cycle.
      windows: Windows in positions, ascending.
    """

    tried: jax.Array
    accepted: jax.Array
    pool_tried: jax.Array
    pool_accepted: jax.Array
    index: jax.Array
    windows: tuple[int, ...] = dataclasses.field(metadata={"static": True})

    def insert(self, slot: jax.Array) -> "WindowChoice":
        """Clears the statistics of slot `slot` for a new sequence; the pool's stay."""
        return dataclasses.replace(
            self, tried=self.tried.at[slot].set(0), accepted=self.accepted.at[slot].set(0)
        )

    def positions(self) -> jax.Array:
        """Returns the number of positions that each sequence's anchor sees, int32 [B]."""
        return jnp.array((*self.windows, _WHOLE), jnp.int32)[self.index]

    def choose(self, length: jax.Array) -> "WindowChoice":
        """Chooses the windows of the next cycle.

        Args:
          length: int32 [B]; tokens of each sequence, the anchor included.
        """
        narrower = _count_narrower(self.windows, length)
        choices = jnp.arange(len(self.windows) + 1)
        allowed = (choices < narrower[:, None]) | (choices == len(self.windows))
        estimates = jnp.where(allowed, rates(self, narrower), -jnp.inf)
        return dataclasses.replace(self, index=jnp.argmax(estimates, axis=1).astype(jnp.int32))

    def learn(
        self, length: jax.Array, num_accepted: jax.Array, num_verified: jax.Array
    ) -> "WindowChoice":
        """Updates the statistics with the outcome of a cycle.

        Args:
          length: int32 [B]; tokens of each sequence before the cycle.
          num_accepted: int32 [B]; accepted drafts.
          num_verified: int32 [B]; drafts that could have been accepted; 0 for a sequence whose
            outcome tells nothing.
        """
        narrower = _count_narrower(self.windows, length)
        used = jax.nn.one_hot(self.index, len(self.windows) + 1)
        tried = jnp.minimum(num_accepted + 1, num_verified).astype(jnp.float32)[:, None]
        accepted = jnp.minimum(num_accepted, num_verified).astype(jnp.float32)[:, None]

        def pooled(counts):
            return jax.nn.one_hot(narrower, used.shape[1]).T @ (counts * used)

        fade, news = (1 - 1 / MEMORY) ** tried, pooled(tried)
        pool_fade = (1 - 1 / POOL_MEMORY) ** news.sum(axis=1, keepdims=True)
        return dataclasses.replace(
            self,
            tried=self.tried * fade + tried * used,
            accepted=self.accepted * fade + accepted * used,
            pool_tried=self.pool_tried * pool_fade + news,
            pool_accepted=self.pool_accepted * pool_fade + pooled(accepted),
        )


def abstract(batch: int, windows: tuple[int, ...], sharding: Sharding) -> WindowChoice | None:
    """Returns an abstract choice, zero-initialized; None if there are no windows.

    Args:
      batch: Batch size B.
      windows: Windows in positions, ascending.
      sharding: Sharding of the arrays.
    """
    if not windows:
        return None
    count = len(windows) + 1
    own = sharding.abstract((batch, count), ("batch", None), jnp.float32)
    pool = sharding.abstract((count, count), (None, None), jnp.float32)
    index = sharding.abstract((batch,), ("batch",), jnp.int32)
    return WindowChoice(own, own, pool, pool, index, windows)


def rates(choice: WindowChoice, narrower: jax.Array) -> jax.Array:
    """Returns estimated acceptance rates, float32 [B, W], those that are uncertain raised.

    Args:
      choice: Statistics.
      narrower: int32 [B]; number of windows that are narrower than each sequence.
    """
    pool = choice.pool_accepted + PRIOR_WEIGHT * PRIOR
    pool = pool / (choice.pool_tried + PRIOR_WEIGHT)
    expected = (choice.tried * pool[narrower]).sum(axis=1) + EASE_WEIGHT
    ease = (choice.accepted.sum(axis=1) + EASE_WEIGHT) / expected
    raised = pool * (1 + ERRORS / jnp.sqrt(1 + choice.pool_accepted))
    prior = ease[:, None] * raised[narrower]
    return (choice.accepted + POOL_WEIGHT * prior) / (choice.tried + POOL_WEIGHT)


def _count_narrower(windows: tuple[int, ...], length: jax.Array) -> jax.Array:
    """Returns the number of windows that are narrower than each sequence, int32 [B]."""
    return (jnp.array(windows) < length[:, None]).sum(axis=1, dtype=jnp.int32)
