"""Config keys and shape of DSpark drafters, which add two heads to DFlash."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

from dflash.checkpoints import hf_config
from dflash.config.schema import TargetArchitecture, option, option_like, subset
from dflash.drafters import base_config
from dflash.drafters.base_config import MAX_RANK, BlockDrafterConfig, ConditionalTree
from dflash.drafters.dflash_config import DFlashArchitecture, DFlashShape
from dflash.drafters.layouts_config import GROUP


@dataclasses.dataclass(frozen=True, kw_only=True)
class DSparkFields:
    """Fields of config.json that DSpark adds to DFlash's.

    Attributes:
      markov_rank: Size of the vector that represents a token to the draft position after it.
      markov_head_type: Kind of the previous-token head.
      enable_confidence_head: Whether there is a confidence head.
      confidence_head_with_markov: Whether the confidence head reads the previous token.
    """

    markov_rank: int = option(minimum=1, maximum=MAX_RANK)
    markov_head_type: Literal["vanilla", "gated", "rnn"] = option()
    enable_confidence_head: bool = False
    confidence_head_with_markov: bool = False


@dataclasses.dataclass(frozen=True)
class DSparkArchitecture(DFlashArchitecture):
    """Architecture of a fresh DSpark drafter; block_size counts the drafts without the anchor."""

    markov_rank: int = option_like(DSparkFields, "markov_rank", 256)
    markov_head_type: Literal["vanilla", "gated", "rnn"] = "vanilla"


@dataclasses.dataclass(frozen=True)
class DSparkConfig(BlockDrafterConfig):
    """Keys of a DSpark drafter."""

    name: str = "dspark"
    tree: ConditionalTree | None = None  # None: a chain.
    # Divisors of the log-odds of the confidence, one for each draft; an empty list leaves the
    # confidence as it is. The study `survival` fits them.
    confidence_temperatures: tuple[float, ...] = option((), minimum=1e-3, maximum=1e3)
    architecture: DSparkArchitecture | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class DSparkShape(DFlashShape, DSparkFields):
    """Contents of a DSpark config.json; block_size counts the drafts without the anchor.

    DeepSpec's files have DFlash's fields without a group of their own.
    """

    layout: ClassVar[Mapping[str, Any]] = {
        "projector": "dspark",
        "own_groups": ("dspark_config",),
        "anchor_drafts": True,
    }

    @classmethod
    def _read(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        own = hf_config.read_fields({**config, **config[GROUP]}, DSparkFields)
        return super()._read(config) | vars(own)

    def to_hf(self) -> dict[str, Any]:
        """Returns config.json fields, without DFlash's group; see `DrafterShape.to_hf`."""
        config = super().to_hf()
        group = config.pop(GROUP)
        kept = {name: group[name] for name in ("mask_token_id", "target_layer_ids")}
        causal = {"is_causal": True} if self.causal else {}  # Published files have no such field.
        return config | kept | causal | subset(self, DSparkFields)

    @classmethod
    def for_target(cls, target: TargetArchitecture, options: DSparkArchitecture | None) -> Self:
        """Returns the shape of a fresh drafter with both heads; see `DrafterShape.for_target`."""
        options = options or DSparkArchitecture()
        shape = cls(
            **options.shape_fields(target),
            markov_rank=options.markov_rank,
            markov_head_type=options.markov_head_type,
            enable_confidence_head=True,
            confidence_head_with_markov=True,
        )
        base_config.check_options(shape._problems())
        return shape
