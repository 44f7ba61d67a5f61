"""DSpark: DFlash in which every row drafts, with a previous-token head and a confidence head.

Source: DeepSpec (`modeling/dspark`), by its golden vectors. The anchor's row drafts too, so row k
predicts the token k + 1 positions after the anchor, unless the file states `sample_from_anchor`
false. A low-rank "Markov head", of three kinds,
corrects the logits of each draft position by the token before it. A confidence head predicts
whether a draft is accepted, given that all earlier drafts are. The embedding and the output head
are the target's; checkpoints contain copies of them, which are not read.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from dflash.checkpoints import hf_config
from dflash.drafters.dspark_config import DSparkShape
from dflash.drafters.layouts_config import GROUP
from dflash.drafters.parts.blocks import block_loss
from dflash.drafters.parts.conditioned import ConditionedDFlash
from dflash.layers import losses
from dflash.layers.linear import Embedding, Linear
from dflash.parallel.sharding import Sharding


class MarkovHead(nnx.Module):
    """Previous-token head of the vanilla kind: returns the code of the previous token."""

    def __init__(
        self, width: int, vocab: int, drafted: int, rank: int, *, dtype, sharding: Sharding
    ):
        build = {"dtype": dtype, "sharding": sharding}
        self.markov_w1 = Embedding(vocab, rank, **build)
        self.markov_w2 = Embedding(drafted, rank, **build)
        self.rank = rank

    def fresh_memory(self, *lead: int) -> Any:
        """Returns the memory before the first draft position, which is empty."""
        return ()

    def __call__(self, code: jax.Array, hidden: jax.Array, memory: Any) -> tuple[jax.Array, Any]:
        """Computes `ConditionedDFlash.condition` from the codes [..., r] of previous tokens."""
        return code, memory


class GatedHead(MarkovHead):
    """Previous-token head that gates the token's code by the code and the hidden state."""

    def __init__(self, width: int, vocab: int, drafted: int, rank: int, **build):
        super().__init__(width, vocab, drafted, rank, **build)
        self.gate_proj = Linear(width + rank, rank, (None, None), bias=True, **build)

    def __call__(self, code, hidden, memory):
        gate = self.gate_proj(jnp.concatenate([hidden, code], axis=-1))
        return jax.nn.sigmoid(gate) * code, memory


class RecurrentHead(MarkovHead):
    """Previous-token head that is a gated recurrence over the tokens since the anchor."""

    def __init__(self, width: int, vocab: int, drafted: int, rank: int, **build):
        super().__init__(width, vocab, drafted, rank, **build)
        self.joint_proj = Linear(2 * rank + width, 3 * rank, (None, None), bias=True, **build)

    def fresh_memory(self, *lead):
        return jnp.zeros((*lead, self.rank), self.joint_proj.bias.dtype)

    def __call__(self, code, hidden, memory):
        joint = self.joint_proj(jnp.concatenate([memory, code, hidden], axis=-1))
        gate, candidate, output = jnp.split(joint, 3, axis=-1)
        gate = jax.nn.sigmoid(gate)
        memory = gate * memory + (1 - gate) * jnp.tanh(candidate)
        return jnp.tanh(output), memory


_HEADS = {"vanilla": MarkovHead, "gated": GatedHead, "rnn": RecurrentHead}


class ConfidenceHead(nnx.Module):
    """Logit that a draft is accepted, given that all earlier drafts are."""

    def __init__(self, width: int, **build):
        self.proj = Linear(width, 1, (None, None), bias=True, **build)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.proj(x)[..., 0].astype(jnp.float32)


class DSpark(ConditionedDFlash):
    """DSpark drafter, whose state is the same as DFlash's."""

    hf_architectures = ("Qwen3DSparkModel", "DSparkDraftModel", "DSparkSpeculator")
    shape_class = DSparkShape

    @classmethod
    def with_tensors(cls, config, shapes):
        """Takes the rank from the tensors, from which that of some published files differs."""
        config = super().with_tensors(config, shapes)
        *_, rank = shapes.get("markov_head.markov_w1.weight", (None,))
        if rank is None:
            return config
        fields = {"markov_rank": rank}
        groups = (GROUP, *cls.shape_class.layout["own_groups"])
        stated = {name: hf_config.read_group(config, name) for name in groups if name in config}
        return {**config, **fields, **{name: {**stated[name], **fields} for name in stated}}

    @property
    def has_confidence(self):
        return super().has_confidence or self.confidence_head is not None

    def declare_head(self, **build):
        shape, width, rank = self.shape, self.shape.decoder.hidden_size, self.shape.markov_rank
        tokens = shape.decoder.vocab_size, shape.num_draft_tokens
        self.markov_head = _HEADS[shape.markov_head_type](width, *tokens, rank, **build)
        seen = width + rank * shape.confidence_head_with_markov
        self.confidence_head = (
            ConfidenceHead(seen, **build) if shape.enable_confidence_head else None
        )

    def fresh_memory(self, *lead):
        return self.markov_head.fresh_memory(*lead)

    def first_memory(self, anchor, hidden):
        """Lets the head see the anchor's row, if that does not draft; as in speculators."""
        memory = super().first_memory(anchor, hidden)
        return self.condition(anchor, hidden, memory)[1] if self.first_row else memory

    def condition(self, previous, hidden, memory):
        hidden = jnp.broadcast_to(hidden, (*previous.shape, hidden.shape[-1]))
        return self.markov_head(self.markov_head.markov_w1(previous), hidden, memory)

    @property
    def successors(self):
        return self.markov_head.markov_w2

    def confidence(self, hidden: jax.Array, previous: jax.Array) -> jax.Array:
        """Returns the logits float32 [...] that drafts are accepted after all earlier ones."""
        if self.shape.confidence_head_with_markov:
            code = self.markov_head.markov_w1(previous).astype(hidden.dtype)
            hidden = jnp.concatenate([hidden, code], axis=-1)
        return self.confidence_head(hidden)

    def acceptance(self, prepared, previous):
        if self.confidence_head is None:
            return None
        return jax.nn.sigmoid(self.confidence(prepared, previous))

    def loss(self, batch, heads, key, options, *, anchors=None, remat=False):
        """Computes the loss of the corrected logits plus that of the confidence.

        The confidence loss is a binary cross-entropy with the same weights as the draft loss. Its
        label is whether the draft is correct given the true token before it: greedy decoding then
        accepts the draft if it accepts all earlier ones. See `DFlash.loss`.
        """
        rows = self.run_conditioned(batch, heads, key, options, anchors=anchors, remat=remat)
        scores = self.score_conditioned(rows, batch, heads, options)
        loss, metrics = block_loss(scores, rows.blocks, options)
        if self.confidence_head is None:
            return loss, metrics
        odds = self.confidence(rows.hidden, rows.previous)
        right = scores.correct.astype(jnp.float32)
        cross_entropy = jax.nn.softplus(odds) - odds * right
        weights, divisor = losses.block_weights(scores.nll, rows.blocks.counted, options)
        confidence_loss = jnp.sum(weights * cross_entropy) / divisor
        return loss + confidence_loss, metrics | {
            "loss": loss + confidence_loss,
            "confidence_loss": confidence_loss,
        }
