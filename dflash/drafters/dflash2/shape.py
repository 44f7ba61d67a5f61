"""The shape of a DFlash2 drafter: DFlash's, with convolutions and a candidate selector."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from dflash import errors
from dflash.checkpoints import hf_config
from dflash.config.schema import (
    MAX_BLOCK_SIZE,
    MAX_RANK,
    DFlash2Architecture,
    TargetArchitecture,
    option,
)
from dflash.drafters.dflash import shape as dflash_shape
from dflash.drafters.dflash.shape import DFlashShape, fit
from dflash.drafters.parts import compatibility

__all__ = ["DFlash2Shape", "fit", "for_target", "read", "write"]

_GROUP, _INNER = "dflash_config", "transformer_layer_config"


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Own:
    """Fields of a DFlash2 drafter beside DFlash's.

    Attributes:
      conv_kernel_size: taps; a row and those before it.
      conv_group_size: channels that share what a row adds to their taps.
      selector_rank: of the bilinear score.
      selector_top_k: candidates of each draft position.
    """

    conv_kernel_size: int = option(minimum=1, maximum=MAX_BLOCK_SIZE)
    conv_group_size: int = option(minimum=1, maximum=2**20)
    selector_rank: int = option(minimum=1, maximum=MAX_RANK)
    selector_top_k: int = option(minimum=1, maximum=1024)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DFlash2Shape(DFlashShape, _Own):
    """Everything that a DFlash2 checkpoint's config.json states."""


@dataclasses.dataclass(frozen=True)
class _Speculators:
    """Further fields of a config.json of speculators; a tap names the layer that it enters."""

    aux_hidden_state_layer_ids: tuple[int, ...] = option(minimum=1, maximum=2**12)
    draft_vocab_size: int | None = option(None, minimum=1)


def read(hf: Mapping[str, Any]) -> DFlash2Shape:
    """Reads a drafter's config.json, of z-lab or of speculators.

    In that of speculators the decoder is a group of its own, and the target's depth is not stated.

    Raises:
      CheckpointError: a field is missing, unusable, contradicts another, or asks for what is not
        done here.
    """
    if _INNER in hf:
        own = hf_config.read_fields(hf, _Own)
        base = dataclasses.replace(dflash_shape.read(_flatten(hf)), num_target_layers=None)
    else:
        own = hf_config.read_fields(hf_config.read_group(hf, _GROUP), _Own, group=_GROUP)
        hf_config.check_only(hf, "draft_vocab_size", hf.get("vocab_size"))
        base = dflash_shape.read(hf)
    shape = DFlash2Shape(**vars(base), **vars(own))
    compatibility.check_file(_problems(shape))
    return shape


def write(shape: DFlash2Shape) -> dict[str, Any]:
    """The fields of config.json that state this shape, as z-lab has them; `read` reads them."""
    config = dflash_shape.write(shape)
    config[_GROUP] |= {"projector_type": "dflash2"}
    config[_GROUP] |= {field.name: getattr(shape, field.name) for field in dataclasses.fields(_Own)}
    return config


def for_target(target: TargetArchitecture, options: DFlash2Architecture | None) -> DFlash2Shape:
    """The shape of a fresh drafter for a target.

    Raises:
      ConfigError: the options contradict one another.
    """
    options = options or DFlash2Architecture()
    base = dflash_shape.of_blocks(target, options)
    own = {field.name: getattr(options, field.name) for field in dataclasses.fields(_Own)}
    shape = DFlash2Shape(**vars(base), **own)
    compatibility.check_options(_problems(shape))
    return shape


def _problems(shape: DFlash2Shape) -> Iterator[compatibility.Problem]:
    width, vocab = shape.decoder.hidden_size, shape.decoder.vocab_size
    if width % shape.conv_group_size:
        message = f"{shape.conv_group_size} does not divide the hidden size {width}"
        yield ("conv_group_size",), message
    if shape.selector_top_k > vocab:
        yield ("selector_top_k",), f"{shape.selector_top_k} exceeds the vocabulary of {vocab}"


def _flatten(hf: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json of speculators in z-lab's layout."""
    inner = hf_config.read_group(hf, _INNER)
    own = hf_config.read_fields(hf, _Speculators)
    hf_config.check_only(hf, "sample_from_anchor", False)
    taps = own.aux_hidden_state_layer_ids
    if not taps:
        raise errors.CheckpointError(
            f"{hf_config.FILE}: aux_hidden_state_layer_ids: expected at least one layer, got none"
        )
    if own.draft_vocab_size not in (None, inner.get("vocab_size")):
        raise errors.CheckpointError(
            f"{hf_config.FILE}: draft_vocab_size: {own.draft_vocab_size} is not the target's "
            f"vocabulary of {inner.get('vocab_size')}"
        )
    kept = ("block_size", "mask_token_id", "sliding_window_non_causal")
    return {
        **inner,
        **{name: hf.get(name) for name in kept},
        "num_target_layers": max(taps),
        _GROUP: {"target_layer_ids": [layer - 1 for layer in taps]},
    }
