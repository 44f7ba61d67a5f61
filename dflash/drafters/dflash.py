"""DFlash: a block-diffusion drafter that drafts a whole block in one pass.

Source: arXiv 2602.06036. The context is the target's own features, projected once when they are
committed and never updated; the block [anchor, MASK, …, MASK] attends to it and, in both
directions, to itself. Embedding and output head are the target's; with a draft vocabulary, some
columns of that head.
"""

import dataclasses
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dflash.drafters.dflash_config import DFlashConfig, DFlashShape
from dflash.drafters.parts import draft_vocabulary
from dflash.drafters.parts.blocks import block_loss, cut_blocks, sample_anchors, score_blocks
from dflash.drafters.parts.draft_vocabulary import DraftVocabulary
from dflash.drafters.parts.one_pass import OnePassDrafter
from dflash.kernels import implementation
from dflash.kernels.anchored_attention import anchored_attention
from dflash.kernels.block_attention import block_attention
from dflash.layers import cache as kv
from dflash.layers import rotary
from dflash.layers.linear import Linear, RMSNorm
from dflash.layers.losses import TokenScores
from dflash.layers.transformer import TransformerLayer
from dflash.parallel import parameters
from dflash.parallel.sharding import Sharding


class DFlash(OnePassDrafter):
    """The drafter; its state is the keys and values of every committed position's features."""

    hf_architectures = ("DFlashDraftModel",)
    shape_class = DFlashShape
    prefix_cache_mode = "rows"
    ignored_checkpoint_names = ()
    ignored_checkpoint_suffixes = ("rotary_emb.inv_freq",)

    def __init__(
        self,
        shape: DFlashShape,
        *,
        dtype: jnp.dtype,
        sharding: Sharding,
        block_size: int | None = None,
        tree_budget: int | None = None,
        short_pass: bool = False,
    ):
        """Builds an abstract drafter.

        Args:
          shape: of the network.
          dtype: of weights and state.
          sharding: where they live.
          block_size: rows to verify in a chain, and the depth of a tree, at most the trained block
            size; None for that one.
          tree_budget: drafts in a tree; None for a chain.
          short_pass: compute no more rows than `block_size` asks for.
        Raises:
          ConfigError: block_size exceeds the trained one, or tree_budget the tree's capacity.
        """
        super().__init__(shape, dtype=dtype, sharding=sharding)
        decoder = shape.decoder
        self.set_sizes(
            shape.block_size,
            block_size,
            tree_budget,
            vocab_size=shape.draft_vocab_size or decoder.vocab_size,
            of="that the drafter was trained with",
        )
        # Draft positions that a pass computes. Rows see one another: with fewer of them than in
        # training, drafts get worse from the first one on.
        self.pass_positions = self.num_positions if short_pass else shape.block_size - 1
        build = {"dtype": dtype, "sharding": sharding}
        self.feature_layers = shape.target_layer_ids
        self.fc = self.feature_projection(len(self.feature_layers))
        self.hidden_norm = RMSNorm(decoder.hidden_size, decoder.rms_norm_eps, **build)
        self.layers = nnx.List(
            self.make_layer(shape, **build) for _ in range(decoder.num_hidden_layers)
        )
        self.norm = RMSNorm(decoder.hidden_size, decoder.rms_norm_eps, **build)
        size = shape.draft_vocab_size
        if size is None:
            self.lm_head = self.d2t = self.t2d = None
        else:
            self.lm_head = Linear(decoder.hidden_size, size, ("embed", "vocab"), **build)
            self.lm_head.kernel = parameters.frozen(self.lm_head.kernel)
            self.d2t, self.t2d = draft_vocabulary.declare(size, decoder.vocab_size, sharding)

    @classmethod
    def options(cls, config: DFlashConfig) -> dict[str, Any]:
        """See `WeightedDrafter.options`."""
        budget = None if config.tree is None else config.tree.budget
        sizes = {"block_size": config.block_size, "short_pass": config.short_pass}
        return {**sizes, "tree_budget": budget}

    @staticmethod
    def make_layer(shape: DFlashShape, **build) -> TransformerLayer:
        """One draft layer."""
        return TransformerLayer(
            shape.decoder,
            qk_norm=True,
            takes_context=True,
            has_sinks=shape.attention_sink_bias,
            **build,
        )

    def init_state(self, batch, max_length):
        """Abstract context; see `WeightedDrafter.context_cache`."""
        return self.context_cache(batch, max_length)

    def context_pages(self, num_pages, page_size):
        """See `Drafter.context_pages`."""
        return self.context_cache_pages(num_pages, page_size)

    def read_rows(self, state, slot, start, count):
        """See `Drafter.read_rows`."""
        return state.read_rows(slot, start, count)

    def write_rows(self, state, slot, start, rows):
        """See `Drafter.write_rows`."""
        return state.write_rows(slot, start, rows)

    def draft(self, state, anchor, position, sampler, heads):
        """Drafts a chain or a tree in one pass; see `Drafter.draft`."""
        return self.draft_fewer(self.num_positions, state, anchor, position, sampler, heads)

    def draft_fewer(self, count, state, anchor, position, sampler, heads):
        """Runs the whole block, and drafts its first tokens; see `Drafter.draft_fewer`.

        Rows that see those before them alone are run as far as they are wanted.
        """
        last = count if self.shape.is_causal else self.pass_positions
        hidden, positions = self.run_block(state, anchor, position, heads, num_positions=last)
        first = slice(1, count + 1)
        if self.lm_head is None:
            logits = heads.unembed(hidden[:, first])
        else:
            logits = self.lm_head.attend(hidden[:, first])
            sampler = sampler.among(self._vocabulary())
        return self.propose(logits, positions[:, first], sampler), state

    def _vocabulary(self) -> DraftVocabulary:
        return DraftVocabulary.of(self.d2t[...], self.shape.decoder.vocab_size)

    def check_weights(self, directory: pathlib.Path) -> None:
        """Checks the table that was loaded from a checkpoint; see `draft_vocabulary.check`."""
        if self.d2t is not None:
            table = np.asarray(self.d2t.get_value())
            draft_vocabulary.check(table, self.shape.decoder.vocab_size, directory)

    def prepare_training(self, count_tokens, heads):
        """Fixes the draft vocabulary and copies its columns of the target's head."""
        size = self.shape.draft_vocab_size
        if size is None:
            return
        tables = draft_vocabulary.choose(size, count_tokens)
        parameters.assign_host(self, tables)
        like = self.lm_head.kernel.get_value()
        place = jax.jit(lambda columns: columns.astype(like.dtype), out_shardings=like.sharding)
        columns = place(heads.head_columns(np.flatnonzero(tables["t2d"])))
        parameters.assign(self, {"lm_head.kernel": columns})

    def run_block(self, state, anchor, position, heads, *, num_positions=None):
        """The block pass: hidden states [B, T, D] after the final norm, positions int32 [B, T].

        Args:
          num_positions: rows behind the anchor, T - 1; None for all.
        """
        masked = (anchor.shape[0], num_positions or self.pass_positions)
        mask = jnp.full(masked, self.shape.mask_token_id)
        block = jnp.concatenate([anchor[:, None], mask.astype(jnp.int32)], axis=1)
        positions = position[:, None] + jnp.arange(block.shape[1])
        cos_sin = rotary.angles(positions, self.shape.rotary)
        x = heads.embed(block)
        for i, layer in enumerate(self.layers):
            x, _ = layer(x, cos_sin, self._attend_context(i, state, position))
        return self.norm(x), positions

    def _attend_context(self, i: int, state: kv.StaticCache, position: jax.Array):
        """Attention of layer i over its context and, both ways, over the block."""
        batch, _ = kv.batch_axes(position.shape[0], self.sharding)
        rows, kv_rows = (batch, None, "heads", None), (batch, None, "kv_heads", None)
        stored = (batch, "kv_heads", None, None)
        sinks, of_sinks = self._sinks(i)
        attend = self._attention(i, block_attention)
        names = (rows, kv_rows, kv_rows, stored, stored, (batch,), *of_sinks)
        sharded = self.sharding.map(attend, names, (rows,))
        fixed = state.keys[i], state.values[i], position, *sinks
        return lambda *block: (*sharded(*block, *fixed), None)

    def _attention(self, i: int, kernel):
        """What layer i makes of the arrays that a kernel takes: the outputs, for `Sharding.map`."""
        view, factor = self.shape.views[i], self.shape.attention_value_scale
        options = {
            "scale": self.layers[i].self_attn.scale,
            "window": view.window,
            "causal": view.causal,
            "implementation": implementation.for_platform(self.sharding.platform),
        }

        def attend(*arrays):
            attended = kernel(*arrays, **options)
            # Sums of values, so that the factor on these is one on them.
            return (attended if factor == 1.0 else attended * factor,)

        return attend

    def _sinks(self, i: int) -> tuple[list[jax.Array], list[tuple[str]]]:
        """The sinks of layer i and the names of their dimension, in lists; empty without any."""
        sinks = self.layers[i].self_attn.attention_sink_bias
        return ([], []) if sinks is None else ([sinks[...]], [("heads",)])

    def observe(self, state, position, tokens, num_committed, features, heads):
        """Projects features to keys and values, once, and stores them; see `Drafter.observe`."""
        context = self.hidden_norm(self.fc(features))
        positions = position[:, None] + jnp.arange(features.shape[1])
        cos_sin = rotary.angles(positions, self.shape.rotary)
        with jax.named_scope("attention"):
            rows = [layer.self_attn.keys_values(context, cos_sin) for layer in self.layers]
            keys, values = zip(*rows, strict=True)
            return state.write(position, keys, values)

    def loss(self, batch, heads, key, options, *, anchors=None, remat=False):
        """Drafts blocks anchored all over the batch; see `Drafter.loss`.

        Args:
          anchors: first positions of the blocks; None to draw them from `key`.
        """
        if anchors is None:
            anchors = sample_anchors(batch, options.num_anchors, key)
        blocks = cut_blocks(
            batch,
            anchors,
            block_size=self.pass_positions + 1,
            mask_token_id=self.shape.mask_token_id,
        )
        hidden = self.run_blocks(batch, blocks, heads, remat=remat)
        return block_loss(self._score(hidden, blocks, batch, heads, options), blocks, options)

    def _score(self, hidden, blocks, batch, heads, options) -> TokenScores:
        """See `score_blocks`; over the draft vocabulary, the target's distribution too."""
        if self.lm_head is None:
            return score_blocks(hidden, blocks, batch, heads.unembed, options)
        vocabulary = self._vocabulary()
        labels = vocabulary.draft_ids[blocks.labels]
        blocks = dataclasses.replace(blocks, labels=labels)
        unembed = parameters.gathered(self.lm_head, self.sharding).attend
        scores = score_blocks(hidden, blocks, batch, unembed, options)
        return vocabulary.without_unknown(scores, labels)

    def run_blocks(self, batch, blocks, heads, *, remat=False) -> jax.Array:
        """The block pass over A blocks of R rows per sequence at once: hidden [B, A, R, D].

        Computes in the dtype of this module's weights, whatever that of features and embeddings.
        """
        dtype = self.fc.kernel.dtype
        fc = parameters.gathered(self.fc, self.sharding)
        context = self.hidden_norm(fc(batch.features.astype(dtype)))
        shape = blocks.tokens.shape
        of_context = rotary.angles(batch.positions, self.shape.rotary)
        of_blocks = rotary.angles(blocks.positions.reshape(shape[0], -1), self.shape.rotary)
        x = heads.embed(blocks.tokens.reshape(shape[0], -1)).astype(dtype)
        for i, layer in enumerate(self.layers):

            def run(x, context, i=i, layer=layer):
                layer = parameters.gathered(layer, self.sharding)
                seen = layer.self_attn.keys_values(context, of_context)
                return layer(x, of_blocks, self._attend_anchored(i, seen, batch, blocks))[0]

            x = (jax.checkpoint(run) if remat else run)(x, context)
        return self.norm(x).reshape(*shape, -1)

    def _attend_anchored(self, i: int, seen, batch, blocks):
        """Attention of layer i of each block over the context before it, and over itself."""
        names, _ = kv.batch_axes(blocks.tokens.shape[0], self.sharding)
        rows, kv_rows = (names, None, None, "heads", None), (names, None, None, "kv_heads", None)
        stored, per_row = (names, None, "kv_heads", None), (names, None)
        sinks, of_sinks = self._sinks(i)
        sharded = self.sharding.map(
            self._attention(i, anchored_attention),
            (rows, kv_rows, kv_rows, stored, stored, per_row, per_row, per_row, *of_sinks),
            (rows,),
        )
        fixed = *seen, blocks.anchors.index, blocks.anchors.valid, batch.segment_ids, *sinks

        def attend(*flat):
            shape = blocks.tokens.shape
            split = [array.reshape(*shape, *array.shape[2:]) for array in flat]
            (attended,) = sharded(*split, *fixed)
            return attended.reshape(flat[0].shape), None

        return attend

    @staticmethod
    def checkpoint_name(path: str) -> str:
        """Name in a Hugging Face checkpoint of the parameter at a dotted path of this module."""
        stem, _, name = path.rpartition(".")
        return path if name == "attention_sink_bias" or not stem else f"{stem}.weight"
