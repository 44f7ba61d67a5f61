"""Speculation: drafts for the likely outcomes of a verification, before it ends.

An outcome is a number of accepted drafts and the bonus token after them. The drafter knows both
distributions. Under coupled verification it also knows the noise that draws the bonus token, so it
ranks tokens by logits plus noise, and its guesses are as good at any temperature as without noise.

Drafts are *ranked* tokens, int32 [..., K + 1, F + 1]: the best ones after the anchor and after each
of K drafts, best first. Draft k is the best one of row k, and the last row tells what may follow.
"""

import dataclasses

import jax
import jax.numpy as jnp

from dflash.inference.logits.sampling import SequenceSampler


@dataclasses.dataclass(frozen=True)
class RankingSampler(SequenceSampler):
    """Sampler that returns the `count` best tokens of each position in place of probabilities."""

    count: int = 1

    def propose(self, logits: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns drawn tokens, int32 [B, T], and the best ones, int32 [B, T, count]."""
        ranked = self.candidates(logits, positions, self.count).tokens
        return ranked[..., 0], ranked


def guess(ranked: jax.Array) -> jax.Array:
    """Returns the best F bonus tokens after 0 … K accepted drafts, int32 [B, K + 1, F].

    The bonus token after a rejected draft differs from the draft.
    """
    return jnp.concatenate([ranked[:, :-1, 1:], ranked[:, -1:, :-1]], axis=1)


def look_up(
    bonus: jax.Array, ahead: jax.Array, num_accepted: jax.Array, token: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Looks up the outcome of each sequence: `num_accepted` drafts and the bonus token, int32 [B].

    Args:
      bonus: Foreseen bonus tokens, [B, K + 1, F]; see `guess`.
      ahead: Drafts after each outcome, int32 [B, K + 1, F, …].
    Returns:
      Whether the outcome was foreseen, bool [B], and its drafts, which are arbitrary otherwise.
    """
    each = jnp.arange(token.shape[0])
    matches = bonus[each, num_accepted] == token[:, None]
    return matches.any(axis=1), ahead[each, num_accepted, jnp.argmax(matches, axis=1)]


def continuations(
    anchor: jax.Array, drafts: jax.Array, bonus: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the tokens of every outcome; `anchor` is int32 [B].

    Returns:
      The anchor, accepted drafts and bonus token of each outcome, padded, int32
      [B·(K + 1)·F, K + 2], and the number of tokens after the anchor, int32 [B·(K + 1)·F].
    """
    size = bonus.shape[1] + 1
    block = jnp.pad(jnp.concatenate([anchor[:, None], drafts], axis=1), ((0, 0), (0, 1)))
    ends = jnp.arange(1, size)[:, None, None]
    tokens = jnp.where(jnp.arange(size) == ends, bonus[..., None], block[:, None, None])
    return tokens.reshape(-1, size), jnp.broadcast_to(ends[..., 0], bonus.shape).reshape(-1)
