"""LiLiCorr: DFlash that chooses among likely tokens by scores of their transitions.

Source: arXiv 2608.20530 and NVIDIA/Model-Optimizer (`modeling_lilicorr.py`). A network scores all
transitions between the k most likely tokens of adjacent draft positions at once; drafts are then
drawn from left to right. The layers may have DFlash2's convolutions.
"""

import dataclasses

import jax
import jax.numpy as jnp

from dflash.drafters.dflash2 import DFlash2, set_rows
from dflash.drafters.lilicorr_config import LiLiCorrShape
from dflash.drafters.parts.blocks import (
    Blocks,
    block_loss,
    rows_before,
    sample_anchors,
)
from dflash.drafters.parts.conditioned import ConditionedDFlash
from dflash.drafters.parts.draft_vocabulary import Shortlist
from dflash.drafters.parts.lattice import Lattice, LatticeNetwork, Nodes
from dflash.layers import cache as kv
from dflash.layers import losses
from dflash.layers.losses import TokenScores

_NETWORK = "lilicorr."
# Parts of the network whose modules have other names in files.
_RENAMED = {
    "feature_norm.": "feature_mlp.0.",
    "feature_up.": "feature_mlp.1.",
    "feature_down.": "feature_mlp.3.",
    ".up.": ".mlp.0.",
    ".down.": ".mlp.2.",
    ".out_proj.": ".attn.out_proj.",
    ".in_proj.weight": ".attn.in_proj_weight",
    ".in_proj.bias": ".attn.in_proj_bias",
}
_TABLES = ("slot_embedding", "rank_embedding", "relative_slot_bias", "same_slot_bias")
_CHOICE_WEIGHT = 0.25  # Weight of the loss of transitions, as in ModelOpt.


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LiLiCorrState:
    """State of a LiLiCorr drafter for B sequences.

    Attributes:
      context: Keys and values of all committed features.
      row: Last row of the context, from which these were computed, [B, D].
    """

    context: kv.StaticCache
    row: jax.Array


class LiLiCorr(ConditionedDFlash):
    """LiLiCorr drafter."""

    hf_architectures = ("LiLiCorrDraftModel",)
    shape_class = LiLiCorrShape

    @property
    def most_candidates(self):
        return self.shape.lilicorr_candidate_topk

    def declare_head(self, **build):
        self.lilicorr = LatticeNetwork(self.shape, **build)
        set_rows(self.layers, self.pass_positions + 1)

    make_layer = staticmethod(DFlash2.make_layer)

    def init_state(self, batch, max_length):
        name, _ = kv.batch_axes(batch, self.sharding)
        width = self.shape.decoder.hidden_size
        row = self.sharding.abstract((batch, width), (name, None), self.dtype)
        return LiLiCorrState(super().init_state(batch, max_length), row)

    def read_rows(self, state, slot, start, count):
        return super().read_rows(state.context, slot, start, count)

    def write_rows(self, state, slot, start, rows):
        context = super().write_rows(state.context, slot, start, rows)
        return dataclasses.replace(state, context=context)

    def run_block(self, state, anchor, position, heads, *, num_positions=None):
        where = state.context, anchor, position, heads
        return super().run_block(*where, num_positions=num_positions)

    def observe(self, state, position, tokens, num_committed, features, heads):
        rows = self.context_rows(features)
        last = jnp.maximum(num_committed - 1, 0)[:, None, None]
        newest = jnp.take_along_axis(rows[0], last, axis=1)[:, 0].astype(state.row.dtype)
        row = jnp.where((num_committed > 0)[:, None], newest, state.row)
        return LiLiCorrState(self.store_context(state.context, position, rows), row)

    def run_positions(self, count, state, anchor, position, heads):
        block, _ = self.run_block(state, anchor, position, heads)
        hidden = block[:, 1:]
        lattice = self._lattice(self._unembed(hidden, heads))
        embedded = self._embed_candidates(lattice, heads)
        nodes = self.lilicorr(lattice, embedded, hidden, anchor, state.row)
        return *jax.tree.map(lambda x: x[:, :count], nodes), ()

    def _lattice(self, base: jax.Array) -> Lattice:
        """Returns the most likely tokens by the base logits, float32 [B, G, V]."""
        values, tokens = jax.lax.top_k(base, self.shape.lilicorr_candidate_topk)
        log_probs = values - jax.nn.logsumexp(base, axis=-1, keepdims=True)
        if self.d2t is not None:
            tokens = self.vocabulary().name(tokens)
        return Lattice(tokens, log_probs)

    def _embed_candidates(self, lattice: Lattice, heads) -> jax.Array:
        tokens = lattice.tokens
        embedded = self._embed(tokens.reshape(tokens.shape[0], -1), heads)
        return jax.lax.stop_gradient(embedded).reshape(*tokens.shape, -1)

    def condition(self, previous, prepared: Nodes, memory):
        """Returns the vectors of transitions from the previous tokens; has no memory."""
        index = jnp.argmax(prepared.tokens == previous[..., None], axis=-1)[..., None, None]
        return jnp.take_along_axis(prepared.vectors, index, axis=-2)[..., 0, :], memory

    def correct(self, choices: Nodes, vectors, sampler):
        """Returns logits [B, T, k] of transitions to the candidates, and a sampler among these."""
        choices = jax.tree.map(lambda x: x[:, :, : self.num_candidates], choices)
        shortlist = Shortlist(choices.tokens, self.shape.decoder.vocab_size)
        return self._logits(choices, vectors), sampler.among(shortlist)

    def _logits(self, choices: Nodes, vectors: jax.Array) -> jax.Array:
        """Returns the scaled cosines of vectors [B, T, r] and of the candidates [B, T or 1, k]."""
        cosines = jnp.matmul(choices.vectors, vectors[..., None])[..., 0]
        return self.shape.lilicorr_logit_scale * cosines

    def loss(self, batch, heads, key, options, *, anchors=None, remat=False):
        """Adds the cross-entropy of transitions to DFlash's loss; see `DFlash.loss`.

        A draft position has such a loss if its label and all labels before it are candidates. The
        accuracy is that of the chosen candidates. ModelOpt also penalizes candidates that the
        target's logits reject; this loss does not.
        """
        anchors = anchors or sample_anchors(batch, options.num_anchors, key)
        blocks, hidden = self.run_drafted(batch, heads, anchors, remat=remat)
        hidden = hidden[:, :, 1:]
        scores = self._score(hidden, blocks, batch, heads, options)
        base, _ = block_loss(scores, blocks, options)
        chosen = self._score_choices(hidden, blocks, batch, heads, options)
        choice, metrics = block_loss(chosen._replace(nll=scores.nll), blocks, options)
        loss = base + _CHOICE_WEIGHT * choice
        return loss, metrics | {"loss": loss, "base_loss": base, "choice_loss": choice}

    def _score_choices(self, hidden, blocks: Blocks, batch, heads, options) -> TokenScores:
        """Scores the candidates [B, A, G] given the true tokens before them."""
        count, anchored, slots, width = hidden.shape
        lattice = losses.in_chunks(
            lambda rows: self._lattice(self._unembed(rows, heads)),
            (hidden.reshape(count, -1, width),),
            options.chunk_tokens,
        )
        lattice = jax.tree.map(lambda x: x.reshape(count * anchored, slots, -1), lattice)
        before, nodes = self.lilicorr(
            lattice,
            self._embed_candidates(lattice, heads),
            hidden.reshape(-1, slots, width),
            blocks.tokens[..., 0].reshape(-1),
            *self._rows_before(batch, blocks),
        )
        labels = blocks.labels.reshape(-1, slots)
        first = blocks.tokens[..., 0].reshape(-1, 1)
        previous = jnp.concatenate([first, labels[:, :-1]], axis=1)
        logits = self._logits(nodes, self.condition(previous, before, ())[0])
        hits = nodes.tokens == labels[..., None]
        known = jnp.cumprod(hits.any(axis=-1), axis=1) > 0
        nll = jax.nn.logsumexp(logits, axis=-1) - jnp.sum(jnp.where(hits, logits, 0), axis=-1)
        correct = jnp.take_along_axis(hits, logits.argmax(axis=-1)[..., None], axis=-1)[..., 0]
        scores = TokenScores(jnp.where(known, nll, 0), nll, correct)
        return jax.tree.map(lambda score: score.reshape(blocks.labels.shape), scores)

    def _rows_before(self, batch, blocks: Blocks) -> tuple[jax.Array, jax.Array]:
        """Returns the context rows [B · A, D] before the anchors, and whether there are any."""
        dtype = self.norm.scale.dtype
        rows = self.context_rows(batch.features.astype(dtype), gather=True)[0]
        before, is_inside = rows_before(batch, blocks.anchors)
        context = jnp.take_along_axis(rows, before[..., None], axis=1)
        return context.reshape(-1, rows.shape[-1]), is_inside.reshape(-1)

    @staticmethod
    def checkpoint_name(path: str) -> str:
        if not path.startswith(_NETWORK):
            return DFlash2.checkpoint_name(path)
        stem, _, leaf = path.rpartition(".")
        name = path if leaf == "bias" or leaf in _TABLES else f"{stem}.weight"
        for ours, theirs in _RENAMED.items():
            name = name.replace(ours, theirs)
        return name
