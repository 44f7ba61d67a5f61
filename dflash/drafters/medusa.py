"""Medusa: heads on the target's last hidden state, each of which predicts one token further ahead.

Source: Cai et al. 2024, arXiv 2401.10774. A head is a residual layer and an output matrix. The
paper initializes the matrix with the target's and trains it. Here all heads share the target's
frozen output head, as every drafter does, which saves a vocabulary-sized matrix per head. As in the
paper, the hidden state is that of the token before the anchor: it predicted the anchor, but has not
read it.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from dflash.drafters.medusa_config import MedusaConfig, MedusaShape
from dflash.drafters.parts.blocks import (
    Anchors,
    block_loss,
    cut_blocks,
    rows_before,
    sample_anchors,
    score_blocks,
)
from dflash.drafters.parts.one_pass import OnePassDrafter
from dflash.layers.cache import batch_axes
from dflash.layers.linear import Linear, RMSNorm
from dflash.parallel.sharding import Sharding


class MedusaHead(nnx.Module):
    """Residual layer x + silu(linear(x)), which is initialized to the identity.

    A fresh head therefore predicts the target's next token.
    """

    def __init__(self, width: int, *, dtype: jnp.dtype, sharding: Sharding):
        self.linear = Linear(
            width, width, ("embed", "features"), stddev=0.0, dtype=dtype, sharding=sharding
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + jax.nn.silu(self.linear(x))


class Medusa(OnePassDrafter):
    """Medusa drafter, whose state is the target's last hidden state before the anchor, [B, D].

    The hidden state is the residual stream after the last layer, before the target's final norm.
    The drafter's norm has a learned scale of its own.
    """

    hf_architectures = ("MedusaModel",)
    shape_class = MedusaShape
    prefix_cache_mode = "rows"  # There are none: the next `observe` sets the whole state.

    def __init__(
        self,
        shape: MedusaShape,
        *,
        dtype: jnp.dtype,
        sharding: Sharding,
        block_size: int | None = None,
        tree_budget: int | None = None,
    ):
        """Builds an abstract drafter.

        Args:
          block_size: 1 + the number of heads to use, at most the trained size; None for all heads.
          tree_budget: Number of drafts in a tree; None for a chain.
        Raises:
          ConfigError: The block size exceeds the trained one, or the budget the tree's capacity.
        """
        super().__init__(shape, dtype=dtype, sharding=sharding)
        self.set_sizes(
            shape.block_size,
            block_size,
            tree_budget,
            vocab_size=shape.vocab_size,
            of=f"of the drafter's {shape.block_size - 1} heads",
        )
        build = {"dtype": dtype, "sharding": sharding}
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps, **build)
        self.heads = nnx.List(
            MedusaHead(shape.hidden_size, **build) for _ in range(shape.block_size - 1)
        )
        self.feature_layers = (shape.num_target_layers - 1,)

    @classmethod
    def options(cls, config: MedusaConfig) -> dict[str, Any]:
        budget = None if config.tree is None else config.tree.budget
        return {"block_size": config.block_size, "tree_budget": budget}

    def init_state(self, batch, max_length):
        name, _ = batch_axes(batch, self.sharding)
        return self.sharding.abstract((batch, self.shape.hidden_size), (name, None), self.dtype)

    def draft(self, state, anchor, position, sampler, heads):
        hidden = self.look_ahead(state)[:, 1:]
        positions = position[:, None] + 1 + jnp.arange(self.num_positions)
        count = self.num_draft_tokens
        return self.propose(hidden, positions, heads.unembed, sampler, count), state

    def observe(self, state, position, tokens, num_committed, features, heads):
        last = jnp.maximum(num_committed - 1, 0)[:, None, None]
        newest = jnp.take_along_axis(features, last, axis=1)[:, 0].astype(state.dtype)
        return jnp.where((num_committed > 0)[:, None], newest, state)

    def look_ahead(self, hidden: jax.Array) -> jax.Array:
        """Returns the inputs [..., R, D] of the output head for hidden states [..., D].

        Row k > 0 is the output of head k. Row 0 is for the anchor, which is already drawn.
        """
        x = self.norm(hidden)
        ahead = [head(x) for head in list(self.heads)[: self.num_positions]]
        return jnp.stack([x, *ahead], axis=-2)

    def loss(self, batch, heads, key, options, *, anchors: Anchors | None = None, remat=False):
        """Computes the loss of predictions from rows across the batch; see `Drafter.loss`.

        Args:
          anchors: Rows after those that predict; None to draw them from `key`.
        """
        anchors = anchors or sample_anchors(batch, options.num_anchors, key)
        # The first token of a document has no hidden state before it.
        before, is_inside = rows_before(batch, anchors)
        anchors = dataclasses.replace(anchors, valid=anchors.valid & is_inside)
        rows = jnp.take_along_axis(batch.features, before[..., None], axis=1)
        look_ahead = jax.checkpoint(self.look_ahead) if remat else self.look_ahead
        hidden = look_ahead(rows.astype(self.norm.scale.dtype))
        # Any mask token works, since heads do not read the tokens of the block.
        blocks = cut_blocks(batch, anchors, block_size=self.num_positions + 1, mask_token_id=0)
        scores = score_blocks(hidden[:, :, 1:], blocks, batch, heads.unembed, options)
        return block_loss(scores, blocks, options)

    @staticmethod
    def checkpoint_name(path: str) -> str:
        return f"{path.rpartition('.')[0]}.weight"
