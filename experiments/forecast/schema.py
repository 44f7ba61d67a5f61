"""Schema of a forecast: a decoding config with a TPU, and strategies to compare."""

import dataclasses
from collections.abc import Mapping

from dflash.config import schema
from dflash.config.schema import option
from dflash.config.tpu_schema import CompileDecode


@dataclasses.dataclass(frozen=True)
class ForecastConfig:
    """Batch sizes and contexts to compare."""

    # Numbers of sequences that are decoded at once.
    batches: tuple[int, ...] = option((1, 4, 16, 64), minimum=1, maximum=schema.MAX_BATCH)
    # Tokens of each sequence before the block.
    contexts: tuple[int, ...] = option((512, 4096, 32768), minimum=1, maximum=schema.MAX_TOKENS)


@dataclasses.dataclass(frozen=True)
class ForecastRun(CompileDecode):
    """Decoding config with the TPU to compile it for, and what to compare."""

    # Strategies to compare with plain decoding; if empty, the drafter alone.
    strategies: Mapping[str, schema.DrafterConfig] = option({})
    forecast: ForecastConfig = dataclasses.field(default_factory=ForecastConfig)
