"""Speculation cache: drafts for the likely outcomes of a verification, before it ends.

An outcome is a number of accepted drafts and the bonus token after them. The drafter knows both
distributions. Under coupled verification it also knows the noise that draws the bonus token, so it
ranks tokens by logits plus noise, and its guesses are as good at any temperature as without noise.

Source: speculative speculative decoding, arXiv 2603.03251.
"""

import dataclasses

import jax
import jax.numpy as jnp

from dflash.inference.logits.sampling import SequenceSampler


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SpeculationCache:
    """Drafts by outcome of the verification of K drafts, F bonus tokens for each accepted number.

    Attributes:
      bonus: Bonus tokens after 0 … K accepted drafts, int32 [B, K + 1, F]; distinct among F.
      drafts: Drafts after each outcome, int32 [B, K + 1, F, K].
    """

    bonus: jax.Array
    drafts: jax.Array

    def find(self, num_accepted: jax.Array, bonus: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Looks up the outcome of each sequence.

        Args:
          num_accepted: Number of accepted drafts, int32 [B], in [0, K].
          bonus: Bonus tokens, int32 [B].
        Returns:
          Whether the outcome was foreseen, bool [B], and its drafts, int32 [B, K], which are
          arbitrary otherwise.
        """
        each = jnp.arange(bonus.shape[0])
        matches = self.bonus[each, num_accepted] == bonus[:, None]
        return matches.any(axis=1), self.drafts[each, num_accepted, jnp.argmax(matches, axis=1)]


@dataclasses.dataclass(frozen=True)
class ChainSampler(SequenceSampler):
    """Sampler that draws a known chain; in place of probabilities, it returns the best tokens.

    Attributes:
      chain: Tokens to draw, int32 [B, T].
      start: Position of the first one, int32 [B].
      count: Number of tokens to return per position.
    """

    chain: jax.Array | None = None
    start: jax.Array | None = None
    count: int = 1

    def propose(self, logits: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the chain's tokens at the positions, int32 [B, T], and the best [B, T, count]."""
        ranked = self.candidates(logits, positions, self.count).tokens
        return jnp.take_along_axis(self.chain, positions - self.start[:, None], axis=1), ranked


def guess(ranked: jax.Array, drafts: jax.Array) -> jax.Array:
    """Returns the likeliest bonus tokens after each number of accepted drafts.

    The bonus token after a rejected draft differs from the draft.

    Args:
      ranked: Best tokens after the anchor and after each draft, int32 [B, K + 1, F + 1].
      drafts: Drafts, int32 [B, K].
    Returns:
      The best F of them, best first, without the draft of the same position, int32 [B, K + 1, F].
    """
    drafted = jnp.pad(drafts, ((0, 0), (0, 1)), constant_values=-1)
    order = jnp.argsort(ranked == drafted[..., None], axis=-1, stable=True)
    return jnp.take_along_axis(ranked, order, axis=-1)[..., :-1]


def continuations(
    anchor: jax.Array, drafts: jax.Array, bonus: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the tokens of every outcome.

    Args:
      anchor: Anchors, int32 [B].
      drafts: Drafts, int32 [B, K].
      bonus: Bonus tokens after each number of accepted drafts, int32 [B, K + 1, F].
    Returns:
      The anchor, accepted drafts and bonus token of each outcome, padded, int32
      [B, (K + 1)·F, K + 2], and the number of tokens after the anchor, int32 [B, (K + 1)·F].
    """
    batch, counts, _ = bonus.shape
    rows = jnp.arange(counts + 1)
    block = jnp.pad(jnp.concatenate([anchor[:, None], drafts], axis=1), ((0, 0), (0, 1)))
    ends = 1 + jnp.arange(counts)[:, None, None]
    tokens = jnp.where(rows == ends, bonus[..., None], block[:, None, None])
    num_committed = jnp.broadcast_to(ends[None, ..., 0], bonus.shape)
    return tokens.reshape(batch, -1, counts + 1), num_committed.reshape(batch, -1)
