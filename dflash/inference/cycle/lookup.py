"""Prompt lookup beside a drafter: copies in place of drafts, while they are accepted more often.

Outputs that repeat parts of their context, as edits of a text do, are copied better than drafted.
Both proposals are compared with the committed tokens of every cycle, whichever was verified, so a
sequence changes from one to the other as soon as the other would have been accepted further.
"""

import dataclasses

import jax
import jax.numpy as jnp

from dflash.drafters import ngram
from dflash.drafters.base import Proposal
from dflash.parallel.sharding import Sharding

LONGEST_MATCH = 4  # Trailing tokens that are searched for, as in the default of `ngram`.
_WEIGHT = 0.5  # Of the last cycle in the mean of acceptance.


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Lookup:
    """Two proposals for each sequence: index 0 is the drafter's, and index 1 the copy.

    Attributes:
      drafts: int32 [B, 2, G]; proposals of the current cycle.
      accepted: float32 [B, 2]; number of drafts that would have been accepted in recent cycles, as
        an exponential mean.
    """

    drafts: jax.Array
    accepted: jax.Array

    def insert(self, slot: jax.Array) -> "Lookup":
        """Resets slot `slot` for a new sequence, which begins with the drafter's proposals."""
        return dataclasses.replace(self, accepted=self.accepted.at[slot].set(0))

    @property
    def copies(self) -> jax.Array:
        """Sequences whose copies are verified in the current cycle, bool [B]."""
        return self.accepted[:, 1] > self.accepted[:, 0]

    def beside(
        self, proposal: Proposal, token_ids: jax.Array, position: jax.Array
    ) -> tuple["Lookup", Proposal]:
        """Replaces the drafts of sequences whose copies are accepted more often.

        Args:
          proposal: The drafter's chain.
          token_ids: int32 [B, L]; committed tokens, anchor included.
          position: int32 [B]; position of the anchor.
        Returns:
          The lookup with both proposals, and the proposal to verify. A copy has probability 1.
        """
        count = proposal.tokens.shape[1]
        copy = ngram.copy_last(token_ids, position, LONGEST_MATCH, count)
        drafts = jnp.stack([proposal.tokens, copy], axis=1)
        copies = self.copies[:, None]
        tokens, probs = jnp.where(copies, copy, proposal.tokens), proposal.probs
        if probs is not None:
            certain = jax.nn.one_hot(copy, probs.shape[-1], dtype=probs.dtype)
            probs = jnp.where(copies[..., None], certain, probs)
        lookup = dataclasses.replace(self, drafts=self.drafts.at[:, :, :count].set(drafts))
        return lookup, Proposal(tokens, probs=probs)

    def learn(self, committed: jax.Array, num_committed: jax.Array, count: int) -> "Lookup":
        """Compares both proposals with what a cycle committed.

        Args:
          committed: int32 [B, R]; committed tokens.
          num_committed: int32 [B]; their number, 0 for inactive sequences.
          count: Number of drafts of the cycle.
        """
        if not count:
            return self
        counted = jnp.arange(count) < num_committed[:, None]
        equal = (self.drafts[:, :, :count] == committed[:, None, :count]) & counted[:, None]
        agreed = jnp.cumprod(equal, axis=-1).sum(axis=-1)
        mean = self.accepted + _WEIGHT * (agreed - self.accepted)
        return dataclasses.replace(
            self, accepted=jnp.where((num_committed > 0)[:, None], mean, self.accepted)
        )


def abstract(batch: int, num_drafts: int, sharding: Sharding) -> Lookup:
    """Returns an abstract lookup; zeros mean no statistics.

    Args:
      batch: Batch size B.
      num_drafts: Number of drafts in the largest block, G.
      sharding: Sharding of the arrays.
    """
    return Lookup(
        sharding.abstract((batch, 2, num_drafts), ("batch", None, None), jnp.int32),
        sharding.abstract((batch, 2), ("batch", None), jnp.float32),
    )
