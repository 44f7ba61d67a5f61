"""DFlash: a block-diffusion drafter that paints a whole block in one pass.

Source: arXiv 2602.06036. The context is the target's own features, projected once when they are
committed and never updated; the block [anchor, MASK, …, MASK] attends to it and, in both
directions, to itself. Embedding and output head are the target's.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from dflash import errors
from dflash.common import hf_config
from dflash.common.sharding import Sharding
from dflash.config.schema import DFlashArchitecture, DFlashConfig, TargetArchitecture
from dflash.drafters.base import Drafter, Proposal
from dflash.drafters.blocks import block_loss, cut_blocks, sample_anchors, score_blocks
from dflash.kernels.anchored_attention import anchored_attention
from dflash.kernels.block_attention import block_attention
from dflash.layers import cache as kv
from dflash.layers import rotary
from dflash.layers.linear import Linear, RMSNorm
from dflash.layers.transformer import TransformerLayer


@dataclasses.dataclass(frozen=True)
class LayerView:
    """What one draft layer lets the block see.

    Attributes:
      window: context positions before the anchor that stay visible; None for all.
      causal: block row r sees block rows up to r only.
    """

    window: int | None = None
    causal: bool = False


@dataclasses.dataclass(frozen=True)
class DFlashShape:
    """Everything that a DFlash checkpoint's config.json states.

    Attributes:
      decoder: width, heads, rotary base and so on of the draft layers.
      block_size: anchor + drafted tokens, as trained.
      mask_token_id: fills the slots to be drafted.
      target_layer_ids: tapped layers of the target.
      num_target_layers: depth of the target that the drafter was trained for.
      views: one per draft layer.
    """

    decoder: TargetArchitecture
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    views: tuple[LayerView, ...]


class DFlash(Drafter):
    """The drafter; its state is the keys and values of every committed position's features."""

    hf_architectures = ("DFlashDraftModel",)
    ignored_checkpoint_names = ()
    ignored_checkpoint_suffixes = ("rotary_emb.inv_freq",)

    def __init__(
        self,
        shape: DFlashShape,
        *,
        dtype: jnp.dtype,
        sharding: Sharding,
        block_size: int | None = None,
    ):
        """Args: block_size: rows to draft with, at most the trained one; None for that one.

        Raises:
          ConfigError: block_size is larger than the trained one.
        """
        if block_size is not None and block_size > shape.block_size:
            raise errors.ConfigError(
                f"drafter.block_size: {block_size} is larger than the block size {shape.block_size}"
                " that the drafter was trained with"
            )
        arch = shape.decoder
        build = {"dtype": dtype, "sharding": sharding}
        tapped = len(shape.target_layer_ids) * arch.hidden_size
        self.fc = Linear(tapped, arch.hidden_size, ("features", "embed"), **build)
        self.hidden_norm = RMSNorm(arch.hidden_size, arch.rms_norm_eps, **build)
        self.layers = nnx.List(
            TransformerLayer(arch, qk_norm=True, **build) for _ in range(arch.num_hidden_layers)
        )
        self.norm = RMSNorm(arch.hidden_size, arch.rms_norm_eps, **build)
        self.shape = shape
        self.feature_layers = shape.target_layer_ids
        self.num_draft_tokens = (block_size or shape.block_size) - 1
        self.dtype = jnp.dtype(dtype)
        self.sharding = sharding

    @classmethod
    def create(
        cls,
        config: DFlashConfig,
        hf: Mapping[str, Any] | None,
        target: TargetArchitecture,
        *,
        dtype: jnp.dtype,
        sharding: Sharding,
    ) -> "DFlash":
        """An abstract drafter, checked against its target; see `Drafter.create`."""
        if hf is None:
            shape = cls.architecture_for(target, config.architecture)
        else:
            shape = cls.architecture_from_hf(hf)
        _check_target(shape, target)
        return cls(shape, dtype=dtype, sharding=sharding, block_size=config.block_size)

    def init_state(self, batch: int, max_length: int) -> kv.StaticCache:
        """Abstract context; `observe` may write a whole block from the last position on."""
        arch = self.shape.decoder
        return kv.static_cache(
            num_layers=arch.num_hidden_layers,
            num_kv_heads=arch.num_key_value_heads,
            head_dim=arch.head_dim,
            batch=batch,
            capacity=max_length + self.block_size,
            dtype=self.dtype,
            sharding=self.sharding,
        )

    def draft(self, state, anchor, position, sampler, heads):
        """Drafts a chain in one pass; see `Drafter.draft`."""
        hidden, positions = self.paint(state, anchor, position, heads)
        logits = heads.unembed(hidden[:, 1:])
        tokens, probs = sampler.propose(logits, positions[:, 1:])
        return Proposal(tokens, probs=probs), state

    def paint(self, state, anchor, position, heads) -> tuple[jax.Array, jax.Array]:
        """The block pass: hidden states [B, T, D] after the final norm, positions int32 [B, T]."""
        mask = jnp.full((anchor.shape[0], self.num_draft_tokens), self.shape.mask_token_id)
        block = jnp.concatenate([anchor[:, None], mask.astype(jnp.int32)], axis=1)
        positions = position[:, None] + jnp.arange(self.block_size)
        cos_sin = rotary.angles(positions, self.shape.decoder)
        x = heads.embed(block)
        for i, layer in enumerate(self.layers):
            x, _ = layer(x, cos_sin, self._attend_context(i, state, position))
        return self.norm(x), positions

    def _attend_context(self, i: int, state: kv.StaticCache, position: jax.Array):
        """Attention of layer i over its context and, both ways, over the block."""
        view, scale = self.shape.views[i], self.layers[i].self_attn.scale
        batch, _ = kv.batch_axes(position.shape[0], self.sharding)
        rows, kv_rows = (batch, None, "heads", None), (batch, None, "kv_heads", None)
        stored = (batch, "kv_heads", None, None)

        def attend(*arrays):
            view_options = {"window": view.window, "causal": view.causal}
            return (block_attention(*arrays, scale=scale, **view_options),)

        sharded = self.sharding.map(
            attend, (rows, kv_rows, kv_rows, stored, stored, (batch,)), (rows,)
        )
        fixed = state.keys[i], state.values[i], position
        return lambda *block: (*sharded(*block, *fixed), None)

    def observe(self, state, position, tokens, num_committed, features):
        """Projects features to keys and values, once, and stores them; see `Drafter.observe`."""
        context = self.hidden_norm(self.fc(features))
        positions = position[:, None] + jnp.arange(features.shape[1])
        cos_sin = rotary.angles(positions, self.shape.decoder)
        rows = [layer.self_attn.keys_values(context, cos_sin) for layer in self.layers]
        keys, values = zip(*rows, strict=True)
        return state.write(position, keys, values)

    def loss(self, batch, heads, key, options, *, anchors=None, remat=False):
        """Paints blocks anchored all over the batch; see `Drafter.loss`.

        Args:
          anchors: where the blocks begin; None to draw them from `key`.
        """
        if anchors is None:
            anchors = sample_anchors(batch, options.num_anchors, key)
        blocks = cut_blocks(
            batch, anchors, block_size=self.block_size, mask_token_id=self.shape.mask_token_id
        )
        hidden = self.paint_blocks(batch, blocks, heads, remat=remat)
        scores = score_blocks(hidden, blocks, batch, heads.unembed, options)
        return block_loss(scores, blocks, options)

    def paint_blocks(self, batch, blocks, heads, *, remat=False) -> jax.Array:
        """The block pass over A blocks of R rows per sequence at once: hidden [B, A, R, D].

        Computes in the dtype of this module's weights, whatever that of features and embeddings.
        """
        dtype = self.fc.kernel.dtype
        context = self.hidden_norm(self.fc(batch.features.astype(dtype)))
        shape = blocks.tokens.shape
        of_context = rotary.angles(batch.positions, self.shape.decoder)
        of_blocks = rotary.angles(blocks.positions.reshape(shape[0], -1), self.shape.decoder)
        x = heads.embed(blocks.tokens.reshape(shape[0], -1)).astype(dtype)
        for i, layer in enumerate(self.layers):

            def run(x, context, i=i, layer=layer):
                seen = layer.self_attn.keys_values(context, of_context)
                return layer(x, of_blocks, self._attend_anchored(i, seen, batch, blocks))[0]

            x = (jax.checkpoint(run) if remat else run)(x, context)
        return self.norm(x).reshape(*shape, -1)

    def _attend_anchored(self, i: int, seen, batch, blocks):
        """Attention of layer i of each block over the context before it, and over itself."""
        view, scale = self.shape.views[i], self.layers[i].self_attn.scale
        names, _ = kv.batch_axes(blocks.tokens.shape[0], self.sharding)
        rows, kv_rows = (names, None, None, "heads", None), (names, None, None, "kv_heads", None)
        stored, per_row = (names, None, "kv_heads", None), (names, None)
        options = {"scale": scale, "window": view.window, "causal": view.causal}
        sharded = self.sharding.map(
            lambda *arrays: (anchored_attention(*arrays, **options),),
            (rows, kv_rows, kv_rows, stored, stored, per_row, per_row, per_row),
            (rows,),
        )
        fixed = *seen, blocks.anchors.index, blocks.anchors.valid, batch.segment_ids

        def attend(*flat):
            shape = blocks.tokens.shape
            split = [array.reshape(*shape, *array.shape[2:]) for array in flat]
            (attended,) = sharded(*split, *fixed)
            return attended.reshape(flat[0].shape), None

        return attend

    @staticmethod
    def checkpoint_name(path: str) -> str:
        """Name in a Hugging Face checkpoint of the parameter at a dotted path of this module."""
        stem, _, _ = path.rpartition(".")
        return f"{stem}.weight"

    @classmethod
    def architecture_from_hf(cls, config: Mapping[str, Any]) -> DFlashShape:
        """Reads a drafter's config.json, in its older and its newer layout.

        Raises:
          CheckpointError: a field is missing or contradicts another.
        """
        decoder = hf_config.read_architecture(config)
        own = config.get("dflash_config") or {}
        fields = {}
        for name in ("block_size", "num_target_layers", "mask_token_id"):
            value = own.get(name)
            fields[name] = config.get(name) if value is None else value
        missing = [name for name, value in fields.items() if value is None]
        if missing:
            raise errors.CheckpointError(f"config.json: missing {', '.join(missing)}")
        taps = own.get("target_layer_ids") or default_taps(
            fields["num_target_layers"], decoder.num_hidden_layers
        )
        return DFlashShape(
            decoder=decoder,
            target_layer_ids=tuple(taps),
            views=_read_views(config, own, decoder.num_hidden_layers),
            **fields,
        )

    @classmethod
    def architecture_for(
        cls, target: TargetArchitecture, options: DFlashArchitecture | None
    ) -> DFlashShape:
        """The shape of a fresh drafter for a target."""
        options = options or DFlashArchitecture()
        taps = options.target_layer_ids or default_taps(
            target.num_hidden_layers, options.num_target_features
        )
        decoder = dataclasses.replace(
            target,
            num_hidden_layers=options.num_hidden_layers,
            intermediate_size=options.intermediate_size or target.intermediate_size,
        )
        last_token = target.vocab_size - 1
        return DFlashShape(
            decoder=decoder,
            block_size=options.block_size,
            mask_token_id=last_token if options.mask_token_id is None else options.mask_token_id,
            target_layer_ids=taps,
            num_target_layers=target.num_hidden_layers,
            views=(LayerView(),) * options.num_hidden_layers,
        )

    @classmethod
    def config_to_hf(cls, shape: DFlashShape) -> dict[str, Any]:
        """The config.json of a checkpoint with this shape."""
        windows = {view.window for view in shape.views} - {None}
        sliding = [view.window is not None for view in shape.views]
        return hf_config.write_architecture(shape.decoder) | {
            "architectures": list(cls.hf_architectures),
            "model_type": "qwen3",
            "block_size": shape.block_size,
            "num_target_layers": shape.num_target_layers,
            "layer_types": ["sliding_attention" if on else "full_attention" for on in sliding],
            "sliding_window": max(windows, default=None),
            "sliding_window_non_causal": not any(view.causal for view in shape.views),
            "dflash_config": {
                "mask_token_id": shape.mask_token_id,
                "target_layer_ids": list(shape.target_layer_ids),
                "causal": all(view.causal for view in shape.views),
            },
        }


def _check_target(shape: DFlashShape, target: TargetArchitecture) -> None:
    """Raises CheckpointError if the drafter was trained for a target of another shape."""
    pairs = {
        "hidden size": (shape.decoder.hidden_size, target.hidden_size),
        "number of target layers": (shape.num_target_layers, target.num_hidden_layers),
        "vocabulary": (shape.decoder.vocab_size, target.vocab_size),
    }
    differences = [
        f"{name} {drafters} (target: {targets})"
        for name, (drafters, targets) in pairs.items()
        if drafters != targets
    ]
    if differences:
        raise errors.CheckpointError(
            f"drafter.checkpoint: trained for another target: {', '.join(differences)}"
        )
    beyond = set(shape.target_layer_ids) - set(range(target.num_hidden_layers))
    if beyond or not 0 <= shape.mask_token_id < target.vocab_size:
        raise errors.CheckpointError(
            f"drafter: taps layers {list(shape.target_layer_ids)} and masks with token "
            f"{shape.mask_token_id}, but the target has {target.num_hidden_layers} layers and "
            f"{target.vocab_size} tokens"
        )


def default_taps(num_target_layers: int, count: int) -> tuple[int, ...]:
    """Target layers to tap when nothing else is said: evenly spread, the ends left out."""
    if count == 1:
        return (num_target_layers // 2,)
    span, last = num_target_layers - 4, num_target_layers - 1
    spread = (round(1 + i * span / (count - 1)) for i in range(count))
    return tuple(min(max(layer, 0), last) for layer in spread)  # toys are too shallow to spread


def _read_views(config, own, num_layers) -> tuple[LayerView, ...]:
    """What each layer sees, from the several fields by which checkpoints have said it."""
    types = config.get("layer_types") or ["full_attention"] * num_layers
    if len(types) != num_layers:
        raise errors.CheckpointError(
            f"config.json: layer_types names {len(types)} layers, num_hidden_layers is {num_layers}"
        )
    window = config.get("sliding_window")
    if own.get("use_swa"):
        window = own.get("swa_window_size") or window
        if "sliding_attention" not in types:  # the flag alone: every layer slides
            types = ["sliding_attention"] * num_layers
    known = ("full_attention", "sliding_attention")
    views = []
    for i, kind in enumerate(types):
        if kind not in known:
            raise errors.CheckpointError(f"config.json: layer_types[{i}]: {kind!r} is not known")
        sliding = kind == "sliding_attention"
        if sliding and not window:
            raise errors.CheckpointError(
                f"config.json: layer {i} slides, but no sliding_window or swa_window_size is given"
            )
        causal = bool(own.get("causal", False))
        if sliding:
            causal = causal or not config.get("sliding_window_non_causal", True)
        views.append(LayerView(window if sliding else None, causal))
    return tuple(views)
