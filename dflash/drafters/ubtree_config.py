"""Config keys and shape of UBTree drafters, whose selector computes codes from embeddings."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from dflash.config.schema import MAX_BLOCK_SIZE, option
from dflash.drafters.base_config import MAX_WIDTH, BlockDrafterConfig, ConditionalTree
from dflash.drafters.dflash2_config import DFlash2Shape, Selector
from dflash.drafters.dflash_config import DFlashArchitecture


@dataclasses.dataclass(frozen=True, kw_only=True)
class CodeSelector(Selector):
    """Sizes of what UBTree adds to DFlash.

    Attributes:
      selector_hidden_size: Width of the networks from the target's embeddings to codes; 0 for
        tables of codes, as in DFlash2.
      conv_kernel_size: Number of taps of DFlash2's convolutions; 0 for none.
      conv_group_size: Number of channels that share a correction of the taps; 0 for none.
    """

    selector_hidden_size: int = option(1024, minimum=0, maximum=MAX_WIDTH)
    conv_kernel_size: int = option(0, minimum=0, maximum=MAX_BLOCK_SIZE)
    conv_group_size: int = option(0, minimum=0, maximum=MAX_WIDTH)


@dataclasses.dataclass(frozen=True)
class UBTreeArchitecture(CodeSelector, DFlashArchitecture):
    """Architecture of a fresh UBTree drafter."""


@dataclasses.dataclass(frozen=True)
class UBTreeConfig(BlockDrafterConfig):
    """Keys of a UBTree drafter."""

    name: str = "ubtree"
    tree: ConditionalTree | None = None  # None: a chain.
    # Form of the selector's codes in files that training writes. tables: two rows per token, as
    # DFlash2's readers expect. networks: what the tables are computed from, which is smaller and
    # which training goes on from; decoding then computes the tables when it loads the file.
    codes: Literal["tables", "networks"] = "tables"
    architecture: UBTreeArchitecture | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class UBTreeShape(CodeSelector, DFlash2Shape):
    """Contents of a UBTree checkpoint's config.json."""

    layout: ClassVar[Mapping[str, Any]] = {"projector": "ubtree"}
    anchor_may_draft: ClassVar[bool] = False
    architecture: ClassVar[type] = UBTreeArchitecture
    # A file with DFlash2's fields has tables.
    file_defaults: ClassVar[Mapping[str, Any]] = {
        "selector_hidden_size": 0,
        "conv_kernel_size": 0,
        "conv_group_size": 0,
    }
