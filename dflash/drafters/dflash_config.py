"""Config keys and shape of DFlash drafters."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Literal, Self

from dflash import errors
from dflash.checkpoints import defaults_config, hf_config
from dflash.config.schema import FULL, SLIDING, TargetArchitecture, option, option_like
from dflash.drafters import base_config, layouts_config
from dflash.drafters.base_config import (
    MAX_LAYERS,
    MAX_WIDTH,
    BlockDrafterConfig,
    BlockSizes,
    DrafterShape,
    DraftLayers,
    MarginalTree,
    OverlapKeys,
    RotatedPart,
)
from dflash.drafters.layouts_config import GROUP

WINDOWS = (64, 256, 1024, 4096)  # Values of `drafter.window` to choose from.
# Fields that some published drafters have, with the only value that is supported.
_SUPPORTED = {"draft_shift": False, "logit_scale": 1.0}
# Fields that config.json omits if they have their defaults.
_OPTIONAL_FIELDS = (
    *("partial_rotary_factor", "attention_bias", "attention_sink_bias", "attention_value_scale"),
    *("draft_vocab_size", "target_hidden_size", "mask_embedding", "sample_from_anchor"),
    *("input_embedding_scale", "output_multiplier", "final_logit_softcapping", "calibration"),
)
# Fields of the drafter, which files have at the top level or in their group.
_FILE_FIELDS = (
    *("block_size", "num_target_layers", "mask_token_id", "target_layer_ids"),
    *_OPTIONAL_FIELDS,
)


@dataclasses.dataclass(frozen=True)
class LayerView:
    """Part of the sequence that one draft layer shows to the block.

    Attributes:
      window: Number of positions that a row sees up to its own, and from its own on in the block;
        None for all.
      causal: Whether block row r sees block rows up to r only.
    """

    window: int | None = None
    causal: bool = False


@dataclasses.dataclass(frozen=True)
class DFlashArchitecture(BlockSizes, DraftLayers):
    """Architecture of a fresh DFlash drafter or of one of its descendants."""

    num_hidden_layers: int = option(5, minimum=1, maximum=MAX_LAYERS)
    # Number of target layers to tap if target_layer_ids is left out.
    num_target_features: int = option(5, minimum=1, maximum=MAX_LAYERS)
    causal: bool = False  # Block rows attend only to earlier rows and themselves, as in JetSpec.

    def shape_fields(self, target: TargetArchitecture) -> dict[str, Any]:
        """Returns the fields of `DFlashShape` that follow from those given and the target.

        Raises:
          ConfigError: The sizes contradict one another.
        """
        depth, layers = target.num_hidden_layers, self.num_hidden_layers
        taps = self.target_layer_ids or default_taps(depth, self.num_target_features)
        last_token = target.vocab_size - 1
        return {
            "decoder": self.decoder_for(target, num_hidden_layers=layers),
            "mask_token_id": last_token if self.mask_token_id is None else self.mask_token_id,
            "target_layer_ids": taps,
            "num_target_layers": depth,
            "views": (LayerView(causal=self.causal),) * layers,
            "draft_vocab_size": _partial(self.draft_vocab_size, target.vocab_size),
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class DFlashShape(BlockSizes, RotatedPart, DrafterShape):
    """Contents of a DFlash checkpoint's config.json.

    Attributes:
      layout: Arguments of `layouts_config.to_zlab` for files of the strategy.
      architecture: Class of the config group `drafter.architecture`.
      file_defaults: Defaults in config.json of the fields that a descendant adds; the others are
        required there.
      anchor_may_draft: Whether `sample_from_anchor` is supported.
      decoder: Architecture of the draft layers: width, heads, rotary base and so on.
      num_target_layers: Depth of the target that the drafter was trained for; None if not stated.
      views: One view per draft layer.
      attention_bias: Whether the projections of attention have biases.
      attention_sink_bias: Whether each head has an attention sink: a learned score of no position.
      attention_value_scale: Factor on values.
      target_hidden_size: Width of the target, if it is not the drafter's; the drafter then has an
        embedding and an output head of its own. None for the same width.
      sample_from_anchor: Whether the anchor's row drafts, too. All `block_size` rows then draft.
      mask_embedding: Whether the drafter has an embedding of its own for the mask token.
      input_embedding_scale: Factor on the rows of the target's embedding table. It replaces that of
        the target, and the two fields below replace those of the target's logits.
      output_multiplier: Factor on the logits.
      final_logit_softcapping: Bound of the logits, which a scaled tanh enforces; None for none.
      calibration: Calibration of the drafts, which `dflash benchmark study.name=calibration` fits;
        see `parts.calibration`. Empty for none.
    """

    layout: ClassVar[Mapping[str, Any]] = {"projector": "dflash"}
    architecture: ClassVar[type] = DFlashArchitecture
    file_defaults: ClassVar[Mapping[str, Any]] = {}
    anchor_may_draft: ClassVar[bool] = True

    decoder: TargetArchitecture
    num_target_layers: int | None = option(None, minimum=1, maximum=MAX_LAYERS)
    views: tuple[LayerView, ...]
    attention_bias: bool = False
    attention_sink_bias: bool = False
    attention_value_scale: float = option(1.0, minimum=0.0, maximum=1e3)
    target_hidden_size: int | None = option(None, minimum=1, maximum=MAX_WIDTH)
    sample_from_anchor: bool = False
    mask_embedding: bool = False
    input_embedding_scale: float = option(1.0, minimum=0.0)
    output_multiplier: float = option(1.0, minimum=0.0)
    final_logit_softcapping: float | None = option(None, minimum=0.0)
    calibration: tuple[tuple[float, ...], ...] = option((), minimum=-1e3, maximum=1e3)

    @property
    def num_draft_tokens(self) -> int:
        """Number of tokens that can be drafted."""
        return self.draft_vocab_size or self.decoder.vocab_size

    @property
    def added(self) -> dict[str, Any]:
        """Fields that a descendant adds to DFlash's."""
        names = hf_config.added_fields(type(self), DFlashShape)
        return {name: getattr(self, name) for name in names}

    @classmethod
    def _known_fields(cls) -> set[str]:
        """Returns the fields of the drafter that are read from files, or change nothing."""
        schemas = BlockSizes, _GroupViews, layouts_config.SpeculatorsFields
        read = {name for schema in schemas for name in schema.__dataclass_fields__}
        return read | {*_FILE_FIELDS, *_SUPPORTED, *hf_config.added_fields(cls, DFlashShape)}

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
        zlab = layouts_config.to_zlab(config, known=cls._known_fields(), **cls.layout)
        shape = cls(**cls._read(zlab))
        base_config.check_file(shape._problems())
        return shape

    @classmethod
    def _read(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the fields of a shape from z-lab's layout.

        Newer files have the drafter's fields in the group, which takes precedence.
        """
        defaults = defaults_config.of(config, "qwen3", sizes=False)
        decoder = hf_config.read_architecture(config, defaults=defaults)
        group = hf_config.read_group(config, GROUP)
        for fields in (config, group):
            for name, supported in _SUPPORTED.items():
                hf_config.check_only(fields, name, supported)
        absent = dict.fromkeys(_FILE_FIELDS)
        within = hf_config.read_some(group, DFlashShape, _FILE_FIELDS, absent, group=GROUP)
        beside = hf_config.read_some(config, DFlashShape, _FILE_FIELDS, absent)
        fields = {
            name: beside[name] if within[name] in (None, ()) else within[name]
            for name in _FILE_FIELDS
        }
        required = ("block_size", "mask_token_id", "target_layer_ids")
        missing = [name for name in required if fields[name] in (None, ())]
        if missing:
            raise errors.CheckpointError(f"{hf_config.FILE}: missing {', '.join(missing)}")
        added = hf_config.added_fields(cls, DFlashShape)
        return (
            {name: value for name, value in fields.items() if value is not None}
            | hf_config.read_some({**config, **group}, cls, added, cls.file_defaults)
            | {
                "decoder": decoder,
                "views": views_of(config, group, decoder),
                "draft_vocab_size": _partial(fields["draft_vocab_size"], decoder.vocab_size),
                "target_hidden_size": _partial(fields["target_hidden_size"], decoder.hidden_size),
            }
        )

    def to_hf(self) -> dict[str, Any]:
        windows = {view.window for view in self.views} - {None}
        optional = {
            name: getattr(self, name)
            for name in _OPTIONAL_FIELDS
            if getattr(self, name) != getattr(type(self), name)
        }
        return (
            hf_config.write_architecture(self.decoder)
            | optional
            | ({"use_sliding_window": True} if windows else {})  # As transformers reads it.
            | {
                "model_type": "qwen3",
                "block_size": self.block_size,
                "num_target_layers": self.num_target_layers,
                "layer_types": layer_types(view.window is not None for view in self.views),
                "sliding_window": max(windows, default=None),
                "sliding_window_non_causal": not any(
                    view.causal for view in self.views if view.window is not None
                ),
                GROUP: {
                    "mask_token_id": self.mask_token_id,
                    "target_layer_ids": list(self.target_layer_ids),
                }
                | self._causality(),
            }
        )

    def _causality(self) -> dict[str, bool]:
        """Returns the fields that state causality for all layers, if it is the same for all."""
        if len({view.causal for view in self.views}) > 1:
            return {}
        return {"causal": self.causal, "causal_head": self.causal}

    @classmethod
    def for_target(cls, target: TargetArchitecture, options: DFlashArchitecture | None) -> Self:
        options = options or cls.architecture()
        names = cls.__dataclass_fields__.keys() & options.__dataclass_fields__.keys()
        sizes = {name: getattr(options, name) for name in names}
        names = "input_embedding_scale", "output_multiplier", "final_logit_softcapping"
        heads = dict(zip(names, target.lent, strict=True))
        shape = cls(**sizes | options.shape_fields(target) | heads)
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
        if any(len(pair) != 2 or pair[0] <= 0 for pair in self.calibration):
            message = "expected pairs of a positive slope and an offset"
            yield ("calibration",), message
        yield from self.rotary_problems()
        if self.sample_from_anchor and not self.anchor_may_draft:
            yield ("sample_from_anchor",), "true is not supported, only false"


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
class _GroupViews:
    """Fields of `dflash_config`; `causal`, `causal_head` and `is_causal` mean the same.

    A causality that is not stated is None.
    """

    use_swa: bool = False
    swa_window_size: int | None = option(None, minimum=1, maximum=2**30)
    causal: bool | None = None
    causal_head: bool | None = None
    is_causal: bool | None = None


@dataclasses.dataclass(frozen=True)
class _FileViews:
    """Fields at the top level of config.json."""

    layer_types: tuple[Literal["full_attention", "sliding_attention"], ...] = ()
    sliding_window: int | None = option_like(_GroupViews, "swa_window_size", None)
    sliding_window_non_causal: bool | None = None
    is_causal: bool | None = None
    use_sliding_window: bool = True  # False: sliding layers see all positions.


def layer_types(sliding: Iterable[bool]) -> list[str]:
    """Returns the field of layers that slide or not."""
    return [SLIDING if slides else FULL for slides in sliding]


def _partial(size: int | None, usual: int) -> int | None:
    """Returns a size that the drafter has of its own; None if it is the usual one."""
    return None if size == usual else size


def views_of(
    config: Mapping[str, Any], group: Mapping[str, Any], decoder: TargetArchitecture
) -> tuple[LayerView, ...]:
    """Returns the views that the window and causality fields of published files describe.

    By default a sliding layer is causal, and a full layer is bidirectional; a window that `use_swa`
    sets for all layers leaves them bidirectional. vLLM, SGLang, speculators and SpecForge agree.
    """
    beside = hf_config.read_fields(config, _FileViews)
    within = hf_config.read_fields(group, _GroupViews, group=GROUP)
    num_layers = decoder.num_hidden_layers
    types = beside.layer_types or (FULL,) * num_layers
    if len(types) != num_layers:
        raise errors.CheckpointError(
            f"{hf_config.FILE}: layer_types names {len(types)} layers, num_hidden_layers is "
            f"{num_layers}"
        )
    window = beside.sliding_window
    if not beside.use_sliding_window:
        window = decoder.max_position_embeddings
    slides_causally = True
    if within.use_swa:
        window = within.swa_window_size or window
        if SLIDING not in types:  # Then use_swa applies to all layers.
            types, slides_causally = (SLIDING,) * num_layers, False
    if SLIDING in types and window is None:
        raise errors.CheckpointError(
            f"{hf_config.FILE}: layer {types.index(SLIDING)} slides, but no sliding_window or "
            "swa_window_size is given"
        )
    flags = (beside.is_causal, within.causal, within.causal_head, within.is_causal)
    causal = next((value for value in flags if value is not None), None)
    if causal is not None:
        slides_causally = causal
    elif beside.sliding_window_non_causal is not None:
        slides_causally = not beside.sliding_window_non_causal
    sliding, full = LayerView(window, slides_causally), LayerView(causal=bool(causal))
    return tuple(sliding if kind == SLIDING else full for kind in types)
