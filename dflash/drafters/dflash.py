"""DFlash: block-diffusion drafter that drafts a whole block in one pass.

Source: arXiv 2602.06036. The context is the target's features, projected to keys and values once,
when they are committed. The block [anchor, MASK, …, MASK] attends to the context and, in both
directions, to itself. The embedding and the output head are the target's; a draft vocabulary uses a
subset of the head's columns.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dflash.drafters import layouts_config
from dflash.drafters.dflash_config import DFlashConfig, DFlashShape
from dflash.drafters.parts import draft_vocabulary
from dflash.drafters.parts.blocks import (
    Blocks,
    block_loss,
    cut_blocks,
    sample_anchors,
    score_blocks,
)
from dflash.drafters.parts.draft_vocabulary import DraftVocabulary
from dflash.drafters.parts.one_pass import OnePassDrafter
from dflash.drafters.parts.sampler import Sampler
from dflash.kernels import implementation
from dflash.kernels.anchored_attention import anchored_attention
from dflash.kernels.block_attention import block_attention
from dflash.layers import cache as kv
from dflash.layers import rotary
from dflash.layers.linear import Embedding, Linear, RMSNorm
from dflash.layers.losses import TokenScores
from dflash.layers.transformer import TransformerLayer, grouped_attention
from dflash.parallel import parameters
from dflash.parallel.sharding import Sharding

# Parameters whose names in checkpoints do not end in ".weight".
_BARE = ("bias", "attention_sink_bias")
# Tensors that Meta's drafter for Muse Glimmer has under other names.
_ALIASES = {
    "encoder.fc.weight": "fc.weight",
    "encoder.output_norm_enc.weight": "hidden_norm.weight",
}


class DFlash(OnePassDrafter):
    """DFlash drafter, whose state is the keys and values of all committed features.

    Attributes:
      seen: Windows of the sequences' contexts, int32 [B], which narrow those of the shape; None to
        narrow nothing.
    """

    hf_architectures = ("DFlashDraftModel", "DFlashSpeculator", "MuseGlimmerAssistantModel")
    shape_class = DFlashShape
    option_names = ("block_size", "short_pass")
    prefix_cache_mode = "rows"
    ignored_checkpoint_suffixes = ("rotary_emb.inv_freq",)
    seen: jax.Array | None = None

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
          block_size: Rows to verify in a chain, or on the longest path of a tree; at most the
            trained block size. None for the trained block size.
          tree_budget: Number of drafts in a tree; None for a chain.
          short_pass: Compute only `block_size` rows per pass.
        Raises:
          ConfigError: The block size exceeds the trained one, or the budget the tree's capacity.
        """
        super().__init__(shape, dtype=dtype, sharding=sharding)
        decoder = shape.decoder
        self.set_sizes(
            shape.block_size + shape.sample_from_anchor,
            block_size,
            tree_budget,
            vocab_size=shape.num_draft_tokens,
            of="that the drafter was trained with",
        )
        # Number of rows after the anchor in a pass. Compute as many as in training by default:
        # rows attend to one another, so a shorter block makes even the first draft worse.
        rows = self.num_positions + self.first_row if short_pass else shape.block_size
        self.pass_positions = rows - 1
        build = {"dtype": dtype, "sharding": sharding}
        self.feature_layers = shape.target_layer_ids
        self.calibration = shape.calibration
        self.declare_context(**build)
        self.hidden_norm = RMSNorm(decoder.hidden_size, decoder.rms_norm_eps, **build)
        self.layers = nnx.List(
            self.make_layer(shape, **build) for _ in range(decoder.num_hidden_layers)
        )
        self.norm = RMSNorm(decoder.hidden_size, decoder.rms_norm_eps, **build)
        self._declare_ends(shape, **build)

    @property
    def first_row(self) -> int:
        """First row of the block that drafts: 1, or 0 if the anchor's row drafts too."""
        return 1 - self.shape.sample_from_anchor

    def _declare_ends(self, shape: DFlashShape, **build) -> None:
        """Declares what the drafter does not take from the target's embedding and head."""
        width, vocab_size = shape.decoder.hidden_size, shape.decoder.vocab_size
        has_own, size = shape.target_hidden_size is not None, shape.draft_vocab_size
        self.embed_tokens = Embedding(vocab_size, width, **build) if has_own else None
        self.mask_embedding = (
            parameters.declare((width,), (None,), stddev=1.0, **build)
            if shape.mask_embedding
            else None
        )
        if has_own or size is not None:
            self.lm_head = Linear(width, size or vocab_size, ("embed", "vocab"), **build)
            self.lm_head.kernel = parameters.frozen(self.lm_head.kernel)
        else:
            self.lm_head = None
        tables = None, None
        if size is not None:
            tables = draft_vocabulary.declare(size, vocab_size, self.sharding)
        self.d2t, self.t2d = tables

    @property
    def ignored_checkpoint_names(self) -> tuple[str, ...]:
        """Names of the copies of the target's weights that files of speculators hold."""
        modules = {"embed_tokens.weight": self.embed_tokens, "lm_head.weight": self.lm_head}
        modules |= {"d2t": self.d2t, "t2d": self.t2d}
        copies = [name for name, module in modules.items() if module is None]
        return (*copies, "verifier_norm.weight", "verifier_lm_head.weight")

    @classmethod
    def create(cls, config, hf, target, **build):
        completed = None if hf is None else layouts_config.with_heads(hf, target)
        return super().create(config, completed, target, **build)

    @classmethod
    def options(cls, config: DFlashConfig) -> dict[str, Any]:
        budget = None if config.tree is None else config.tree.budget
        return super().options(config) | {"tree_budget": budget}

    def declare_context(self, **build) -> None:
        """Declares the parameters that `context_rows` uses, before `hidden_norm`."""
        self.fc = self.feature_projection(len(self.feature_layers))

    def context_rows(self, features: jax.Array, *, gather: bool = False) -> list[jax.Array]:
        """Returns the rows [B, T, D] whose keys and values are the context, for each layer.

        Args:
          gather: All-gather the weights first; see `parameters.gathered`.
        """
        fc = parameters.gathered(self.fc, self.sharding) if gather else self.fc
        return [self.hidden_norm(fc(features))] * len(self.layers)

    @staticmethod
    def make_layer(shape: DFlashShape, **build) -> TransformerLayer:
        attention = grouped_attention(shape.decoder, **shape.attention_form, **build)
        return TransformerLayer(shape.decoder, attention=attention, **build)

    def init_state(self, batch, max_length):
        return self.context_cache(batch, max_length)

    def context_pages(self, num_pages, page_size):
        return self.context_cache_pages(num_pages, page_size)

    def read_rows(self, state, slot, start, count):
        return state.read_rows(slot, start, count)

    def write_rows(self, state, slot, start, rows):
        return state.write_rows(slot, start, rows)

    def draft(self, state, anchor, position, sampler, heads):
        return self.draft_fewer(self.num_draft_tokens, state, anchor, position, sampler, heads)

    def draft_fewer(self, count, state, anchor, position, sampler, heads):
        """Drafts the first tokens of the block, or a smaller tree; see `Drafter.draft_fewer`.

        A causal block runs only the rows up to the last draft; any other block runs whole, since
        its first rows attend to the later ones.
        """
        depth = min(count, self.num_positions)  # A tree is no deeper than its number of drafts.
        end = self.first_row + depth
        last = end - 1 if self.shape.causal else self.pass_positions
        hidden, _ = self.run_block(state, anchor, position, heads, num_positions=last)
        unembed = functools.partial(self._unembed, heads=heads)
        rows = hidden[:, self.first_row : end], position[:, None] + 1 + jnp.arange(depth)
        return self.propose(*rows, unembed, self.among(sampler), count), state

    def within(self, windows):
        narrowed = nnx.merge(*nnx.split(self))
        narrowed.seen = windows
        return narrowed

    def _embed(self, tokens: jax.Array, heads) -> jax.Array:
        x = self._rows(tokens, heads)
        if self.mask_embedding is None:
            return x
        is_mask = (tokens == self.shape.mask_token_id)[..., None]
        return jnp.where(is_mask, self.mask_embedding[...].astype(x.dtype), x)

    def _rows(self, tokens: jax.Array, heads) -> jax.Array:
        """Returns rows of the embedding table, scaled as the drafter's config.json says."""
        rows = (heads.table_rows if self.embed_tokens is None else self.embed_tokens)(tokens)
        scale = self.shape.input_embedding_scale
        return rows if scale == 1.0 else rows * jnp.asarray(scale, rows.dtype)

    def _unembed(self, hidden: jax.Array, heads) -> jax.Array:
        return self._head(heads, self.lm_head)(hidden)

    def _head(self, heads, own: Linear | None) -> Callable[[jax.Array], jax.Array]:
        """Returns the function from hidden states to logits, with an output head of its `own`."""
        head = heads.head_products if own is None else own.attend
        factor, bound = self.shape.output_multiplier, self.shape.final_logit_softcapping

        def unembed(hidden):
            logits = head(hidden) * factor
            return bound * jnp.tanh(logits / bound) if bound else logits

        return unembed

    def among(self, sampler: Sampler) -> Sampler:
        """Returns a sampler over the draft vocabulary, or the same one if there is none."""
        return sampler if self.d2t is None else sampler.among(self.vocabulary())

    def vocabulary(self) -> DraftVocabulary:
        """Returns the draft vocabulary, which `shape.draft_vocab_size` declares."""
        return DraftVocabulary.of(self.d2t[...], self.shape.decoder.vocab_size)

    def check_weights(self, directory: pathlib.Path) -> None:
        if self.d2t is not None:
            table = np.asarray(self.d2t.get_value())
            draft_vocabulary.check(table, self.shape.decoder.vocab_size, directory)

    def prepare_training(self, count_tokens, heads):
        """Chooses the draft vocabulary and copies its columns of the target's head."""
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
        """Runs the draft layers over the block; other arguments are those of `Drafter.draft`.

        Args:
          num_positions: Number of rows after the anchor, T - 1; None for all.
        Returns:
          hidden [B, T, D] after the final norm, and positions int32 [B, T].
        """
        count = self.pass_positions if num_positions is None else num_positions
        masked = (anchor.shape[0], count)
        mask = jnp.full(masked, self.shape.mask_token_id)
        block = jnp.concatenate([anchor[:, None], mask.astype(jnp.int32)], axis=1)
        positions = position[:, None] + jnp.arange(block.shape[1])
        cos_sin = rotary.angles(positions, self.shape.rotary)
        x = self._embed(block, heads)
        for i, layer in enumerate(self.layers):
            x, _ = layer(x, cos_sin, self._attend_context(i, state, position))
        return self.norm(x), positions

    def _attend_context(self, i: int, state: kv.StaticCache, position: jax.Array):
        """Returns the attention function of layer i over its context and the block."""
        batch, _ = kv.batch_axes(position.shape[0], self.sharding)
        rows, kv_rows = (batch, None, "heads", None), (batch, None, "kv_heads", None)
        stored = (batch, "kv_heads", None, None)
        attend = self._attention(i, block_attention, implementation.on(self.sharding))
        names = (rows, kv_rows, kv_rows, stored, stored, (batch,), ("heads",), (batch,))
        sharded = self.sharding.map(attend, names, (rows,))
        fixed = state.keys[i], state.values[i], position, self._sinks(i), self.seen
        return lambda *block: (*sharded(*block, *fixed), None)

    def _attention(self, i: int, kernel, chosen: str):
        """Returns a function from the arrays of a kernel to the outputs of layer i's attention.

        The outputs are a tuple of one array, as `Sharding.map` expects.
        """
        view, factor = self.shape.views[i], self.shape.attention_value_scale
        options = {
            "scale": self.layers[i].self_attn.scale,
            "window": view.window,
            "causal": view.causal,
            "implementation": chosen,
        }

        def attend(*arrays):
            attended = kernel(*arrays, **options)
            # Attention is linear in the values, so scaling its output scales the values.
            return (attended if factor == 1.0 else attended * factor,)

        return attend

    def _sinks(self, i: int) -> jax.Array | None:
        sinks = self.layers[i].self_attn.attention_sink_bias
        return None if sinks is None else sinks[...]

    def observe(self, state, position, tokens, num_committed, features, heads):
        return self.store_context(state, position, self.context_rows(features))

    def store_context(self, state: kv.StaticCache, position, context) -> kv.StaticCache:
        """Writes the keys and values of new rows; `context` is that of `context_rows`."""
        positions = position[:, None] + jnp.arange(context[0].shape[1])
        cos_sin = rotary.angles(positions, self.shape.rotary)
        with jax.named_scope("attention"):
            rows = [
                layer.self_attn.keys_values(seen, cos_sin)
                for layer, seen in zip(self.layers, context, strict=True)
            ]
            keys, values = zip(*rows, strict=True)
            return state.write(position, keys, values)

    def loss(self, batch, heads, key, options, *, anchors=None, remat=False):
        """Computes the loss of blocks anchored across the batch; see `Drafter.loss`.

        Args:
          anchors: First rows of the blocks; None to draw them from `key`.
        """
        anchors = anchors or sample_anchors(batch, options.num_anchors, key)
        blocks, hidden = self.run_drafted(batch, heads, anchors, remat=remat)
        hidden = hidden[:, :, self.first_row :]
        return block_loss(self._score(hidden, blocks, batch, heads, options), blocks, options)

    def run_drafted(self, batch, heads, anchors, *, remat=False) -> tuple[Blocks, jax.Array]:
        """Returns blocks of G draft positions, and the hidden states of their rows [B, A, R, D]."""
        rows = self.pass_positions + 1
        size, mask = rows + 1 - self.first_row, self.shape.mask_token_id
        blocks = cut_blocks(batch, anchors, block_size=size, mask_token_id=mask)
        run = dataclasses.replace(
            blocks, tokens=blocks.tokens[..., :rows], positions=blocks.positions[..., :rows]
        )
        return blocks, self.run_blocks(batch, run, heads, remat=remat)

    def _score(self, hidden, blocks, batch, heads, options) -> TokenScores:
        own = self.lm_head and parameters.gathered(self.lm_head, self.sharding)
        return self.score_drafted(hidden, blocks, batch, self._head(heads, own), options)

    def score_drafted(self, hidden, blocks, batch, unembed, options, **how) -> TokenScores:
        """Returns `score_blocks`, restricted to the draft vocabulary if there is one."""
        if self.d2t is None:
            return score_blocks(hidden, blocks, batch, unembed, options, **how)
        vocabulary = self.vocabulary()
        labels = vocabulary.draft_ids[blocks.labels]
        blocks = dataclasses.replace(blocks, labels=labels)
        scores = score_blocks(hidden, blocks, batch, unembed, options, **how)
        return vocabulary.without_unknown(scores, labels)

    def run_blocks(self, batch, blocks, heads, *, remat=False) -> jax.Array:
        """Runs the draft layers over A blocks of R rows per sequence: hidden [B, A, R, D].

        Features and embeddings are converted to the dtype of this module's weights.
        """
        dtype = self.norm.scale.dtype
        contexts = self.context_rows(batch.features.astype(dtype), gather=True)
        shape = blocks.tokens.shape
        of_context = rotary.angles(batch.positions, self.shape.rotary)
        of_blocks = rotary.angles(blocks.positions.reshape(shape[0], -1), self.shape.rotary)
        x = self._embed(blocks.tokens.reshape(shape[0], -1), heads).astype(dtype)
        for i, (layer, context) in enumerate(zip(self.layers, contexts, strict=True)):

            def run(x, context, i=i, layer=layer):
                layer = parameters.gathered(layer, self.sharding)
                seen = layer.self_attn.keys_values(context, of_context)
                return layer(x, of_blocks, self._attend_anchored(i, seen, batch, blocks))[0]

            x = (jax.checkpoint(run) if remat else run)(x, context)
        return self.norm(x).reshape(*shape, -1)

    def _attend_anchored(self, i: int, seen, batch, blocks):
        """Returns the attention function of layer i: each block over its context and itself."""
        names, _ = kv.batch_axes(blocks.tokens.shape[0], self.sharding)
        rows, kv_rows = (names, None, None, "heads", None), (names, None, None, "kv_heads", None)
        stored, per_row = (names, None, "kv_heads", None), (names, None)
        chosen = implementation.for_platform(self.sharding.platform)
        sharded = self.sharding.map(
            self._attention(i, anchored_attention, chosen),
            (rows, kv_rows, kv_rows, stored, stored, per_row, per_row, per_row, ("heads",)),
            (rows,),
        )
        fixed = *seen, blocks.anchors.index, blocks.anchors.valid, batch.segment_ids, self._sinks(i)

        def attend(*flat):
            shape = blocks.tokens.shape
            split = [array.reshape(*shape, *array.shape[2:]) for array in flat]
            (attended,) = sharded(*split, *fixed)
            return attended.reshape(flat[0].shape), None

        return attend

    @staticmethod
    def known_name(name: str) -> str:
        """Returns the expected name of a stored tensor; see `safetensors_io.load`."""
        return _ALIASES.get(name, name)

    @staticmethod
    def checkpoint_name(path: str) -> str:
        stem, _, leaf = path.rpartition(".")
        return path if leaf in _BARE or not stem else f"{stem}.weight"
