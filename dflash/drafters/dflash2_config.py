"""Config keys and shape of DFlash2 drafters, which add convolutions and a selector to DFlash."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, Self

from dflash import errors
from dflash.checkpoints import hf_config
from dflash.config.schema import MAX_BLOCK_SIZE, TargetArchitecture, option, option_like, subset
from dflash.drafters import base_config
from dflash.drafters.base_config import MAX_LAYERS, MAX_RANK, MAX_WIDTH, BlockDrafterConfig
from dflash.drafters.dflash_config import GROUP, BlockArchitecture, DFlashShape

_INNER = "transformer_layer_config"  # Group of the decoder in speculators files.


@dataclasses.dataclass(frozen=True, kw_only=True)
class DFlash2Fields:
    """Fields of config.json that DFlash2 adds to DFlash's.

    Attributes:
      conv_kernel_size: Number of taps of a convolution: the row itself and the rows before it.
      conv_group_size: Number of channels that share a correction of the taps.
      selector_rank: Rank of the bilinear score.
      selector_top_k: Number of candidates per draft position.
    """

    conv_kernel_size: int = option(minimum=1, maximum=MAX_BLOCK_SIZE)
    conv_group_size: int = option(minimum=1, maximum=MAX_WIDTH)
    selector_rank: int = option(minimum=1, maximum=MAX_RANK)
    selector_top_k: int = option(minimum=1, maximum=1024)


@dataclasses.dataclass(frozen=True)
class DFlash2Architecture(BlockArchitecture):
    """Architecture of a fresh DFlash2 drafter."""

    conv_kernel_size: int = option_like(DFlash2Fields, "conv_kernel_size", 2)
    conv_group_size: int = option_like(DFlash2Fields, "conv_group_size", 16)
    selector_rank: int = option_like(DFlash2Fields, "selector_rank", 256)
    selector_top_k: int = option_like(DFlash2Fields, "selector_top_k", 16)


@dataclasses.dataclass(frozen=True)
class DFlash2Config(BlockDrafterConfig):
    """Keys of a DFlash2 drafter."""

    name: str = "dflash2"
    architecture: DFlash2Architecture | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class DFlash2Shape(DFlashShape, DFlash2Fields):
    """Contents of a DFlash2 checkpoint's config.json."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Self:
        """Reads config.json, of z-lab or of speculators; see `DrafterShape.from_hf`.

        Speculators files have a group for the decoder's fields, and omit the target's depth.
        """
        if _INNER in config:
            own = hf_config.read_fields(config, DFlash2Fields)
            base = DFlashShape.from_hf(_flatten(config))
            base = dataclasses.replace(base, num_target_layers=None)
        else:
            group = hf_config.read_group(config, GROUP)
            own = hf_config.read_fields(group, DFlash2Fields, group=GROUP)
            hf_config.check_only(config, "draft_vocab_size", config.get("vocab_size"))
            base = DFlashShape.from_hf(config)
        shape = cls(**vars(base), **vars(own))
        base_config.check_file(shape._problems())
        return shape

    def to_hf(self) -> dict[str, Any]:
        """Writes z-lab's layout; see `DrafterShape.to_hf`."""
        config = super().to_hf()
        config[GROUP] |= {"projector_type": "dflash2"} | subset(self, DFlash2Fields)
        return config

    @classmethod
    def for_target(cls, target: TargetArchitecture, options: DFlash2Architecture | None) -> Self:
        """Returns the shape of a fresh DFlash2 drafter; see `DrafterShape.for_target`."""
        options = options or DFlash2Architecture()
        shape = cls(**options.shape_fields(target), **subset(options, DFlash2Fields))
        base_config.check_options(shape._problems())
        return shape

    def _problems(self) -> Iterable[base_config.Problem]:
        width, vocab_size = self.decoder.hidden_size, self.decoder.vocab_size
        if width % self.conv_group_size:
            message = f"{self.conv_group_size} does not divide the hidden size {width}"
            yield ("conv_group_size",), message
        if self.selector_top_k > vocab_size:
            message = f"{self.selector_top_k} exceeds the vocabulary of {vocab_size}"
            yield ("selector_top_k",), message


@dataclasses.dataclass(frozen=True)
class _SpeculatorsFields:
    """Further fields of a speculators config.json; a layer id names the layer after the tap."""

    aux_hidden_state_layer_ids: tuple[int, ...] = option(minimum=1, maximum=MAX_LAYERS)
    draft_vocab_size: int | None = option(None, minimum=1)


def _flatten(config: Mapping[str, Any]) -> dict[str, Any]:
    """Converts a config.json of speculators to z-lab's layout."""
    inner = hf_config.read_group(config, _INNER)
    own = hf_config.read_fields(config, _SpeculatorsFields)
    hf_config.check_only(config, "sample_from_anchor", False)
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
        **{name: config.get(name) for name in kept},
        "num_target_layers": max(taps),
        GROUP: {"target_layer_ids": [layer - 1 for layer in taps]},
    }
