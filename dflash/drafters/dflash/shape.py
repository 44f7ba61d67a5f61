"""The shape of a DFlash drafter: as its config.json states it, or as a target asks for it."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from dflash import errors
from dflash.checkpoints import hf_config
from dflash.config.schema import DFlashArchitecture, TargetArchitecture
from dflash.drafters.parts import compatibility


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
      num_target_layers: depth of the target that the drafter was trained for; None: not stated.
      views: one per draft layer.
    """

    decoder: TargetArchitecture
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int | None
    views: tuple[LayerView, ...]


def read(config: Mapping[str, Any]) -> DFlashShape:
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


def write(shape: DFlashShape, architectures: Sequence[str]) -> dict[str, Any]:
    """The config.json of a checkpoint with this shape; `read` reads it back.

    Args:
      shape: of the drafter.
      architectures: names of its class, as config.json states them.
    """
    windows = {view.window for view in shape.views} - {None}
    sliding = [view.window is not None for view in shape.views]
    return hf_config.write_architecture(shape.decoder) | {
        "architectures": list(architectures),
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


def for_target(target: TargetArchitecture, options: DFlashArchitecture | None) -> DFlashShape:
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


def check_target(shape: DFlashShape, target: TargetArchitecture) -> None:
    """Raises CheckpointError if the drafter was trained for a target of another shape."""
    depth = target.num_hidden_layers
    compatibility.check_same(
        {
            "hidden size": (shape.decoder.hidden_size, target.hidden_size),
            "number of target layers": (shape.num_target_layers or depth, depth),
            "vocabulary": (shape.decoder.vocab_size, target.vocab_size),
        }
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
