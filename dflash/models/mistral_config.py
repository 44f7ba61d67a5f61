"""Config keys and architecture of Mistral."""

import dataclasses

from dflash.config.schema import TargetConfig
from dflash.models.windows_config import WindowedArchitecture


@dataclasses.dataclass(frozen=True)
class MistralConfig(TargetConfig):
    """Keys of a Mistral target."""

    architecture: WindowedArchitecture | None = None
