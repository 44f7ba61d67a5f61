"""Config keys of draft models."""

import dataclasses
from typing import Literal

from dflash.config.schema import (
    MAX_BLOCK_SIZE,
    DrafterConfig,
    Quantization,
    TargetArchitecture,
    option,
)
from dflash.drafters.base_config import (
    MAX_LAYERS,
    MAX_WIDTH,
    CheckpointKey,
    DraftLayers,
    OverlapKeys,
)


@dataclasses.dataclass(frozen=True)
class DraftModelArchitecture(DraftLayers):
    """Architecture of a draft model with random weights."""

    num_hidden_layers: int = option(4, minimum=1, maximum=MAX_LAYERS)
    hidden_size: int | None = option(None, minimum=1, maximum=MAX_WIDTH)  # None: the target's.
    tie_word_embeddings: bool | None = None  # None: as in the target.

    def for_target(self, target: TargetArchitecture) -> TargetArchitecture:
        """Returns the complete architecture for a target; raises ConfigError if none exists."""
        return self.decoder_for(
            target,
            num_hidden_layers=self.num_hidden_layers,
            hidden_size=self.hidden_size,
            tie_word_embeddings=self.tie_word_embeddings,
        )


@dataclasses.dataclass(frozen=True)
class AutoregressiveConfig(OverlapKeys, CheckpointKey, DrafterConfig):
    """Keys of a smaller language model that drafts token by token."""

    name: str = "autoregressive"
    block_size: int | Literal["auto"] = option(5, minimum=2, maximum=MAX_BLOCK_SIZE)
    quantization: Quantization | None = None  # None: as stored in the checkpoint.
    family: str = "qwen3"  # With random weights; a checkpoint names its own family.
    architecture: DraftModelArchitecture | None = None
