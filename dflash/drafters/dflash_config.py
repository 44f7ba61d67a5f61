"""Config keys and shape of DFlash drafters."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Literal, Self

from dflash import errors
from dflash.checkpoints import hf_config
from dflash.config.schema import MAX_BLOCK_SIZE, TargetArchitecture, option, option_like
from dflash.drafters import base_config, layouts_config
from dflash.drafters.base_config import (
    MAX_LAYERS,
    MAX_VOCABULARY,
    MAX_WIDTH,
    BlockDrafterConfig,
    DrafterShape,
    DraftLayers,
    MarginalTree,
    OverlapKeys,
)
from dflash.drafters.layouts_config import GROUP

WINDOWS = (64, 256, 1024, 4096)  # Values of `drafter.window` to choose from.
_FULL, _SLIDING = "full_attention", "sliding_attention"
# Fields that some published drafters have, with the only value that is supported.
_SUPPORTED = {"draft_shift": False}
# Fields that config.json omits if they have their defaults.
_OPTIONAL_FIELDS = (
    *("partial_rotary_factor", "attention_bias", "attention_sink_bias", "attention_value_scale"),
    *("draft_vocab_size", "target_hidden_size", "mask_embedding"),
)


@dataclasses.dataclass(frozen=True)
class LayerView:
    """Part of the sequence that one draft layer shows to the block.

    Attributes:
      window: Number of positions that a row sees, its own included; None for all.
      causal: Whether block row r sees block rows up to r only.
    """

    window: int | None = None
    causal: bool = False


@dataclasses.dataclass(frozen=True)
class DFlashShape(DrafterShape):
    """Contents of a DFlash checkpoint's config.json.

    Attributes:
      layout: Arguments of `layouts_config.to_zlab` for files of the strategy.
      decoder: Architecture of the draft layers: width, heads, rotary base and so on.
      block_size: Trained number of rows: the anchor and the drafted tokens.
      mask_token_id: Token at the positions to be drafted.
      target_layer_ids: Target layers whose outputs are the features.
      num_target_layers: Depth of the target that the drafter was trained for; None if not stated.
      views: One view per draft layer.
      draft_vocab_size: Size of the draft vocabulary, which has an output head of its own; None to
        draft from the target's whole vocabulary with the target's head.
      partial_rotary_factor: Fraction of each head that is rotated, from its first dimension on.
      attention_bias: Whether the projections of attention have biases.
      attention_sink_bias: Whether each head has an attention sink: a learned score of no position.
      attention_value_scale: Factor on values.
      target_hidden_size: Width of the target, if it is not the drafter's; the drafter then has an
        embedding and an output head of its own. None for the same width.
      mask_embedding: Whether the drafter has an embedding of its own for the mask token.
    """

    layout: ClassVar[Mapping[str, Any]] = {"projector": "dflash"}

    decoder: TargetArchitecture
    block_size: int = option(minimum=2, maximum=MAX_BLOCK_SIZE)
    mask_token_id: int = option(minimum=0, maximum=MAX_VOCABULARY)
    target_layer_ids: tuple[int, ...] = option(minimum=0, maximum=MAX_LAYERS)
    num_target_layers: int | None = option(minimum=1, maximum=MAX_LAYERS)
    views: tuple[LayerView, ...] = option()
    draft_vocab_size: int | None = option(None, minimum=1, maximum=MAX_VOCABULARY)
    partial_rotary_factor: float = option(1.0, minimum=0.0, maximum=1.0)
    attention_bias: bool = False
    attention_sink_bias: bool = False
    attention_value_scale: float = option(1.0, minimum=0.0, maximum=1e3)
    target_hidden_size: int | None = option(None, minimum=1, maximum=MAX_WIDTH)
    mask_embedding: bool = False

    @property
    def rotary(self) -> TargetArchitecture:
        """Decoder in which `head_dim` is the width of the rotated part of a head."""
        width = int(self.decoder.head_dim * self.partial_rotary_factor)
        return dataclasses.replace(self.decoder, head_dim=width)

    @property
    def attention_form(self) -> dict[str, bool]:
        """Arguments of `Attention` that the draft layers share."""
        return {
            "qk_norm": True,
            "takes_context": True,
            "has_sinks": self.attention_sink_bias,
            "bias": self.attention_bias,
            "output_bias": self.attention_bias,
        }

    @property
    def causal(self) -> bool:
        """True if no block row depends on a later row."""
        return all(view.causal for view in self.views)

    def seen_through(self, window: int | None) -> Self:
        """Returns this shape with no view wider than `window` positions, or as it is if None."""
        if window is None:
            return self
        views = [
            dataclasses.replace(view, window=min(view.window or window, window))
            for view in self.views
        ]
        return dataclasses.replace(self, views=tuple(views))

    @property
    def windows(self) -> tuple[int, ...]:
        """Values of `WINDOWS` that narrow a view, but no block."""
        seen = (window for window in WINDOWS if window > self.block_size)
        return tuple(window for window in seen if self.seen_through(window) != self)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Self:
        """Reads config.json, in any published layout; see `DrafterShape.from_hf`."""
        shape = cls(**cls._read(layouts_config.to_zlab(config, **cls.layout)))
        base_config.check_file(shape._problems())
        return shape

    @classmethod
    def _read(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the fields of the shape that z-lab's layout states, in its two forms."""
        decoder = hf_config.read_architecture(config)
        group = hf_config.read_group(config, GROUP)
        for fields in (config, group):
            for name, supported in _SUPPORTED.items():
                hf_config.check_only(fields, name, supported)
        within = hf_config.read_fields(group, _GroupFields, group=GROUP)
        beside = hf_config.read_fields(config, _FileFields)
        stated = _merge(beside, within)
        required = ("block_size", "mask_token_id", "target_layer_ids")
        missing = [name for name in required if stated.get(name) in (None, ())]
        if missing:
            raise errors.CheckpointError(f"{hf_config.FILE}: missing {', '.join(missing)}")
        fields = {name: value for name, value in stated.items() if value is not None}
        return (
            {"num_target_layers": None}
            | fields
            | {
                "decoder": decoder,
                "views": _views(beside, within, decoder.num_hidden_layers),
                "draft_vocab_size": _partial(beside.draft_vocab_size, decoder.vocab_size),
                "target_hidden_size": _partial(stated["target_hidden_size"], decoder.hidden_size),
            }
        )

    def to_hf(self) -> dict[str, Any]:
        """Returns config.json fields in the newer layout; see `DrafterShape.to_hf`."""
        windows = {view.window for view in self.views} - {None}
        optional = {
            name: getattr(self, name)
            for name in _OPTIONAL_FIELDS
            if getattr(self, name) != getattr(DFlashShape, name)
        }
        return (
            hf_config.write_architecture(self.decoder)
            | optional
            | {
                "model_type": "qwen3",
                "block_size": self.block_size,
                "num_target_layers": self.num_target_layers,
                "layer_types": [_FULL if view.window is None else _SLIDING for view in self.views],
                "sliding_window": max(windows, default=None),
                "sliding_window_non_causal": not any(view.causal for view in self._sliding),
                GROUP: {
                    "mask_token_id": self.mask_token_id,
                    "target_layer_ids": list(self.target_layer_ids),
                }
                | self._causality(),
            }
        )

    @property
    def _sliding(self) -> list[LayerView]:
        return [view for view in self.views if view.window is not None]

    def _causality(self) -> dict[str, bool]:
        """Returns the fields that state causality for all layers, if it is the same for all."""
        if len({view.causal for view in self.views}) > 1:
            return {}
        return {"causal": self.causal, "causal_head": self.causal}

    @classmethod
    def for_target(cls, target: TargetArchitecture, options: "DFlashArchitecture | None") -> Self:
        """Returns the shape of a fresh DFlash drafter; see `DrafterShape.for_target`."""
        options = options or DFlashArchitecture()
        shape = cls(**options.shape_fields(target))
        base_config.check_options(shape._problems())
        return shape

    def fit(self, target: TargetArchitecture) -> Self:
        """Adds the target's depth if it is not stated; see `DrafterShape.fit`."""
        depth = target.num_hidden_layers
        width = self.target_hidden_size or self.decoder.hidden_size
        trained_for = dataclasses.replace(self.decoder, hidden_size=width)
        base_config.check_same_target(target, trained_for, self.num_target_layers)
        if max(self.target_layer_ids) >= depth or self.mask_token_id >= target.vocab_size:
            raise errors.CheckpointError(
                f"drafter: taps layers {list(self.target_layer_ids)} and masks with token "
                f"{self.mask_token_id}, but the target has {depth} layers and "
                f"{target.vocab_size} tokens"
            )
        return dataclasses.replace(self, num_target_layers=depth)

    def _problems(self) -> Iterable[base_config.Problem]:
        yield from base_config.vocabulary_problems(self.draft_vocab_size, self.decoder.vocab_size)
        rotated = self.rotary.head_dim
        if rotated % 2 or not rotated:
            message = (
                f"{self.partial_rotary_factor} rotates {rotated} of {self.decoder.head_dim} head "
                "dimensions; expected a positive even number"
            )
            yield ("partial_rotary_factor",), message


@dataclasses.dataclass(frozen=True)
class DFlashArchitecture(DraftLayers):
    """Architecture of a fresh DFlash drafter or of one of its descendants."""

    num_hidden_layers: int = option(5, minimum=1, maximum=MAX_LAYERS)
    block_size: int = option_like(DFlashShape, "block_size", 16)
    # None: the last id of the vocabulary.
    mask_token_id: int | None = option_like(DFlashShape, "mask_token_id", None)
    # None: evenly spread.
    target_layer_ids: tuple[int, ...] | None = option_like(DFlashShape, "target_layer_ids", None)
    # Number of target layers to tap if target_layer_ids is left out.
    num_target_features: int = option(5, minimum=1, maximum=MAX_LAYERS)
    causal: bool = False  # Block rows attend only to earlier rows and themselves, as in JetSpec.
    # None: the target's. If smaller, training picks the tokens that are most frequent in its data.
    draft_vocab_size: int | None = option_like(DFlashShape, "draft_vocab_size", None)

    def shape_fields(self, target: TargetArchitecture) -> dict[str, Any]:
        """Returns the fields of `DFlashShape` that are chosen for a fresh drafter of a target.

        Raises:
          ConfigError: The sizes contradict one another.
        """
        depth, layers = target.num_hidden_layers, self.num_hidden_layers
        taps = self.target_layer_ids or default_taps(depth, self.num_target_features)
        last_token = target.vocab_size - 1
        return {
            "decoder": self.decoder_for(target, num_hidden_layers=layers),
            "block_size": self.block_size,
            "mask_token_id": last_token if self.mask_token_id is None else self.mask_token_id,
            "target_layer_ids": taps,
            "num_target_layers": depth,
            "views": (LayerView(causal=self.causal),) * layers,
            "draft_vocab_size": _partial(self.draft_vocab_size, target.vocab_size),
        }


@dataclasses.dataclass(frozen=True)
class DFlashConfig(OverlapKeys, BlockDrafterConfig):
    """Keys of a DFlash drafter."""

    name: str = "dflash"
    tree: MarginalTree | None = None  # None: a chain.
    architecture: DFlashArchitecture | None = None


def default_taps(num_target_layers: int, count: int) -> tuple[int, ...]:
    """Returns `count` evenly spread target layers, without the first and the last few."""
    if count == 1:
        return (num_target_layers // 2,)
    span, last = num_target_layers - 4, num_target_layers - 1
    spread = (round(1 + i * span / (count - 1)) for i in range(count))
    return tuple(min(max(layer, 0), last) for layer in spread)  # Toy targets are too shallow.


# --- config.json ----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _CommonFields:
    """Fields that newer files have inside `dflash_config` and older files next to it."""

    block_size: int | None = option_like(DFlashShape, "block_size", None)
    num_target_layers: int | None = option_like(DFlashShape, "num_target_layers", None)
    mask_token_id: int | None = option_like(DFlashShape, "mask_token_id", None)
    target_layer_ids: tuple[int, ...] = option_like(DFlashShape, "target_layer_ids", ())
    partial_rotary_factor: float | None = option_like(DFlashShape, "partial_rotary_factor", None)
    attention_bias: bool | None = None
    attention_sink_bias: bool | None = None
    attention_value_scale: float | None = option_like(DFlashShape, "attention_value_scale", None)
    target_hidden_size: int | None = option_like(DFlashShape, "target_hidden_size", None)
    mask_embedding: bool | None = None


@dataclasses.dataclass(frozen=True)
class _GroupFields(_CommonFields):
    """Fields of `dflash_config`; `causal`, `causal_head` and `is_causal` mean the same.

    A causality that is not stated is None.
    """

    use_swa: bool = False
    swa_window_size: int | None = option(None, minimum=1, maximum=2**30)
    causal: bool | None = None
    causal_head: bool | None = None
    is_causal: bool | None = None


@dataclasses.dataclass(frozen=True)
class _FileFields(_CommonFields):
    """Fields at the top level of config.json."""

    layer_types: tuple[Literal["full_attention", "sliding_attention"], ...] = ()
    sliding_window: int | None = option_like(_GroupFields, "swa_window_size", None)
    sliding_window_non_causal: bool | None = None
    is_causal: bool | None = None
    draft_vocab_size: int | None = option_like(DFlashShape, "draft_vocab_size", None)


def _merge(beside: _FileFields, within: _GroupFields) -> dict[str, Any]:
    """Returns the common fields; those inside the group take precedence."""
    names = [field.name for field in dataclasses.fields(_CommonFields)]
    return {
        name: getattr(beside if getattr(within, name) in (None, ()) else within, name)
        for name in names
    }


def _partial(size: int | None, usual: int) -> int | None:
    """Returns a size that the drafter has of its own; None if it is the usual one."""
    return None if size == usual else size


def _views(beside: _FileFields, within: _GroupFields, num_layers: int) -> tuple[LayerView, ...]:
    """Returns the views that the window and causality fields of published files describe.

    By default a sliding layer is causal, and a full layer is bidirectional; a window that `use_swa`
    sets for all layers leaves them bidirectional. vLLM, SGLang, speculators and SpecForge agree.
    """
    types = beside.layer_types or (_FULL,) * num_layers
    if len(types) != num_layers:
        raise errors.CheckpointError(
            f"{hf_config.FILE}: layer_types names {len(types)} layers, num_hidden_layers is "
            f"{num_layers}"
        )
    window = beside.sliding_window
    slides_causally = True
    if within.use_swa:
        window = within.swa_window_size or window
        if _SLIDING not in types:  # Then use_swa applies to all layers.
            types, slides_causally = (_SLIDING,) * num_layers, False
    if _SLIDING in types and window is None:
        raise errors.CheckpointError(
            f"{hf_config.FILE}: layer {types.index(_SLIDING)} slides, but no sliding_window or "
            "swa_window_size is given"
        )
    stated = (beside.is_causal, within.causal, within.causal_head, within.is_causal)
    causal = next((value for value in stated if value is not None), None)
    if causal is not None:
        slides_causally = causal
    elif beside.sliding_window_non_causal is not None:
        slides_causally = not beside.sliding_window_non_causal
    sliding, full = LayerView(window, slides_causally), LayerView(causal=bool(causal))
    return tuple(sliding if kind == _SLIDING else full for kind in types)
