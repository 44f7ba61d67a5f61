"""The shape of an EAGLE-3 drafter: as its config.json states it, or as a config asks for it."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from dflash import errors
from dflash.checkpoints import hf_config
from dflash.config.schema import Eagle3Architecture, TargetArchitecture, option
from dflash.drafters.parts import compatibility, decoder_shape

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


@dataclasses.dataclass(frozen=True)
class _Own:
    """Fields of config.json beside the decoder's."""

    draft_vocab_size: int | None = option(None, minimum=1, maximum=2**24)
    target_layer_ids: tuple[int, ...] | None = option(None, minimum=0, maximum=2**12)
    num_target_layers: int | None = option(None, minimum=1, maximum=2**12)


def read(hf: Mapping[str, Any]) -> Eagle3Shape:
    """Reads a drafter's config.json.

    Raises:
      CheckpointError: a field is missing, unusable, contradicts another, or asks for what is not
        done here.
    """
    for key in ("attention_bias", "mlp_bias"):
        hf_config.check_only(hf, key, False)
    own = hf_config.read_fields(hf, _Own)
    eagle = hf_config.read_group(hf, "eagle_config")
    foreign = eagle.get("eagle_aux_hidden_state_layer_ids")
    if foreign is not None and own.target_layer_ids is None:
        # Programs disagree on whether these are layers whose inputs or whose outputs are meant.
        raise errors.CheckpointError(
            f"{hf_config.FILE}: eagle_aux_hidden_state_layer_ids are ambiguous; state the layers "
            "whose outputs the drafter reads, counted from 0, as target_layer_ids"
        )
    if not hf_config.read_group(hf, "rope_parameters").get("rope_theta"):
        hf = {"rope_theta": _ROPE_THETA} | {k: v for k, v in hf.items() if v is not None}
    decoder = hf_config.read_architecture(hf)
    shape = Eagle3Shape(
        decoder=decoder,
        draft_vocab_size=own.draft_vocab_size or decoder.vocab_size,
        target_layer_ids=own.target_layer_ids,
        num_target_layers=own.num_target_layers,
    )
    compatibility.check_file(_problems(shape))
    return shape


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
    """The shape of a fresh drafter for a target.

    Raises:
      ConfigError: the options contradict one another, or the target.
    """
    options = options or Eagle3Architecture()
    decoder = decoder_shape.for_target(
        target, options, num_hidden_layers=1, tie_word_embeddings=False
    )
    shape = Eagle3Shape(
        decoder=decoder,
        draft_vocab_size=options.draft_vocab_size or target.vocab_size,
        target_layer_ids=options.target_layer_ids,
        num_target_layers=target.num_hidden_layers,
    )
    compatibility.check_options(_problems(shape))
    return shape


def fit(shape: Eagle3Shape, target: TargetArchitecture) -> Eagle3Shape:
    """The shape, with the target's depth and the layers to tap where they were not stated.

    Raises:
      CheckpointError: the drafter was trained for a target of another shape.
    """
    depth = target.num_hidden_layers
    compatibility.check_same(
        {
            "hidden size": (shape.decoder.hidden_size, target.hidden_size),
            "vocabulary": (shape.decoder.vocab_size, target.vocab_size),
            "number of target layers": (shape.num_target_layers, depth),
        }
    )
    taps = shape.target_layer_ids or default_taps(depth)
    if max(taps) >= depth:
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


def _problems(shape: Eagle3Shape) -> Iterator[compatibility.Problem]:
    decoder, size = shape.decoder, shape.draft_vocab_size
    if decoder.num_hidden_layers != 1:
        yield ("num_hidden_layers",), f"{decoder.num_hidden_layers}, but EAGLE-3 has 1"
    if size > decoder.vocab_size:
        yield ("draft_vocab_size",), f"{size} exceeds the vocabulary of {decoder.vocab_size}"
