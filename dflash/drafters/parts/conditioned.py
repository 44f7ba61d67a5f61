"""DFlash drafters whose draft positions see which token was drafted before them.

One pass over the block gives the base logits, as in DFlash. Tokens are then drawn one after the
other: a small head maps the previous token and the hidden state of the draft position to a vector
of a few hundred numbers, which corrects the logits through a table over the vocabulary.
"""

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from dflash.config.schema import DrafterConfig
from dflash.drafters.base import Proposal, Sampler
from dflash.drafters.dflash import DFlash
from dflash.drafters.parts.blocks import Blocks, cut_blocks, sample_anchors, score_blocks
from dflash.layers.losses import TokenScores


class ConditionedScores(NamedTuple):
    """Scores of the blocks of a batch, each draft position given the true token before it.

    Attributes:
      blocks: the blocks, of G draft positions each.
      hidden: [B, A, G, D]; of the draft positions, after the final norm.
      vectors: [B, A, G, r]; outputs of the head.
      previous: int32 [B, A, G]; the token before each draft position.
      scores: of the corrected logits, each [B, A, G].
    """

    blocks: Blocks
    hidden: jax.Array
    vectors: jax.Array
    previous: jax.Array
    scores: TokenScores


class ConditionedDFlash(DFlash):
    """Base of these drafters.

    Attributes:
      first_row: first row of the block that drafts: 1, or 0 if the anchor's row drafts too.
    """

    first_row: ClassVar[int] = 1

    @classmethod
    def options(cls, config: DrafterConfig) -> dict[str, Any]:
        """See `WeightedDrafter.options`; these drafters have no trees."""
        return {"block_size": config.block_size, "short_pass": config.short_pass}

    def fresh_memory(self, batch: int) -> Any:
        """State of `condition` before the first draft position; a pytree, by default empty."""
        return ()

    def prepare(self, hidden: jax.Array) -> jax.Array:
        """What `condition` needs of hidden states [..., D], by default these; of any batch."""
        return hidden

    def condition(
        self, previous: jax.Array, prepared: jax.Array, memory: Any
    ) -> tuple[jax.Array, Any]:
        """Previous tokens int32 [B], rows [B, ·] of `prepare` -> vectors [B, r], memory."""
        raise TypeError(f"{type(self).__name__} must define condition")

    def bias(self, vectors: jax.Array) -> jax.Array:
        """Corrections float32 [..., V] of logits, from vectors [..., r]."""
        raise TypeError(f"{type(self).__name__} must define bias")

    def choices(self, base: jax.Array) -> Any:
        """What tokens are drawn from, of base logits [B, G, V]: a pytree of arrays [B, G, …].

        It does not depend on what is drawn, so all draft positions have theirs at once.
        """
        return base

    def correct(
        self, choices: Any, vectors: jax.Array, sampler: Sampler
    ) -> tuple[jax.Array, Sampler]:
        """The corrected logits of a draft position, and what draws from them.

        Args:
          choices: a position's rows of `choices`, [B, …].
          vectors: [B, r]; of that position.
        Returns:
          float32 [B, V], or [B, Q] with a sampler among Q tokens.
        """
        return choices + self.bias(vectors), sampler

    def draft(self, state, anchor, position, sampler, heads):
        """One pass over the block, then draws token by token; see `Drafter.draft`."""
        return self.draft_fewer(self.num_draft_tokens, state, anchor, position, sampler, heads)

    def draft_fewer(self, count, state, anchor, position, sampler, heads):
        """Runs the whole block, as in training, and draws the first tokens.

        See `Drafter.draft_fewer`.
        """
        block, _ = self.run_block(state, anchor, position, heads)
        hidden = block[:, self.first_row : self.first_row + count]
        positions = position[:, None] + 1 + jnp.arange(hidden.shape[1])

        def draw(carry, inputs):
            previous, memory = carry
            prepared, choices, position = inputs
            vectors, memory = self.condition(previous, prepared, memory)
            logits, draws = self.correct(choices, vectors, sampler)
            drawn = draws.propose(logits[:, None], position[:, None])
            token, probs = jax.tree.map(lambda row: row[:, 0], drawn)
            return (token, memory), (token, probs)

        rows = self.prepare(hidden), self.choices(heads.unembed(hidden)), positions
        inputs = jax.tree.map(lambda x: x.swapaxes(0, 1), rows)
        begin = anchor, self.fresh_memory(anchor.shape[0])
        _, drawn = jax.lax.scan(draw, begin, inputs)
        tokens, probs = jax.tree.map(lambda x: x.swapaxes(0, 1), drawn)
        return Proposal(tokens, probs=probs), state

    def score_conditioned(
        self, batch, heads, key, options, *, anchors=None, remat=False
    ) -> ConditionedScores:
        """Runs blocks all over the batch, and corrects logits by the true token before each.

        In decoding, the token before a draft position is the true one up to the first rejection,
        so acceptance lengths are those of decoding.

        Args: see `DFlash.loss`.
        """
        if anchors is None:
            anchors = sample_anchors(batch, options.num_anchors, key)
        rows = self.pass_positions + 1
        drafts = rows - self.first_row
        blocks = cut_blocks(
            batch, anchors, block_size=drafts + 1, mask_token_id=self.shape.mask_token_id
        )
        run = dataclasses.replace(
            blocks, tokens=blocks.tokens[..., :rows], positions=blocks.positions[..., :rows]
        )
        hidden = self.run_blocks(batch, run, heads, remat=remat)[:, :, self.first_row :]
        previous = jnp.concatenate([blocks.tokens[..., :1], blocks.labels[..., :-1]], axis=-1)
        vectors = self._condition_all(previous, hidden)
        width = hidden.shape[-1]

        def unembed(rows):
            logits = heads.unembed(rows[..., :width])
            alone = rows.shape[-1] == width  # the target's own hidden states
            return logits if alone else logits + self.bias(rows[..., width:])

        together = jnp.concatenate([hidden, vectors.astype(hidden.dtype)], axis=-1)
        scores = score_blocks(_lead(together), blocks, batch, unembed, options, frozen_head=False)
        return ConditionedScores(blocks, hidden, vectors, previous, scores)

    def _condition_all(self, previous: jax.Array, hidden: jax.Array) -> jax.Array:
        """Vectors [B, A, G, r] of all draft positions, computed one position after the other."""
        rows, count, drafts, _ = hidden.shape
        inputs = (
            previous.reshape(-1, drafts).swapaxes(0, 1),
            self.prepare(hidden).reshape(rows * count, drafts, -1).swapaxes(0, 1),
        )

        def step(memory, inputs):
            vectors, memory = self.condition(*inputs, memory)
            return memory, vectors

        _, vectors = jax.lax.scan(step, self.fresh_memory(rows * count), inputs)
        return vectors.swapaxes(0, 1).reshape(rows, count, drafts, -1)

    @staticmethod
    def score_base(scored: ConditionedScores, batch, heads, options) -> TokenScores:
        """Scores of the base logits, without the correction."""
        return score_blocks(_lead(scored.hidden), scored.blocks, batch, heads.unembed, options)


def _lead(rows: jax.Array) -> jax.Array:
    """Puts the anchor's row, of zeros, before the G rows [B, A, G, D], as `score_blocks` wants."""
    return jnp.pad(rows, ((0, 0), (0, 0), (1, 0), (0, 0)))
