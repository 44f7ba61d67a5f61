"""DSpark: DFlash in which every row drafts, with a previous-token head and a confidence head.

Source: DeepSpec (`modeling/dspark`), by its golden vectors. The anchor's row drafts too, so row k
predicts the token k + 1 positions after the anchor. A head of low rank ("Markov head", of three
kinds) corrects the logits of each draft position by the token before it, and another head predicts
whether the draft is accepted, given that all before it are. The embedding and the output head are
the target's; checkpoints hold a copy of both, which is not read.
"""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from dflash import errors
from dflash.drafters.dspark_config import DSparkShape
from dflash.drafters.parts.blocks import block_loss
from dflash.drafters.parts.conditioned import ConditionedDFlash
from dflash.layers import losses
from dflash.layers.linear import Embedding, Linear
from dflash.parallel import parameters
from dflash.parallel.sharding import Sharding


class Affine(Linear):
    """x @ kernel + bias."""

    def __init__(self, in_features: int, out_features: int, *, dtype, sharding: Sharding):
        build = {"dtype": dtype, "sharding": sharding}
        super().__init__(in_features, out_features, (None, None), **build)
        self.bias = parameters.declare((out_features,), (None,), stddev=0.0, **build)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., in] -> [..., out]."""
        return super().__call__(x) + self.bias[...]


class MarkovHead(nnx.Module):
    """The previous-token head, vanilla kind: the code of the previous token, unchanged."""

    def __init__(self, width: int, vocab: int, rank: int, *, dtype, sharding: Sharding):
        build = {"dtype": dtype, "sharding": sharding}
        self.markov_w1 = Embedding(vocab, rank, **build)
        self.markov_w2 = Embedding(vocab, rank, **build)
        self.rank = rank

    def fresh_memory(self, batch: int) -> Any:
        """See `ConditionedDFlash.fresh_memory`."""
        return ()

    def __call__(self, code: jax.Array, hidden: jax.Array, memory: Any) -> tuple[jax.Array, Any]:
        """Codes [B, r] of previous tokens, hidden states [B, D] -> vectors [B, r], memory."""
        return code, memory


class GatedHead(MarkovHead):
    """The code of the previous token, gated by the hidden state and the code itself."""

    def __init__(self, width: int, vocab: int, rank: int, **build):
        super().__init__(width, vocab, rank, **build)
        self.gate_proj = Affine(width + rank, rank, **build)

    def __call__(self, code, hidden, memory):
        """See `MarkovHead`."""
        gate = self.gate_proj(jnp.concatenate([hidden, code], axis=-1))
        return jax.nn.sigmoid(gate) * code, memory


class RecurrentHead(MarkovHead):
    """A gated recurrence over the tokens since the anchor."""

    def __init__(self, width: int, vocab: int, rank: int, **build):
        super().__init__(width, vocab, rank, **build)
        self.joint_proj = Affine(2 * rank + width, 3 * rank, **build)

    def fresh_memory(self, batch):
        """See `MarkovHead`."""
        return jnp.zeros((batch, self.rank), self.joint_proj.bias.dtype)

    def __call__(self, code, hidden, memory):
        """See `MarkovHead`."""
        joint = self.joint_proj(jnp.concatenate([memory, code, hidden], axis=-1))
        gate, candidate, output = jnp.split(joint, 3, axis=-1)
        gate = jax.nn.sigmoid(gate)
        memory = gate * memory + (1 - gate) * jnp.tanh(candidate)
        return jnp.tanh(output), memory


_HEADS = {"vanilla": MarkovHead, "gated": GatedHead, "rnn": RecurrentHead}


class ConfidenceHead(nnx.Module):
    """Logit of a draft being accepted, given that all before it are."""

    def __init__(self, width: int, **build):
        self.proj = Affine(width, 1, **build)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., width] -> float32 [...]."""
        return self.proj(x)[..., 0].astype(jnp.float32)


class DSpark(ConditionedDFlash):
    """The drafter; its state is that of DFlash."""

    hf_architectures = ("Qwen3DSparkModel",)
    shape_class = DSparkShape
    ignored_checkpoint_names = ("embed_tokens.weight", "lm_head.weight")
    first_row: ClassVar[int] = 0

    def __init__(
        self,
        shape: DSparkShape,
        *,
        dtype,
        sharding,
        block_size: int | None = None,
        short_pass: bool = False,
    ):
        """Builds an abstract drafter; see `DFlash`.

        Args:
          block_size: rows to verify, the anchor and the drafts; None for all.
          short_pass: compute no more rows than that takes.
        Raises:
          ConfigError: block_size is larger than the trained one.
        """
        most = shape.block_size + 1
        if block_size is not None and block_size > most:
            raise errors.ConfigError(
                f"drafter.block_size: {block_size} is larger than {most}, the anchor and the "
                f"{shape.block_size} drafts that the drafter was trained for"
            )
        build = {"dtype": dtype, "sharding": sharding}
        rows = None if block_size is None else block_size - 1
        super().__init__(shape, block_size=rows, short_pass=short_pass, **build)
        self.num_draft_tokens = self.num_positions + 1
        width, rank = shape.decoder.hidden_size, shape.markov_rank
        head = _HEADS[shape.markov_head_type]
        self.markov_head = head(width, shape.decoder.vocab_size, rank, **build)
        seen = width + rank * shape.confidence_head_with_markov
        self.confidence_head = (
            ConfidenceHead(seen, **build) if shape.enable_confidence_head else None
        )

    @property
    def longest_path(self) -> int:
        """Rows of the whole chain, the anchor included."""
        return self.block_size

    def fresh_memory(self, batch):
        """See `ConditionedDFlash.fresh_memory`."""
        return self.markov_head.fresh_memory(batch)

    def condition(self, previous, hidden, memory):
        """See `ConditionedDFlash.condition`."""
        return self.markov_head(self.markov_head.markov_w1(previous), hidden, memory)

    def bias(self, vectors):
        """See `ConditionedDFlash.bias`."""
        return self.markov_head.markov_w2.attend(vectors)

    def confidence(self, hidden: jax.Array, previous: jax.Array) -> jax.Array:
        """Logits of drafts being accepted, given that all before them are: float32 [...].

        Args:
          hidden: [..., D]; of the draft positions.
          previous: int32 [...]; the token before each of them.
        """
        if self.shape.confidence_head_with_markov:
            code = self.markov_head.markov_w1(previous).astype(hidden.dtype)
            hidden = jnp.concatenate([hidden, code], axis=-1)
        return self.confidence_head(hidden)

    def loss(self, batch, heads, key, options, *, anchors=None, remat=False):
        """The loss of the corrected logits, plus that of the confidence; see `DFlash.loss`.

        The label of the confidence is whether the draft is right given the true token before it:
        greedy decoding then accepts it if it accepts all before it. Binary cross-entropy, with the
        same weights.
        """
        scored = self.score_conditioned(batch, heads, key, options, anchors=anchors, remat=remat)
        loss, metrics = block_loss(scored.scores, scored.blocks, options)
        if self.confidence_head is None:
            return loss, metrics
        odds = self.confidence(scored.hidden, scored.previous)
        right = scored.scores.correct.astype(jnp.float32)
        cross_entropy = jax.nn.softplus(odds) - odds * right
        weights, divisor = losses.block_weights(scored.scores.nll, scored.blocks.counted, options)
        confidence_loss = jnp.sum(weights * cross_entropy) / divisor
        return loss + confidence_loss, metrics | {
            "loss": loss + confidence_loss,
            "confidence_loss": confidence_loss,
        }

    @staticmethod
    def checkpoint_name(path: str) -> str:
        """Name in a Hugging Face checkpoint of the parameter at a dotted path of this module."""
        stem, _, leaf = path.rpartition(".")
        return path if leaf == "bias" else f"{stem}.weight"
