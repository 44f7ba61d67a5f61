"""The shape of an EAGLE-3 drafter: as its config.json states it, or as a target asks for it."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from dflash import errors
from dflash.checkpoints import hf_config
from dflash.config.schema import Eagle3Architecture, TargetArchitecture
from dflash.drafters.parts import compatibility

# What the published files mean by leaving it out.
_ROPE_THETA = 10000.0
_NUM_TAPS = 3


@dataclasses.dataclass(frozen=True)
class Eagle3Shape:
    """Everything that an EAGLE-3 checkpoint's config.json states.

    Attributes:
      decoder: width, heads, rotary base and so on of the layer; the vocabulary is the target's.
      draft_vocab_size: tokens that can be drafted.
      target_layer_ids: tapped layers of the target; None in published files, which leave it to the
        target's depth.
      num_target_layers: depth of the target that it was trained for; None where not stated.
    """

    decoder: TargetArchitecture
    draft_vocab_size: int
    target_layer_ids: tuple[int, ...] | None
    num_target_layers: int | None

    @property
    def num_taps(self) -> int:
        """Layers of the target that are tapped."""
        return _NUM_TAPS if self.target_layer_ids is None else len(self.target_layer_ids)


def read(config: Mapping[str, Any]) -> Eagle3Shape:
    """Reads a drafter's config.json.

    Raises:
      CheckpointError: a field is missing, contradicts another, or asks for what is not done here.
    """
    if not (config.get("rope_parameters") or {}).get("rope_theta"):
        config = {"rope_theta": _ROPE_THETA} | dict(config)
    decoder = hf_config.read_architecture(config)
    for key in ("attention_bias", "mlp_bias"):
        if config.get(key):
            raise errors.CheckpointError(f"config.json: {key}: true is not supported")
    if decoder.num_hidden_layers != 1:
        raise errors.CheckpointError(
            f"config.json: num_hidden_layers: {decoder.num_hidden_layers}, but EAGLE-3 has 1"
        )
    size = config.get("draft_vocab_size") or decoder.vocab_size
    if size > decoder.vocab_size:
        raise errors.CheckpointError(
            f"config.json: draft_vocab_size {size} exceeds vocab_size {decoder.vocab_size}"
        )
    taps = config.get("target_layer_ids")
    foreign = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    if foreign is not None and taps is None:
        # Programs disagree on whether these are layers whose inputs or whose outputs are meant.
        raise errors.CheckpointError(
            f"config.json: eagle_aux_hidden_state_layer_ids {foreign} are not read; state the "
            "layers whose outputs the drafter reads, counted from 0, as target_layer_ids"
        )
    return Eagle3Shape(
        decoder=decoder,
        draft_vocab_size=size,
        target_layer_ids=None if taps is None else tuple(taps),
        num_target_layers=config.get("num_target_layers"),
    )


def write(shape: Eagle3Shape) -> dict[str, Any]:
    """The fields of config.json that state this shape; `read` reads them back."""
    taps = shape.target_layer_ids
    return hf_config.write_architecture(shape.decoder) | {
        "model_type": "llama",
        "draft_vocab_size": shape.draft_vocab_size,
        "target_layer_ids": None if taps is None else list(taps),
        "num_target_layers": shape.num_target_layers,
    }


def for_target(target: TargetArchitecture, options: Eagle3Architecture | None) -> Eagle3Shape:
    """The shape of a fresh drafter for a target."""
    options = options or Eagle3Architecture()
    decoder = dataclasses.replace(
        target,
        num_hidden_layers=1,
        intermediate_size=options.intermediate_size or target.intermediate_size,
        tie_word_embeddings=False,
    )
    return Eagle3Shape(
        decoder=decoder,
        draft_vocab_size=options.draft_vocab_size or target.vocab_size,
        target_layer_ids=options.target_layer_ids,
        num_target_layers=target.num_hidden_layers,
    )


def fit(shape: Eagle3Shape, target: TargetArchitecture) -> Eagle3Shape:
    """The shape with everything filled in that the target decides.

    Raises:
      CheckpointError: the drafter was trained for a target of another shape.
      ConfigError: it cannot be had for this target.
    """
    pairs = {
        "hidden size": (shape.decoder.hidden_size, target.hidden_size),
        "vocabulary": (shape.decoder.vocab_size, target.vocab_size),
    }
    if shape.num_target_layers is not None:
        pairs["number of target layers"] = (shape.num_target_layers, target.num_hidden_layers)
    compatibility.check_same(pairs)
    if shape.draft_vocab_size > target.vocab_size:
        raise errors.ConfigError(
            f"drafter.architecture.draft_vocab_size: {shape.draft_vocab_size} exceeds the target's "
            f"vocabulary of {target.vocab_size}"
        )
    depth = target.num_hidden_layers
    taps = shape.target_layer_ids or default_taps(depth)
    if not set(taps) <= set(range(depth)):
        raise errors.CheckpointError(
            f"drafter: taps layers {list(taps)}, but the target has {depth} layers"
        )
    return dataclasses.replace(shape, target_layer_ids=taps, num_target_layers=depth)


def default_taps(num_target_layers: int) -> tuple[int, int, int]:
    """The layers before layers 2, L // 2 and L - 3 of L; toys are too shallow to spread."""
    taps = 1, num_target_layers // 2 - 1, num_target_layers - 4
    last = num_target_layers - 1
    low, middle, high = (min(max(layer, 0), last) for layer in taps)
    return low, middle, high
