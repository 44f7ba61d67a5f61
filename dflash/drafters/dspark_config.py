"""Config keys and shape of DSpark drafters, which add two heads to DFlash."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from dflash.config.schema import option
from dflash.drafters.base_config import MAX_RANK, BlockDrafterConfig, ConditionalTree
from dflash.drafters.dflash_config import DFlashArchitecture, DFlashShape
from dflash.drafters.layouts_config import GROUP


@dataclasses.dataclass(frozen=True, kw_only=True)
class MarkovHead:
    """Head that scores a draft by the token before it.

    Attributes:
      markov_rank: Size of the vector that represents a token to the draft position after it.
      markov_head_type: Kind of the head.
    """

    markov_rank: int = option(256, minimum=1, maximum=MAX_RANK)
    markov_head_type: Literal["vanilla", "gated", "rnn"] = "vanilla"


@dataclasses.dataclass(frozen=True)
class DSparkArchitecture(MarkovHead, DFlashArchitecture):
    """Architecture of a fresh DSpark drafter; block_size counts the drafts without the anchor."""


@dataclasses.dataclass(frozen=True)
class DSparkConfig(BlockDrafterConfig):
    """Keys of a DSpark drafter."""

    name: str = "dspark"
    tree: ConditionalTree | None = None  # None: a chain.
    architecture: DSparkArchitecture | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class DSparkShape(MarkovHead, DFlashShape):
    """Contents of a DSpark config.json, of whose blocks every row drafts by default.

    DeepSpec's files have DFlash's fields without a group of their own.

    Attributes:
      enable_confidence_head: Whether there is a confidence head.
      confidence_head_with_markov: Whether the confidence head reads the previous token.
    """

    layout: ClassVar[Mapping[str, Any]] = {
        "projector": "dspark",
        "own_groups": ("dspark_config",),
        "shifts_labels": True,
    }
    architecture: ClassVar[type] = DSparkArchitecture
    file_defaults: ClassVar[Mapping[str, Any]] = {
        "enable_confidence_head": False,
        "confidence_head_with_markov": False,
    }

    sample_from_anchor: bool = True
    enable_confidence_head: bool = True
    confidence_head_with_markov: bool = True

    def to_hf(self) -> dict[str, Any]:
        config = super().to_hf()
        group = config.pop(GROUP)
        beside = {name: group[name] for name in ("mask_token_id", "target_layer_ids")}
        causal = {"is_causal": True} if self.causal else {}  # Published files have no such field.
        return config | beside | causal | self.added
