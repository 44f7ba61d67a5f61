"""What to learn from: data sets, their shares, and how they are laid out in rows."""

import dataclasses
from collections.abc import Mapping

from dflash.config import schema
from dflash.config.schema import option


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """The data of a training run; a data set's name and its keys stand in dflash/registry.py."""

    mixture: Mapping[str, float] = option({}, minimum=0.0)  # data set -> its share of the rows
    files: tuple[str, ...] = ()  # of the data set jsonl; alone they are the whole mixture
    held_out_percent: float = option(1.0, minimum=0.0, maximum=40.0)  # of jsonl: validation, test
    math_examples: int = option(100_000, minimum=1)  # of math, for training
    length: int = option(
        1024, minimum=2, maximum=schema.MAX_TOKENS
    )  # tokens in a row; longer conversations are cut
    seed: int = option(0, minimum=0, maximum=2**31 - 1)  # of the order
    data_dir: str | None = None  # None: ~/.cache/dflash/datasets
    raw_dir: str | None = None  # of files of published sets; None: raw/ in data_dir

    @property
    def shares(self) -> dict[str, float]:
        """The mixture without what has no share; they need not add up to 1."""
        if not self.mixture and self.files:
            return {"jsonl": 1.0}
        return {name: share for name, share in self.mixture.items() if share}
