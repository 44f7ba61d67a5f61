"""Config keys of prompt lookup."""

import dataclasses
from typing import Literal

from dflash.config.schema import MAX_BLOCK_SIZE, DrafterConfig, option


@dataclasses.dataclass(frozen=True)
class NgramConfig(DrafterConfig):
    """Keys of prompt lookup."""

    name: str = "ngram"
    block_size: int | Literal["auto"] = option(8, minimum=2, maximum=MAX_BLOCK_SIZE)
    longest_match: int = option(3, minimum=1, maximum=64)  # Tokens.
