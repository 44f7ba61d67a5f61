"""Decoder-only network that all target families share.

A family sets a few class attributes, as in qwen3.py and llama3.py, and overrides the methods that
differ; see docs/targets.md.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dflash.checkpoints import defaults_config, hf_config
from dflash.config.schema import AUTO, TargetArchitecture
from dflash.kernels import unembed_tiles
from dflash.kernels.packing import Packing
from dflash.kernels.unembed_tiles import Noise
from dflash.layers import cache as kv
from dflash.layers import losses, rotary
from dflash.layers.attention import Attention
from dflash.layers.linear import Embedding, Linear, RMSNorm
from dflash.layers.losses import TrainBatch
from dflash.layers.mlp import Mlp
from dflash.layers.recurrent_state import RecurrentSpec, RecurrentState
from dflash.layers.transformer import (
    TargetAttention,
    TransformerLayer,
    grouped_attention,
    run_layer,
)
from dflash.parallel import parameters
from dflash.parallel.sharding import Sharding


class TargetOutput(NamedTuple):
    """Result of one forward pass of the target.

    Attributes:
      hidden: Hidden states after the final norm, [B, T, D]. `unembed` turns selected rows into
        logits, since a prompt needs only one row of them.
      features: Residual stream after each of the C feature layers, concatenated, [B, T, C·D].
      cache: Cache with the T new rows.
    """

    hidden: jax.Array
    features: jax.Array
    cache: kv.PagedCache


class Decoder(nnx.Module):
    """Target model: maps tokens to hidden states and features, on top of a paged cache.

    Subclasses set the class attributes and override the methods that differ, such as `make_mlp`.
    """

    hf_architectures: ClassVar[tuple[str, ...]]
    hf_model_type: ClassVar[str]
    qk_norm: ClassVar[bool]
    norm_class: ClassVar[type[RMSNorm]] = RMSNorm
    layer_class: ClassVar[type[TransformerLayer]] = TransformerLayer
    # Whether MaxText alternates the halves of heads; see `checkpoints.namings.maxtext`. None
    # if MaxText's weights of the family are not supported.
    maxtext_interleaves_heads: ClassVar[bool | None] = None
    # A family with fields of its own sets its subclass of `TargetArchitecture`.
    architecture_class: ClassVar[type[TargetArchitecture]] = TargetArchitecture
    # Tensors that some checkpoints store, but this code computes.
    ignored_checkpoint_suffixes: ClassVar[tuple[str, ...]] = ("rotary_emb.inv_freq",)

    def __init__(self, arch: TargetArchitecture, *, dtype: jnp.dtype, sharding: Sharding):
        self.arch = arch
        self.dtype = jnp.dtype(dtype)
        self.sharding = sharding
        self.adapters: tuple[str, ...] = ()  # Names; see `loading.adapters`.
        build = {"dtype": self.dtype, "sharding": sharding}
        self.embed_tokens = Embedding(arch.vocab_size, arch.hidden_size, **build)
        self.layers = nnx.List(self.make_layer(i, **build) for i in range(arch.num_hidden_layers))
        self.norm = self.norm_class(arch.hidden_size, arch.rms_norm_eps, **build)
        self.lm_head = None if arch.tie_word_embeddings else self._make_head()

    def _make_head(self) -> Linear:
        sizes = self.arch.hidden_size, self.arch.vocab_size
        return Linear(*sizes, ("embed", "vocab"), dtype=self.dtype, sharding=self.sharding)

    def make_layer(self, i: int, **build) -> nnx.Module:
        """Returns layer `i`, a `TransformerLayer` or alike; `build` has `dtype` and `sharding`."""
        return self.layer_class(
            self.arch,
            attention=self.make_attention(i, **build),
            mlp=self.make_mlp(i, **build),
            norm_class=self.norm_class,
            **build,
        )

    def make_attention(self, i: int, **build) -> TargetAttention:
        """Returns the attention of layer `i`."""
        return grouped_attention(
            self.arch, qk_norm=self.qk_norm, norm_class=self.norm_class, **build
        )

    def make_mlp(self, i: int, **build) -> nnx.Module:
        """Returns the MLP of layer `i`, a module from [B, ..., D] to [B, ..., D]."""
        return Mlp(self.arch.hidden_size, self.arch.intermediate_size, **build)

    def rotary_angles(self, positions: jax.Array) -> Any:
        """Returns cos and sin of positions int32 [B, T], of which layers receive `layer_angles`."""
        return rotary.angles(positions, self.arch)

    def layer_angles(self, i: int, angles: Any) -> Any:
        """Returns what the attention of layer `i` receives of the result of `rotary_angles`."""
        return angles

    def __call__(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        cache: kv.PagedCache,
        *,
        feature_layers: tuple[int, ...] = (),
        tree_mask: jax.Array | None = None,
        count: jax.Array | None = None,
        packing: Packing | None = None,
        adapters: jax.Array | None = None,
    ) -> TargetOutput:
        """Runs T new rows per sequence on top of its cached context.

        Recurrent state advances by the first `count` rows. If the number of accepted rows is not
        known yet, `PagedCache.commit` advances it afterwards; pages are written at once.

        Args:
          tokens: int32 [B, T].
          positions: int32 [B, T]; for rotary embedding. Row r is stored at cache position
            positions[:, 0] + r, which for a chain is its position.
          cache: Cache that holds every position below positions[:, 0].
          feature_layers: Layers whose outputs become features, in the order of concatenation; -1
            for the embedding.
          tree_mask: bool [B, T, T]; new rows that each new row sees. None is causal.
          count: int32 [B]; number of rows to commit at once, the first ones of a chain. None if
            they are verified first.
          packing: Packing of the rows that are computed; hidden states and features are then packed
            rows. None computes all T rows of every sequence.
          adapters: int32 [B]; number of each sequence's adapter, from 1, or 0 for none. None if the
            target has no adapters, or to leave them out.
        """
        context = positions[:, 0], tree_mask, count, packing
        by_layer = zip(cache.layers, cache.tables, strict=True)
        seen = [(cached, table, *context) for cached, table in by_layer]
        by_row = None
        if self.adapters and adapters is not None:
            by_row = adapters[:, None] if packing is None else packing.spread(adapters)
        if packing is not None:
            tokens, positions = packing.pack(tokens), packing.pack(positions)
        hidden, features, layers = self._run_layers(
            tokens, positions, _attend_cached, seen, feature_layers, adapters=by_row
        )
        return TargetOutput(hidden, features, dataclasses.replace(cache, layers=tuple(layers)))

    def forward(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        segment_ids: jax.Array,
        *,
        feature_layers: tuple[int, ...] = (),
        remat: bool = False,
    ) -> tuple[jax.Array, jax.Array]:
        """Runs whole packed rows without a cache, for training and for features in bulk.

        The other arguments are those of `__call__`.

        Args:
          segment_ids: int32 [B, T]; each row sees earlier rows with the same id. 0 is padding,
            whose outputs are finite but meaningless.
          remat: Keep one activation per layer for the backward pass, and recompute the others.
        Returns:
          hidden [B, T, D] after the final norm, features [B, T, C·D].
        """
        seen = [(segment_ids,)] * len(self.layers)
        hidden, features, _ = self._run_layers(
            tokens, positions, _attend_packed, seen, feature_layers, gather=True, remat=remat
        )
        return hidden, features

    def loss(
        self, batch: TrainBatch, *, remat: bool = False
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Returns the mean cross-entropy of supervised tokens given earlier ones of their document.

        Args:
          batch: Packed rows; features and hidden states are not read.
          remat: See `forward`.
        Returns:
          loss float32 [], and metrics, each float32 []: "loss"; "token_accuracy"; "weight", the
          number of tokens that the loss is a mean over.
        """
        hidden, _ = self.forward(batch.tokens, batch.positions, batch.segment_ids, remat=remat)
        # Keep the last row, which has no next token, so that rows divide into even chunks.
        last = jnp.arange(batch.tokens.shape[1]) == batch.tokens.shape[1] - 1
        labels, mask, segments = (
            jnp.roll(array, -1, axis=1)
            for array in (batch.tokens, batch.loss_mask, batch.segment_ids)
        )
        counted = (mask != 0) & (segments == batch.segment_ids) & (segments != 0) & ~last
        scores = losses.score_tokens(hidden, labels, self.unembed)
        loss = losses.mean_over(scores.objective, counted)
        metrics = {
            "loss": loss,
            "token_accuracy": losses.mean_over(scores.correct, counted),
            "weight": counted.sum(dtype=jnp.float32),
        }
        return loss, metrics

    def _run_layers(self, tokens, positions, attention_of, seen, feature_layers, **how):
        """Returns hidden states [B, T, D], features [B, T, C·D], and attention states."""
        angles = self.rotary_angles(positions)
        x = self.embed(tokens)
        tapped = {-1: x}
        results = []
        for i, (layer, arrays) in enumerate(zip(self.layers, seen, strict=True)):
            layer_angles = self.layer_angles(i, angles)
            x, result = run_layer(layer, x, layer_angles, attention_of, *arrays, **how)
            results.append(result)
            if i in feature_layers:
                tapped[i] = x
        none = jnp.zeros((*tokens.shape, 0), x.dtype)
        features = jnp.concatenate([tapped[i] for i in feature_layers] or [none], axis=-1)
        return self.norm(x), features, results

    def embed(self, tokens: jax.Array) -> jax.Array:
        """Returns the embeddings [B, T, D] of tokens int32 [B, T]."""
        return self.table_rows(tokens)

    def table_rows(self, tokens: jax.Array) -> jax.Array:
        """Returns the rows of the embedding table, of which a family may scale its embeddings."""
        batch, _ = kv.batch_axes(tokens.shape[0], self.sharding)
        return self.sharding.constrain(self.embed_tokens(tokens), batch, None, None)

    def unembed(self, hidden: jax.Array) -> jax.Array:
        """Returns logits float32 [B, T, V] of hidden states [B, T, D] after the final norm."""
        return self.finish_logits(self.head_products(hidden))

    def finish_logits(self, products: jax.Array) -> jax.Array:
        """Returns the logits of products with the output head, float32 [B, T, any number]."""
        return products

    def unembeds_in_tiles(self, hidden: jax.Array) -> bool:
        """Returns whether `unembed_argmax` is preferable to logits of all rows [B, T, D]."""
        sequences, rows, _ = hidden.shape
        batch, _ = kv.batch_axes(sequences, self.sharding)
        return unembed_tiles.pays(sequences * rows, self.arch.vocab_size, batch, self.sharding)

    def unembed_argmax(
        self, hidden: jax.Array, noise: Noise | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the likeliest token of each row of hidden states [B, T, D], without all logits.

        Args:
          noise: Noise to add to the logits.
        Returns:
          Tokens int32 [B, T], and whether their logits are finite, bool [B, T].
        """
        head, transposed = (self.lm_head or self.embed_tokens).head
        with jax.named_scope("unembed"):
            return unembed_tiles.unembed_argmax(
                hidden,
                head,
                noise,
                transposed=transposed,
                finish=self.finish_logits,
                batch=kv.batch_axes(hidden.shape[0], self.sharding)[0],
                sharding=self.sharding,
            )

    def head_products(self, hidden: jax.Array) -> jax.Array:
        """Returns the products with the output head, of which a family may bound its logits."""
        with jax.named_scope("unembed"):
            logits = (self.lm_head or self.embed_tokens).attend(hidden)
            batch, _ = kv.batch_axes(hidden.shape[0], self.sharding)
            return self.sharding.constrain(logits, batch, None, "vocab")

    def gather_head(self) -> None:
        """Gathers the output head in place, once for all its users; see `parameters.gathered`.

        For a tied embedding, it gathers a transposed copy, in the layout that matmuls read.
        """
        if self.sharding.mesh.size == 1:
            return
        if self.lm_head is None:
            self.lm_head = nnx.data(self._make_head())
            self.lm_head.kernel.set_value(self.embed_tokens.embedding[...].T)
        self.lm_head = parameters.gathered(self.lm_head, self.sharding)

    def head_columns(self, tokens: np.ndarray) -> jax.Array:
        """Returns the columns [D, Q] of the output head for `tokens` int [Q]."""
        return (self.lm_head or self.embed_tokens).columns(tokens)

    def new_cache(
        self,
        *,
        batch: int,
        pages_per_sequence: int,
        num_pages: int,
        page_size: int,
        kv_dtype: str = AUTO,
        ring: kv.Ring | None = None,
    ) -> kv.PagedCache:
        """Returns an abstract paged cache for `batch` sequences; see `DecodeConfig.kv_dtype`.

        Layers with a window use the pages of `ring`, if given.
        """
        quantized = kv_dtype != AUTO
        return kv.paged_cache(
            [layer.self_attn.cache_spec() for layer in self.layers],
            batch=batch,
            pages_per_sequence=pages_per_sequence,
            num_pages=num_pages,
            page_size=page_size,
            dtype=jnp.dtype(kv_dtype) if quantized else self.dtype,
            quantized=quantized,
            ring=ring,
            sharding=self.sharding,
        )

    @property
    def window(self) -> int | None:
        """Largest window of the layers that have one; None if all see all positions."""
        windows = (kv.window_of(layer.self_attn.cache_spec()) for layer in self.layers)
        return max((window for window in windows if window is not None), default=None)

    @property
    def has_recurrent_state(self) -> bool:
        """Returns whether layers keep state that only exists at the end of a sequence."""
        specs = (layer.self_attn.cache_spec() for layer in self.layers)
        return any(isinstance(spec, RecurrentSpec) for spec in specs)

    @property
    def ignored_checkpoint_names(self) -> tuple[str, ...]:
        """Returns names of tensors beside the parameters, such as the copy of a tied head."""
        return tuple(self.checkpoint_copies)

    @property
    def checkpoint_copies(self) -> dict[str, str]:
        """Returns tensors that a checkpoint may hold a second time, by the copy's name."""
        return {"lm_head.weight": "model.embed_tokens.weight"} if self.lm_head is None else {}

    @staticmethod
    def checkpoint_name(path: str) -> str:
        """Returns the Hugging Face checkpoint's name of the parameter at a dotted path."""
        stem, _, leaf = path.rpartition(".")
        name = path if leaf == "bias" else f"{stem}.weight"
        return name if stem == "lm_head" else f"model.{name}"

    @classmethod
    def architecture_from_hf(cls, config: Mapping[str, Any]) -> TargetArchitecture:
        """Reads config.json by `architecture_class`; raises CheckpointError for unusable fields."""
        for key in ("attention_bias", "mlp_bias", "use_sliding_window"):
            hf_config.check_only(config, key, False)
        defaults = defaults_config.of(config, cls.hf_model_type)
        return hf_config.read_architecture(config, cls.architecture_class, defaults=defaults)

    @classmethod
    def config_to_hf(cls, arch: TargetArchitecture) -> dict[str, Any]:
        """Returns the config.json of a checkpoint with this architecture."""
        return hf_config.write_architecture(arch) | {
            "architectures": [cls.hf_architectures[0]],
            "model_type": cls.hf_model_type,
        }


def _attend_cached(layer, cached, page_table, start, tree_mask, count, packing):
    attention = layer.self_attn
    if isinstance(attention, Attention):
        return attention.attend_pages(cached, page_table, start, tree_mask, packing)
    if isinstance(cached, RecurrentState):
        attend = attention.attend_state(cached, tree_mask, count)
    else:
        attend = attention.attend_pages(cached, page_table, start, tree_mask)
    return attend if packing is None else packing.around(attend)


def _attend_packed(layer, segment_ids):
    return layer.self_attn.attend_packed(segment_ids)
