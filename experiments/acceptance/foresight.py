"""Drafts of a sampler that knows which of the likeliest tokens is the right one."""

import dataclasses

import jax
import jax.numpy as jnp

from dflash.drafters.base import Heads
from dflash.drafters.parts.draft_vocabulary import DraftTokens
from dflash.drafters.parts.sampler import Candidates
from dflash.inference import replay
from dflash.inference.logits.sampling import SequenceSampler
from dflash.inference.replay import Texts

_AHEAD = 100.0  # Raises a foreseen token's logit this much above all others.


@dataclasses.dataclass(frozen=True)
class Foresight:
    """Greedy sampler that prefers the text's own token wherever it is among the likeliest.

    Attributes:
      greedy: Sampler that draws.
      tokens: Tokens of the texts, int32 [B, L].
      count: Number of tokens that count as the likeliest.
    """

    greedy: SequenceSampler
    tokens: jax.Array
    count: int

    def among(self, vocabulary: DraftTokens) -> "Foresight":
        """Returns this sampler over a draft vocabulary; see `Sampler.among`."""
        return dataclasses.replace(self, greedy=self.greedy.among(vocabulary))

    def propose(self, logits: jax.Array, positions: jax.Array) -> tuple[jax.Array, None]:
        """Draws tokens, without distributions; see `Sampler.propose`."""
        return self.greedy.propose(self._raise(logits, positions), positions)

    def draw(self, hidden, positions, unembed) -> tuple[jax.Array, None]:
        """Draws tokens of all positions, without distributions; see `Sampler.draw`."""
        return self.propose(unembed(hidden), positions)

    def candidates(self, logits: jax.Array, positions: jax.Array, count: int) -> Candidates:
        """Returns the likeliest tokens, the text's own one first; see `Sampler.candidates`."""
        return self.greedy.candidates(self._raise(logits, positions), positions, count)

    def _raise(self, logits: jax.Array, positions: jax.Array) -> jax.Array:
        last, vocabulary = self.tokens.shape[1] - 1, self.greedy.vocabulary
        own = jnp.take_along_axis(self.tokens, jnp.minimum(positions, last), axis=1)[..., None]
        tokens = jnp.broadcast_to(jnp.arange(logits.shape[-1]), logits.shape)
        is_own = (tokens if vocabulary is None else vocabulary.name(tokens)) == own
        value = jnp.where(is_own, logits, -jnp.inf).max(axis=-1, keepdims=True)
        rank = (logits > value).sum(axis=-1, keepdims=True)
        top = logits.max(axis=-1, keepdims=True)
        return jnp.where(is_own & (rank < self.count), top + _AHEAD, logits)


@dataclasses.dataclass(frozen=True)
class Foreseeing:
    """Maker of samplers with foresight of `count` tokens; see `replay.cycles`."""

    count: int

    def __call__(self, texts: Texts, heads: Heads) -> Foresight:
        """Returns the sampler for texts."""
        return Foresight(replay.greedy(texts, heads), texts.tokens, self.count)
