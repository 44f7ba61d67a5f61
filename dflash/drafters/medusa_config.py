"""Config keys and shape of Medusa heads."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

from dflash.checkpoints import hf_config
from dflash.config.schema import (
    MAX_BLOCK_SIZE,
    DrafterConfig,
    RecordsKeys,
    TargetArchitecture,
    option,
    option_like,
)
from dflash.drafters import base_config
from dflash.drafters.base_config import (
    MAX_LAYERS,
    MAX_VOCABULARY,
    MAX_WIDTH,
    BlockSizeKey,
    CheckpointKey,
    DrafterShape,
    MarginalTree,
)


@dataclasses.dataclass(frozen=True)
class MedusaArchitecture(RecordsKeys):
    """Architecture of fresh Medusa heads.

    Attributes:
      block_size: Number of rows: the anchor and one token per head.
      rms_norm_eps: Epsilon of the norm in front of the heads.
    """

    block_size: int = option(5, minimum=2, maximum=MAX_BLOCK_SIZE)
    rms_norm_eps: float = option(1e-6, minimum=0.0)


@dataclasses.dataclass(frozen=True)
class MedusaShape(DrafterShape):
    """Contents of a Medusa checkpoint's config.json.

    Attributes:
      block_size, rms_norm_eps: See `MedusaArchitecture`.
      hidden_size: Width of the target.
      vocab_size: Vocabulary size of the target.
      num_target_layers: Depth of the target that the heads were trained for.
    """

    block_size: int = option_like(MedusaArchitecture, "block_size")
    hidden_size: int = option(minimum=1, maximum=MAX_WIDTH)
    vocab_size: int = option(minimum=1, maximum=MAX_VOCABULARY)
    num_target_layers: int = option(minimum=1, maximum=MAX_LAYERS)
    rms_norm_eps: float = option_like(MedusaArchitecture, "rms_norm_eps")

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Self:
        return hf_config.read_fields(config, cls)

    def to_hf(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"model_type": "medusa"}

    @classmethod
    def for_target(cls, target: TargetArchitecture, options: MedusaArchitecture | None) -> Self:
        options = options or MedusaArchitecture()
        return cls(
            block_size=options.block_size,
            hidden_size=target.hidden_size,
            vocab_size=target.vocab_size,
            num_target_layers=target.num_hidden_layers,
            rms_norm_eps=options.rms_norm_eps,
        )

    def fit(self, target: TargetArchitecture) -> Self:
        """Returns the shape unchanged; see `DrafterShape.fit`."""
        base_config.check_same_target(target, self, self.num_target_layers)
        return self


@dataclasses.dataclass(frozen=True)
class MedusaConfig(BlockSizeKey, CheckpointKey, DrafterConfig):
    """Keys of Medusa heads."""

    name: str = "medusa"
    tree: MarginalTree | None = None  # None: a chain.
    architecture: MedusaArchitecture | None = None
