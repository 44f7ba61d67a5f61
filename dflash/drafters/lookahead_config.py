"""Config keys of lookahead decoding."""

import dataclasses

from dflash.config.schema import DrafterConfig, option


@dataclasses.dataclass(frozen=True)
class LookaheadConfig(DrafterConfig):
    """Keys of lookahead decoding.

    A block has 1 + (ngram_size - 1) · (window + candidates) rows.
    """

    name: str = "lookahead"
    window: int = option(8, minimum=1, maximum=128)  # Positions that are solved in parallel.
    ngram_size: int = option(4, minimum=2, maximum=16)
    candidates: int = option(8, minimum=1, maximum=128)  # N-grams verified in each cycle.
    pool_size: int = option(256, minimum=1, maximum=16384)  # N-grams kept for each sequence.
