"""The decoder-only network that all target families share.

A family is this network with a few class attributes, such as qwen3.py and llama3.py, and overrides
of what differs; see docs/adding_a_target.md.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dflash.checkpoints import hf_config
from dflash.config.schema import AUTO, TargetArchitecture
from dflash.layers import cache as kv
from dflash.layers import losses, rotary
from dflash.layers.linear import Embedding, Linear, RMSNorm
from dflash.layers.train_batch import TrainBatch
from dflash.layers.transformer import TransformerLayer, run_layer
from dflash.parallel import parameters
from dflash.parallel.sharding import Sharding


class TargetOutput(NamedTuple):
    """What one target forward returns.

    Attributes:
      hidden: [B, T, D]; after the final norm. `unembed` turns selected rows into logits: a
        prompt needs one row of [V], not all.
      features: [B, T, C·D]; the residual stream after each of the feature layers, concatenated.
      cache: the cache with the T new rows.
    """

    hidden: jax.Array
    features: jax.Array
    cache: kv.PagedCache


class Decoder(nnx.Module):
    """A target: tokens in, hidden states and features out, context kept in a paged cache.

    Subclasses set the class attributes, and override what differs, such as `make_layer`.
    """

    hf_architectures: ClassVar[tuple[str, ...]]
    hf_model_type: ClassVar[str]
    qk_norm: ClassVar[bool]
    # Stored in some checkpoints, but computed here.
    ignored_checkpoint_suffixes: ClassVar[tuple[str, ...]] = ("rotary_emb.inv_freq",)

    def __init__(self, arch: TargetArchitecture, *, dtype: jnp.dtype, sharding: Sharding):
        self.arch = arch
        self.dtype = jnp.dtype(dtype)
        self.sharding = sharding
        build = {"dtype": self.dtype, "sharding": sharding}
        self.embed_tokens = Embedding(arch.vocab_size, arch.hidden_size, **build)
        self.layers = nnx.List(self.make_layer(i, **build) for i in range(arch.num_hidden_layers))
        self.norm = RMSNorm(arch.hidden_size, arch.rms_norm_eps, **build)
        self.lm_head = None if arch.tie_word_embeddings else self._make_head()

    def _make_head(self) -> Linear:
        sizes = self.arch.hidden_size, self.arch.vocab_size
        return Linear(*sizes, ("embed", "vocab"), dtype=self.dtype, sharding=self.sharding)

    def make_layer(self, i: int, *, dtype: jnp.dtype, sharding: Sharding) -> TransformerLayer:
        """Layer i; a family whose layers differ, in attention or in mlp, overrides this."""
        return TransformerLayer(self.arch, qk_norm=self.qk_norm, dtype=dtype, sharding=sharding)

    def rotary_angles(self, positions: jax.Array) -> Any:
        """What the attention of every layer gets of the positions int32 [B, T]: cos and sin."""
        return rotary.angles(positions, self.arch)

    def __call__(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        cache: kv.PagedCache,
        *,
        feature_layers: tuple[int, ...] = (),
        tree_mask: jax.Array | None = None,
    ) -> TargetOutput:
        """Runs T new rows per sequence on top of its cached context.

        Args:
          tokens: int32 [B, T].
          positions: int32 [B, T]; for rotary embedding. Row r is stored at cache position
            positions[:, 0] + r, which for a chain is its position.
          cache: holds every position below positions[:, 0].
          feature_layers: layers whose outputs are tapped, in the order of concatenation.
          tree_mask: bool [B, T, T] or None; which new rows each new row sees (None: causal).
        """
        seen = [(pages, cache.page_table, positions[:, 0], tree_mask) for pages in cache.layers]
        hidden, features, pages = self._run_layers(
            tokens, positions, _attend_pages, seen, feature_layers
        )
        return TargetOutput(hidden, features, dataclasses.replace(cache, layers=tuple(pages)))

    def forward(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        segment_ids: jax.Array,
        *,
        feature_layers: tuple[int, ...] = (),
        remat: bool = False,
    ) -> tuple[jax.Array, jax.Array]:
        """Runs whole packed rows without a cache: for training, and to tap features in bulk.

        Args:
          tokens: int32 [B, T].
          positions: int32 [B, T]; for rotary embedding.
          segment_ids: int32 [B, T]; rows see earlier rows of their own number. 0 is padding, whose
            outputs are finite but meaningless.
          feature_layers: as in `__call__`.
          remat: keep one activation per layer for the backward pass, and recompute the rest.
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
        """Cross-entropy of each supervised token given those before it in its document.

        Args:
          batch: packed rows; features and hidden states are not read.
          remat: as in `forward`.
        Returns:
          loss float32 [], and metrics, each float32 []: "loss"; "token_accuracy"; "weight", the
          number of tokens that the loss is a mean over.
        """
        hidden, _ = self.forward(batch.tokens, batch.positions, batch.segment_ids, remat=remat)
        # The last row has no next token; it stays so that rows divide into even chunks.
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
        """Hidden states [B, T, D], features [B, T, C·D], and what each layer's attend gave back."""
        angles = self.rotary_angles(positions)
        x = self.embed(tokens)
        tapped = {}
        kept = []
        for i, (layer, arrays) in enumerate(zip(self.layers, seen, strict=True)):
            x, layer_kept = run_layer(layer, x, angles, attention_of, *arrays, **how)
            kept.append(layer_kept)
            if i in feature_layers:
                tapped[i] = x
        none = jnp.zeros((*tokens.shape, 0), x.dtype)
        features = jnp.concatenate([tapped[i] for i in feature_layers] or [none], axis=-1)
        return self.norm(x), features, kept

    def embed(self, tokens: jax.Array) -> jax.Array:
        """int32 [B, T] -> [B, T, D]."""
        batch, _ = kv.batch_axes(tokens.shape[0], self.sharding)
        return self.sharding.constrain(self.embed_tokens(tokens), batch, None, None)

    def unembed(self, hidden: jax.Array) -> jax.Array:
        """[B, T, D] (after the final norm) -> float32 logits [B, T, V]."""
        with jax.named_scope("unembed"):
            logits = (self.lm_head or self.embed_tokens).attend(hidden)
            batch, _ = kv.batch_axes(hidden.shape[0], self.sharding)
            return self.sharding.constrain(logits, batch, None, "vocab")

    def gather_head(self) -> None:
        """Gathers the output head once for all that use it, in place; see `parameters.gathered`.

        Of a tied embedding, it gathers a copy that lies as products read it.
        """
        if self.sharding.mesh.size == 1:
            return
        if self.lm_head is None:
            self.lm_head = nnx.data(self._make_head())
            self.lm_head.kernel.set_value(self.embed_tokens.embedding[...].T)
        self.lm_head = parameters.gathered(self.lm_head, self.sharding)

    def head_columns(self, tokens: np.ndarray) -> jax.Array:
        """Columns [D, Q] of the output head: those of `tokens` int [Q]."""
        return (self.lm_head or self.embed_tokens).columns(tokens)

    def new_cache(
        self,
        *,
        batch: int,
        pages_per_sequence: int,
        num_pages: int,
        page_size: int,
        kv_dtype: str = AUTO,
    ) -> kv.PagedCache:
        """An abstract paged cache for `batch` sequences; see `DecodeConfig.kv_dtype`."""
        quantized = kv_dtype != AUTO
        return kv.paged_cache(
            [layer.self_attn.cache_spec() for layer in self.layers],
            batch=batch,
            pages_per_sequence=pages_per_sequence,
            num_pages=num_pages,
            page_size=page_size,
            dtype=jnp.dtype(kv_dtype) if quantized else self.dtype,
            quantized=quantized,
            sharding=self.sharding,
        )

    @property
    def ignored_checkpoint_names(self) -> tuple[str, ...]:
        """Tensors a checkpoint may hold beside the parameters: the copy of a tied head."""
        return ("lm_head.weight",) if self.lm_head is None else ()

    @staticmethod
    def checkpoint_name(path: str) -> str:
        """Name in a Hugging Face checkpoint of the parameter at a dotted path of this module."""
        stem, _, _ = path.rpartition(".")
        return f"{stem}.weight" if stem == "lm_head" else f"model.{stem}.weight"

    @classmethod
    def architecture_from_hf(cls, config: Mapping[str, Any]) -> TargetArchitecture:
        """Reads a checkpoint's config.json.

        Raises:
          CheckpointError: a field is missing or unusable, or asks for an unsupported option.
        """
        for key in ("attention_bias", "mlp_bias", "use_sliding_window"):
            hf_config.check_only(config, key, False)
        return hf_config.read_architecture(config)

    @classmethod
    def config_to_hf(cls, arch: TargetArchitecture) -> dict[str, Any]:
        """The config.json of a checkpoint with this architecture."""
        return hf_config.write_architecture(arch) | {
            "architectures": [cls.hf_architectures[0]],
            "model_type": cls.hf_model_type,
        }


def _attend_pages(layer, pages, page_table, start, tree_mask):
    return layer.self_attn.attend_pages(pages, page_table, start, tree_mask)


def _attend_packed(layer, segment_ids):
    return layer.self_attn.attend_packed(segment_ids)
