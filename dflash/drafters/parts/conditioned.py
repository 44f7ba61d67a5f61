"""DFlash drafters whose slots learn which token was drafted before them.

The block is painted in one pass as ever. Then the slots are drawn one after the other: what a small
head makes of the previous token and of the slot's hidden state, a vector of a few hundred numbers,
corrects the slot's logits through a table over the vocabulary.
"""

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from dflash.config.schema import DrafterConfig
from dflash.drafters.base import Proposal
from dflash.drafters.dflash.drafter import DFlash
from dflash.drafters.parts.blocks import Blocks, cut_blocks, sample_anchors, score_blocks
from dflash.layers.losses import TokenScores


class Lesson(NamedTuple):
    """What became of the blocks of a batch when each slot was told the token before it.

    Attributes:
      blocks: what was to be drafted, G slots each.
      hidden: [B, A, G, D]; of the slots, after the final norm.
      vectors: [B, A, G, r]; what the head made of them.
      previous: int32 [B, A, G]; the token before each slot.
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
      first_row: of the painted block that drafts: 1, or 0 if the anchor's row drafts too.
    """

    first_row: ClassVar[int] = 1

    @classmethod
    def options(cls, config: DrafterConfig) -> dict[str, Any]:
        """See `WeightedDrafter.options`; these drafters have no trees."""
        return {"block_size": config.block_size}

    def fresh_memory(self, batch: int) -> Any:
        """What `condition` remembers before the first slot; a pytree, by default empty."""
        return ()

    def condition(
        self, previous: jax.Array, hidden: jax.Array, memory: Any
    ) -> tuple[jax.Array, Any]:
        """Previous tokens int32 [B], hidden states [B, D] of a slot -> vectors [B, r], memory."""
        raise TypeError(f"{type(self).__name__} must define condition")

    def bias(self, vectors: jax.Array) -> jax.Array:
        """Corrections float32 [..., V] of logits, from vectors [..., r]."""
        raise TypeError(f"{type(self).__name__} must define bias")

    def slot_logits(self, base: jax.Array, vectors: jax.Array) -> jax.Array:
        """Logits float32 [B, V] that a slot is drawn from, from the painted ones [B, V]."""
        return base + self.bias(vectors)

    def draft(self, state, anchor, position, sampler, heads):
        """Paints, and draws slot by slot; see `Drafter.draft`."""
        return self.draft_fewer(self.num_draft_tokens, state, anchor, position, sampler, heads)

    def draft_fewer(self, count, state, anchor, position, sampler, heads):
        """Paints the whole block, for whose rows it was trained, and draws the first of its slots.

        See `Drafter.draft_fewer`.
        """
        painted, _ = self.paint(state, anchor, position, heads)
        hidden = painted[:, self.first_row : self.first_row + count]
        base = heads.unembed(hidden)
        positions = position[:, None] + 1 + jnp.arange(hidden.shape[1])

        def draw(carry, slot):
            previous, memory = carry
            hidden, base, position = slot
            vectors, memory = self.condition(previous, hidden, memory)
            logits = self.slot_logits(base, vectors)
            drawn = sampler.propose(logits[:, None], position[:, None])
            token, probs = jax.tree.map(lambda row: row[:, 0], drawn)
            return (token, memory), (token, probs)

        slots = jax.tree.map(lambda x: x.swapaxes(0, 1), (hidden, base, positions))
        begin = anchor, self.fresh_memory(anchor.shape[0])
        _, drawn = jax.lax.scan(draw, begin, slots)
        tokens, probs = jax.tree.map(lambda x: x.swapaxes(0, 1), drawn)
        return Proposal(tokens, probs=probs), state

    def teach(self, batch, heads, key, options, *, anchors=None, remat=False) -> Lesson:
        """Paints blocks all over the batch, and corrects each slot by the true token before it.

        As long as a cycle accepts, the token before a slot is the true one: the run of right slots
        is what it would be in decoding.

        Args: see `DFlash.loss`.
        """
        if anchors is None:
            anchors = sample_anchors(batch, options.num_anchors, key)
        rows = self.num_positions + 1
        drafts = rows - self.first_row
        blocks = cut_blocks(
            batch, anchors, block_size=drafts + 1, mask_token_id=self.shape.mask_token_id
        )
        painted = dataclasses.replace(
            blocks, tokens=blocks.tokens[..., :rows], positions=blocks.positions[..., :rows]
        )
        hidden = self.paint_blocks(batch, painted, heads, remat=remat)[:, :, self.first_row :]
        previous = jnp.concatenate([blocks.tokens[..., :1], blocks.labels[..., :-1]], axis=-1)
        vectors = self._condition_all(previous, hidden)
        width = hidden.shape[-1]

        def unembed(rows):
            logits = heads.unembed(rows[..., :width])
            alone = rows.shape[-1] == width  # the target's own hidden states
            return logits if alone else logits + self.bias(rows[..., width:])

        together = jnp.concatenate([hidden, vectors.astype(hidden.dtype)], axis=-1)
        scores = score_blocks(_lead(together), blocks, batch, unembed, options, frozen_head=False)
        return Lesson(blocks, hidden, vectors, previous, scores)

    def _condition_all(self, previous: jax.Array, hidden: jax.Array) -> jax.Array:
        """Vectors [B, A, G, r] of all slots, from what stands before them, one after the other."""
        rows, count, drafts, width = hidden.shape
        slots = (
            previous.reshape(-1, drafts).swapaxes(0, 1),
            hidden.reshape(-1, drafts, width).swapaxes(0, 1),
        )

        def step(memory, slot):
            vectors, memory = self.condition(*slot, memory)
            return memory, vectors

        _, vectors = jax.lax.scan(step, self.fresh_memory(rows * count), slots)
        return vectors.swapaxes(0, 1).reshape(rows, count, drafts, -1)

    @staticmethod
    def score_painted(lesson: Lesson, batch, heads, options) -> TokenScores:
        """Scores of the painted logits, as they are before any correction."""
        return score_blocks(_lead(lesson.hidden), lesson.blocks, batch, heads.unembed, options)


def _lead(rows: jax.Array) -> jax.Array:
    """Puts a row in front of the slots of each block [B, A, G, D], as `score_blocks` has it."""
    return jnp.pad(rows, ((0, 0), (0, 0), (1, 0), (0, 0)))
