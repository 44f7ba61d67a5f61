"""Interface by which drafters draw tokens."""

from typing import NamedTuple, Protocol

import jax

from dflash.drafters.parts.draft_vocabulary import DraftTokens


class Candidates(NamedTuple):
    """The k most likely tokens at each position, best first.

    Attributes:
      tokens: int32 [B, T, k]; distinct within a position.
      scores: float32 [B, T, k], descending and at most 0; log-probability that verification accepts
        the token at its position.
      probs: float32 [B, T, V]; distribution that `tokens` were drawn from, sequentially and without
        replacement. `scores` then do not depend on the drawn tokens. None unless verification needs
        probabilities.
    """

    tokens: jax.Array
    scores: jax.Array
    probs: jax.Array | None


class Sampler(Protocol):
    """Draws tokens under each sequence's temperature, top-k, top-p and noise."""

    def propose(
        self, logits: jax.Array, positions: jax.Array
    ) -> tuple[jax.Array, jax.Array | None]:
        """Draws the tokens at `positions` int32 [B, T] from logits float32 [B, T, V].

        Returns:
          tokens int32 [B, T], and the distributions float32 [B, T, V] that they were drawn from;
          None in their place unless verification needs probabilities.
        """

    def candidates(self, logits: jax.Array, positions: jax.Array, count: int) -> Candidates:
        """Returns the best tokens at each position, for a tree.

        Args:
          logits: Logits of the positions, float32 [B, T, V].
          positions: Absolute positions of the tokens, int32 [B, T], or [B, 1] if all are the same.
          count: Number of candidates per position, at most V.
        """

    def among(self, vocabulary: DraftTokens) -> "Sampler":
        """Returns this sampler for logits [B, T, Q] over a draft vocabulary.

        The returned sampler draws the target's token ids, as if from logits over all V tokens
        that are -inf outside the draft vocabulary.
        """
