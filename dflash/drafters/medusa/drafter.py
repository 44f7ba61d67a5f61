"""Medusa: heads on the target's last hidden state, each of which names a token further ahead.

Source: Cai et al. 2024, arXiv 2401.10774. A head is a residual layer and an output matrix. The
paper starts the matrix as a copy of the target's and trains it; here it is the target's own,
borrowed and frozen as for every drafter, which saves a matrix of the size of the vocabulary per
head. As in the paper, the hidden state is that of the token before the anchor: it made the anchor,
but has not seen it.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from dflash import errors
from dflash.config.schema import MedusaArchitecture, MedusaConfig, TargetArchitecture
from dflash.drafters.parts import compatibility
from dflash.drafters.parts.blocks import (
    Anchors,
    block_loss,
    cut_blocks,
    sample_anchors,
    score_blocks,
)
from dflash.drafters.parts.slots import SlotDrafter
from dflash.layers.cache import batch_axes
from dflash.layers.linear import Linear, RMSNorm
from dflash.parallel.sharding import Sharding


@dataclasses.dataclass(frozen=True)
class MedusaShape:
    """Everything that a checkpoint's config.json states.

    Attributes:
      block_size: the anchor and a token of each head.
      hidden_size: D of the target.
      vocab_size: of the target.
      num_target_layers: depth of the target that the heads were trained for.
      rms_norm_eps: of the norm in front of the heads.
    """

    block_size: int
    hidden_size: int
    vocab_size: int
    num_target_layers: int
    rms_norm_eps: float


class MedusaHead(nnx.Module):
    """x + silu(linear(x)); begins as the identity, so as the target's own next token."""

    def __init__(self, width: int, *, dtype: jnp.dtype, sharding: Sharding):
        self.linear = Linear(
            width, width, ("embed", "features"), stddev=0.0, dtype=dtype, sharding=sharding
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., D] -> [..., D]."""
        return x + jax.nn.silu(self.linear(x))


class Medusa(SlotDrafter):
    """The drafter; its state is the target's last hidden state before the anchor, [B, D].

    That is the residual stream after the last layer, as the target's norm finds it; the norm here
    starts without a scale and learns its own.
    """

    hf_architectures = ("MedusaModel",)

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
          shape: of the heads.
          dtype: of weights and state.
          sharding: where they live.
          block_size: the anchor and the heads in use, at most the trained ones; None for all.
          tree_budget: drafts in a tree; None for a chain.
        Raises:
          ConfigError: block_size is larger than the trained one, or tree_budget than a tree gets.
        """
        self.use_slots(
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
        self.shape = shape
        self.feature_layers = (shape.num_target_layers - 1,)
        self.dtype = jnp.dtype(dtype)
        self.sharding = sharding

    @classmethod
    def create(
        cls,
        config: MedusaConfig,
        hf: Mapping[str, Any] | None,
        target: TargetArchitecture,
        *,
        dtype: jnp.dtype,
        sharding: Sharding,
    ) -> "Medusa":
        """An abstract drafter, checked against its target; see `Drafter.create`."""
        if hf is None:
            shape = cls.architecture_for(target, config.architecture)
        else:
            shape = cls.architecture_from_hf(hf)
        compatibility.check_same(
            {
                "hidden size": (shape.hidden_size, target.hidden_size),
                "number of target layers": (shape.num_target_layers, target.num_hidden_layers),
                "vocabulary": (shape.vocab_size, target.vocab_size),
            }
        )
        budget = None if config.tree is None else config.tree.budget
        build = {"dtype": dtype, "sharding": sharding, "block_size": config.block_size}
        return cls(shape, tree_budget=budget, **build)

    def init_state(self, batch, max_length):
        """Abstract hidden states."""
        name, _ = batch_axes(batch, self.sharding)
        return self.sharding.abstract((batch, self.shape.hidden_size), (name, None), self.dtype)

    def draft(self, state, anchor, position, sampler, heads):
        """Drafts a chain, or a tree of the heads' likeliest tokens; see `Drafter.draft`."""
        logits = heads.unembed(self.look_ahead(state)[:, 1:])
        positions = position[:, None] + 1 + jnp.arange(self.num_slots)
        return self.propose(logits, positions, sampler), state

    def observe(self, state, position, tokens, num_committed, features, heads):
        """Keeps the last committed row's hidden state; see `Drafter.observe`."""
        last = jnp.maximum(num_committed - 1, 0)[:, None, None]
        newest = jnp.take_along_axis(features, last, axis=1)[:, 0].astype(state.dtype)
        return jnp.where((num_committed > 0)[:, None], newest, state)

    def look_ahead(self, hidden: jax.Array) -> jax.Array:
        """Hidden states [..., D] -> what the target's head turns into tokens, [..., R, D].

        Row 0 stands for the anchor, which the target has drawn already; row k for head k.
        """
        x = self.norm(hidden)
        ahead = [head(x) for head in list(self.heads)[: self.num_slots]]
        return jnp.stack([x, *ahead], axis=-2)

    def loss(self, batch, heads, key, options, *, anchors: Anchors | None = None, remat=False):
        """Looks ahead from places all over the batch; see `Drafter.loss`.

        Args:
          anchors: the tokens after those places; None to draw them from `key`.
        """
        if anchors is None:
            anchors = sample_anchors(batch, options.num_anchors, key)
        before = jnp.maximum(anchors.index - 1, 0)
        documents = batch.segment_ids
        same = _look_up(documents, before) == _look_up(documents, anchors.index)
        # The first token of a document follows no hidden state.
        anchors = dataclasses.replace(anchors, valid=anchors.valid & same & (anchors.index > 0))
        rows = jnp.take_along_axis(batch.features, before[..., None], axis=1)
        look_ahead = jax.checkpoint(self.look_ahead) if remat else self.look_ahead
        hidden = look_ahead(rows.astype(self.norm.scale.dtype))
        # What fills the block does not matter: no head reads it.
        blocks = cut_blocks(batch, anchors, block_size=self.num_slots + 1, mask_token_id=0)
        scores = score_blocks(hidden, blocks, batch, heads.unembed, options)
        return block_loss(scores, blocks, options)

    @staticmethod
    def checkpoint_name(path: str) -> str:
        """Name in a checkpoint of the parameter at a dotted path of this module."""
        stem, _, _ = path.rpartition(".")
        return f"{stem}.weight"

    @classmethod
    def architecture_from_hf(cls, config: Mapping[str, Any]) -> MedusaShape:
        """Reads a drafter's config.json.

        Raises:
          CheckpointError: a field is missing.
        """
        names = [field.name for field in dataclasses.fields(MedusaShape)]
        missing = [name for name in names if config.get(name) is None]
        if missing:
            raise errors.CheckpointError(f"config.json: missing {', '.join(missing)}")
        return MedusaShape(**{name: config[name] for name in names})

    @classmethod
    def architecture_for(
        cls, target: TargetArchitecture, options: MedusaArchitecture | None
    ) -> MedusaShape:
        """The shape of fresh heads for a target."""
        options = options or MedusaArchitecture()
        return MedusaShape(
            block_size=options.block_size,
            hidden_size=target.hidden_size,
            vocab_size=target.vocab_size,
            num_target_layers=target.num_hidden_layers,
            rms_norm_eps=target.rms_norm_eps,
        )

    @classmethod
    def config_to_hf(cls, shape: MedusaShape) -> dict[str, Any]:
        """The config.json of a checkpoint with this shape."""
        return dataclasses.asdict(shape) | {
            "architectures": list(cls.hf_architectures),
            "model_type": "medusa",
        }


def _look_up(rows: jax.Array, index: jax.Array) -> jax.Array:
    """rows[b, index[b, a]] for rows [B, T], index int32 [B, A]."""
    return jnp.take_along_axis(rows, index, axis=1)
