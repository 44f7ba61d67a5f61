"""Config keys and shape of DFlash2 drafters, which add convolutions and a selector to DFlash."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from dflash.config.schema import MAX_BLOCK_SIZE, option
from dflash.drafters import base_config
from dflash.drafters.base_config import MAX_RANK, MAX_WIDTH, BlockDrafterConfig, ConditionalTree
from dflash.drafters.dflash_config import DFlashArchitecture, DFlashShape
from dflash.drafters.layouts_config import GROUP


@dataclasses.dataclass(frozen=True, kw_only=True)
class Selector:
    """Sizes of what DFlash2 adds to DFlash.

    Attributes:
      conv_kernel_size: Number of taps of a convolution: the row itself and the rows before it.
      conv_group_size: Number of channels that share a correction of the taps.
      selector_rank: Rank of the bilinear score.
      selector_top_k: Number of candidates per draft position.
    """

    conv_kernel_size: int = option(2, minimum=1, maximum=MAX_BLOCK_SIZE)
    conv_group_size: int = option(16, minimum=1, maximum=MAX_WIDTH)
    selector_rank: int = option(256, minimum=1, maximum=MAX_RANK)
    selector_top_k: int = option(16, minimum=1, maximum=1024)


@dataclasses.dataclass(frozen=True)
class DFlash2Architecture(Selector, DFlashArchitecture):
    """Architecture of a fresh DFlash2 drafter."""


@dataclasses.dataclass(frozen=True)
class DFlash2Config(BlockDrafterConfig):
    """Keys of a DFlash2 drafter."""

    name: str = "dflash2"
    tree: ConditionalTree | None = None  # None: a chain.
    architecture: DFlash2Architecture | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class DFlash2Shape(Selector, DFlashShape):
    """Contents of a DFlash2 checkpoint's config.json."""

    layout: ClassVar[Mapping[str, Any]] = {"projector": "dflash2", "slides_causally": False}
    architecture: ClassVar[type] = DFlash2Architecture

    def to_hf(self) -> dict[str, Any]:
        config = super().to_hf()
        config[GROUP] |= {"projector_type": self.layout["projector"]} | self.added
        return config

    def _problems(self) -> Iterable[base_config.Problem]:
        yield from super()._problems()
        yield from convolution_problems(self)
        if self.selector_top_k > self.num_draft_tokens:
            message = f"{self.selector_top_k} exceeds the vocabulary of {self.num_draft_tokens}"
            yield ("selector_top_k",), message


def convolution_problems(shape: Any) -> Iterable[base_config.Problem]:
    """Yields the problems of a shape's convolutions, which both sizes declare absent if 0."""
    width, group_size = shape.decoder.hidden_size, shape.conv_group_size
    if bool(shape.conv_kernel_size) != bool(group_size):
        message = f"{group_size}, but conv_kernel_size is {shape.conv_kernel_size}"
        yield ("conv_group_size",), message
    elif group_size and width % group_size:
        yield ("conv_group_size",), f"{group_size} does not divide the hidden size {width}"
