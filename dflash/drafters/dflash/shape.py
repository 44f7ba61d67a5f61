"""The shape of a DFlash drafter: as its config.json states it, or as a config asks for it."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from dflash import errors
from dflash.checkpoints import hf_config
from dflash.config.schema import (
    MAX_BLOCK_SIZE,
    BlockArchitecture,
    DFlashArchitecture,
    TargetArchitecture,
    option,
)
from dflash.drafters.parts import compatibility, decoder_shape

_FULL, _SLIDING = "full_attention", "sliding_attention"
_GROUP = "dflash_config"
# Fields of some drafters, by what the layers here do.
_ONLY = {"draft_shift": False}


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
      mask_token_id: token at the positions to be drafted.
      target_layer_ids: tapped layers of the target.
      num_target_layers: depth of the target that the drafter was trained for; None: not stated.
      views: one per draft layer.
      draft_vocab_size: tokens that can be drafted, by an output head of their own; None: all of the
        target's, by the target's head.
      partial_rotary_factor: share of a head that is rotated, its first numbers.
      attention_sink_bias: heads have a learned score that stands for no position.
      attention_value_scale: factor on values.
    """

    decoder: TargetArchitecture
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int | None
    views: tuple[LayerView, ...]
    draft_vocab_size: int | None = None
    partial_rotary_factor: float = 1.0
    attention_sink_bias: bool = False
    attention_value_scale: float = 1.0

    @property
    def rotary(self) -> TargetArchitecture:
        """The decoder, as wide as what is rotated of a head."""
        width = int(self.decoder.head_dim * self.partial_rotary_factor)
        return dataclasses.replace(self.decoder, head_dim=width)


@dataclasses.dataclass(frozen=True)
class _Heads:
    """Fields of some drafters, in `dflash_config` or beside it."""

    partial_rotary_factor: float | None = option(None, minimum=0.0, maximum=1.0)
    attention_sink_bias: bool | None = None
    attention_value_scale: float | None = option(None, minimum=0.0, maximum=1e3)


@dataclasses.dataclass(frozen=True)
class _Sizes:
    """Fields that newer files hold in `dflash_config`, older ones beside it."""

    block_size: int | None = option(None, minimum=2, maximum=MAX_BLOCK_SIZE)
    num_target_layers: int | None = option(None, minimum=1, maximum=2**12)
    mask_token_id: int | None = option(None, minimum=0, maximum=2**24)
    target_layer_ids: tuple[int, ...] = option((), minimum=0, maximum=2**12)


@dataclasses.dataclass(frozen=True)
class _Own(_Sizes):
    """Fields of `dflash_config`."""

    use_swa: bool = False
    swa_window_size: int | None = option(None, minimum=1, maximum=2**30)
    causal: bool = False
    causal_head: bool = False  # the same, as JetSpec names it
    is_causal: bool = False


@dataclasses.dataclass(frozen=True)
class _Attention:
    """Fields of the file itself that say what its layers see."""

    layer_types: tuple[Literal["full_attention", "sliding_attention"], ...] = ()
    sliding_window: int | None = option(None, minimum=1, maximum=2**30)
    sliding_window_non_causal: bool = True
    is_causal: bool = False


@dataclasses.dataclass(frozen=True)
class _Head:
    """Fields of the file itself that say what is drafted."""

    draft_vocab_size: int | None = option(None, minimum=1, maximum=2**24)


_USUAL_HEADS = _Heads(1.0, False, 1.0)


def read(hf: Mapping[str, Any]) -> DFlashShape:
    """Reads a drafter's config.json, in its older and its newer layout.

    Raises:
      CheckpointError: a field is missing, unusable, or contradicts another.
    """
    decoder = hf_config.read_architecture(hf)
    group = hf_config.read_group(hf, _GROUP)
    own = hf_config.read_fields(group, _Own, group=_GROUP)
    for fields in (hf, group):
        for name, supported in _ONLY.items():
            hf_config.check_only(fields, name, supported)
    sizes = _newer(hf_config.read_fields(hf, _Sizes), own)
    in_group = hf_config.read_fields(group, _Heads, group=_GROUP)
    heads = _newer(hf_config.read_fields(hf, _Heads), in_group)
    heads = {name: value for name, value in heads.items() if value is not None}
    missing = [name for name, value in sizes.items() if value is None]
    if missing:
        raise errors.CheckpointError(f"{hf_config.FILE}: missing {', '.join(missing)}")
    sizes["target_layer_ids"] = sizes["target_layer_ids"] or default_taps(
        sizes["num_target_layers"], decoder.num_hidden_layers
    )
    stated = hf_config.read_fields(hf, _Attention)
    views = _views(stated, own, decoder.num_hidden_layers)
    drafted = hf_config.read_fields(hf, _Head).draft_vocab_size
    shape = DFlashShape(
        decoder=decoder,
        views=views,
        draft_vocab_size=_fewer(drafted, decoder.vocab_size),
        **sizes,
        **heads,
    )
    compatibility.check_file(_problems(shape))
    if (turned := shape.rotary.head_dim) % 2 or not turned:
        raise errors.CheckpointError(
            f"{hf_config.FILE}: partial_rotary_factor: {shape.partial_rotary_factor} of "
            f"{decoder.head_dim} numbers a head are {turned}, which are no pairs"
        )
    return shape


def _newer(beside: Any, within: Any) -> dict[str, Any]:
    """Fields that stand beside a group, unless they stand within it too."""
    return {
        name: value if getattr(within, name) in (None, ()) else getattr(within, name)
        for name, value in vars(beside).items()
    }


def write(shape: DFlashShape) -> dict[str, Any]:
    """The fields of config.json that state this shape; `read` reads them back."""
    windows = {view.window for view in shape.views} - {None}
    usual = vars(_USUAL_HEADS)
    heads = {name: getattr(shape, name) for name in usual if getattr(shape, name) != usual[name]}
    if shape.draft_vocab_size is not None:
        heads["draft_vocab_size"] = shape.draft_vocab_size
    return (
        hf_config.write_architecture(shape.decoder)
        | heads
        | {
            "model_type": "qwen3",
            "block_size": shape.block_size,
            "num_target_layers": shape.num_target_layers,
            "layer_types": [_FULL if view.window is None else _SLIDING for view in shape.views],
            "sliding_window": max(windows, default=None),
            "sliding_window_non_causal": not any(view.causal for view in shape.views),
            _GROUP: {
                "mask_token_id": shape.mask_token_id,
                "target_layer_ids": list(shape.target_layer_ids),
                "causal": is_causal(shape),
                "causal_head": is_causal(shape),
            },
        }
    )


def for_target(target: TargetArchitecture, options: DFlashArchitecture | None) -> DFlashShape:
    """The shape of a fresh drafter for a target.

    Raises:
      ConfigError: the options contradict one another, or the target.
    """
    options = options or DFlashArchitecture()
    drafted = _fewer(options.draft_vocab_size, target.vocab_size)
    shape = dataclasses.replace(of_blocks(target, options), draft_vocab_size=drafted)
    compatibility.check_options(_problems(shape))
    return shape


def of_blocks(target: TargetArchitecture, options: BlockArchitecture) -> DFlashShape:
    """The shape of a fresh drafter of this kind, which drafts from all of the target's tokens.

    Raises:
      ConfigError: the options contradict one another.
    """
    taps = options.target_layer_ids or default_taps(
        target.num_hidden_layers, options.num_target_features
    )
    last_token = target.vocab_size - 1
    layers = options.num_hidden_layers
    return DFlashShape(
        decoder=decoder_shape.for_target(target, options, num_hidden_layers=layers),
        block_size=options.block_size,
        mask_token_id=last_token if options.mask_token_id is None else options.mask_token_id,
        target_layer_ids=taps,
        num_target_layers=target.num_hidden_layers,
        views=(LayerView(causal=options.causal),) * layers,
    )


def fit(shape: DFlashShape, target: TargetArchitecture) -> DFlashShape:
    """The shape, with the target's depth where it was not stated.

    Raises:
      CheckpointError: the drafter was trained for a target of another shape.
    """
    depth = target.num_hidden_layers
    compatibility.check_same(
        {
            "hidden size": (shape.decoder.hidden_size, target.hidden_size),
            "number of target layers": (shape.num_target_layers, depth),
            "vocabulary": (shape.decoder.vocab_size, target.vocab_size),
        }
    )
    if max(shape.target_layer_ids) >= depth or shape.mask_token_id >= target.vocab_size:
        raise errors.CheckpointError(
            f"drafter: taps layers {list(shape.target_layer_ids)} and masks with token "
            f"{shape.mask_token_id}, but the target has {depth} layers and "
            f"{target.vocab_size} tokens"
        )
    return dataclasses.replace(shape, num_target_layers=depth)


def is_causal(shape: DFlashShape) -> bool:
    """Whether a block row depends on the rows up to itself alone."""
    return all(view.causal for view in shape.views)


def default_taps(num_target_layers: int, count: int) -> tuple[int, ...]:
    """Target layers to tap when none are stated: evenly spread, without the first and the last."""
    if count == 1:
        return (num_target_layers // 2,)
    span, last = num_target_layers - 4, num_target_layers - 1
    spread = (round(1 + i * span / (count - 1)) for i in range(count))
    return tuple(min(max(layer, 0), last) for layer in spread)  # toys are too shallow to spread


def _fewer(drafted: int | None, vocab_size: int) -> int | None:
    """A draft vocabulary's size; None where it is the whole vocabulary."""
    return None if drafted == vocab_size else drafted


def _problems(shape: DFlashShape) -> Iterator[compatibility.Problem]:
    size, vocab_size = shape.draft_vocab_size, shape.decoder.vocab_size
    if size is not None and size > vocab_size:
        yield ("draft_vocab_size",), f"{size} exceeds the vocabulary of {vocab_size}"


def _views(stated: _Attention, own: _Own, num_layers: int) -> tuple[LayerView, ...]:
    """What each layer sees, from the several fields by which checkpoints have said it."""
    types = stated.layer_types or (_FULL,) * num_layers
    if len(types) != num_layers:
        raise errors.CheckpointError(
            f"{hf_config.FILE}: layer_types names {len(types)} layers, num_hidden_layers is "
            f"{num_layers}"
        )
    window = stated.sliding_window
    if own.use_swa:
        window = own.swa_window_size or window
        if _SLIDING not in types:  # the flag alone: every layer slides
            types = (_SLIDING,) * num_layers
    if _SLIDING in types and window is None:
        raise errors.CheckpointError(
            f"{hf_config.FILE}: layer {types.index(_SLIDING)} slides, but no sliding_window or "
            "swa_window_size is given"
        )
    causal = own.causal or own.causal_head or own.is_causal or stated.is_causal
    sliding = LayerView(window, causal or not stated.sliding_window_non_causal)
    full = LayerView(causal=causal)
    return tuple(sliding if kind == _SLIDING else full for kind in types)
