"""Config keys and shape of DFlare drafters, which mix the tapped layers for each draft layer."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from dflash.config.schema import option_like
from dflash.drafters.base_config import BlockDrafterConfig, MarginalTree, Problem
from dflash.drafters.dflash_config import DFlashArchitecture, DFlashShape


@dataclasses.dataclass(frozen=True)
class DFlareArchitecture(DFlashArchitecture):
    """Architecture of a fresh DFlare drafter."""

    num_hidden_layers: int = option_like(DFlashArchitecture, "num_hidden_layers", 7)
    # Number of target layers to tap if target_layer_ids is left out.
    num_target_features: int = option_like(DFlashArchitecture, "num_target_features", 9)


@dataclasses.dataclass(frozen=True)
class DFlareConfig(BlockDrafterConfig):
    """Keys of a DFlare drafter."""

    name: str = "dflare"
    tree: MarginalTree | None = None  # None: a chain.
    architecture: DFlareArchitecture | None = None


@dataclasses.dataclass(frozen=True)
class DFlareShape(DFlashShape):
    """Contents of a DFlare checkpoint's config.json, which has DFlash's fields."""

    layout: ClassVar[Mapping[str, Any]] = {"projector": "dflare"}
    architecture: ClassVar[type] = DFlareArchitecture

    def _problems(self) -> Iterable[Problem]:
        yield from super()._problems()
        if self.target_hidden_size is not None:
            expected = self.decoder.hidden_size
            message = f"{self.target_hidden_size} is not supported, only {expected}"
            yield ("target_hidden_size",), message
