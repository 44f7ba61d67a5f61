"""Config keys and shape of DFlash2 drafters, which add convolutions and a selector to DFlash."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Self

from dflash.checkpoints import hf_config
from dflash.config.schema import MAX_BLOCK_SIZE, TargetArchitecture, option, option_like, subset
from dflash.drafters import base_config
from dflash.drafters.base_config import MAX_RANK, MAX_WIDTH, BlockDrafterConfig, ConditionalTree
from dflash.drafters.dflash_config import DFlashArchitecture, DFlashShape
from dflash.drafters.layouts_config import GROUP


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
class DFlash2Architecture(DFlashArchitecture):
    """Architecture of a fresh DFlash2 drafter."""

    conv_kernel_size: int = option_like(DFlash2Fields, "conv_kernel_size", 2)
    conv_group_size: int = option_like(DFlash2Fields, "conv_group_size", 16)
    selector_rank: int = option_like(DFlash2Fields, "selector_rank", 256)
    selector_top_k: int = option_like(DFlash2Fields, "selector_top_k", 16)


@dataclasses.dataclass(frozen=True)
class DFlash2Config(BlockDrafterConfig):
    """Keys of a DFlash2 drafter."""

    name: str = "dflash2"
    tree: ConditionalTree | None = None  # None: a chain.
    architecture: DFlash2Architecture | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class DFlash2Shape(DFlashShape, DFlash2Fields):
    """Contents of a DFlash2 checkpoint's config.json."""

    layout: ClassVar[Mapping[str, Any]] = {"projector": "dflash2", "slides_causally": False}

    @classmethod
    def _read(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        own = hf_config.read_fields({**config, **config[GROUP]}, DFlash2Fields)
        return super()._read(config) | vars(own)

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
        yield from super()._problems()
        width = self.decoder.hidden_size
        vocab_size = self.draft_vocab_size or self.decoder.vocab_size
        if width % self.conv_group_size:
            message = f"{self.conv_group_size} does not divide the hidden size {width}"
            yield ("conv_group_size",), message
        if self.selector_top_k > vocab_size:
            message = f"{self.selector_top_k} exceeds the vocabulary of {vocab_size}"
            yield ("selector_top_k",), message
