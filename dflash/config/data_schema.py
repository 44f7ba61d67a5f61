"""Training data: data sets, their shares, and their layout in rows."""

import dataclasses
from collections.abc import Mapping

from dflash.config import schema
from dflash.config.schema import location, option


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """The data of a training run; the names of data sets are in dflash/config/registry.py."""

    mixture: Mapping[str, float] = option({}, minimum=0.0)  # share of the rows, by data set
    # Of the data set jsonl; without a mixture, they are all of it.
    files: tuple[str, ...] = location("file", ())
    held_out_percent: float = option(1.0, minimum=0.0, maximum=40.0)  # of jsonl: validation, test
    math_examples: int = option(100_000, minimum=1)  # training examples of math
    length: int = option(
        1024, minimum=2, maximum=schema.MAX_TOKENS
    )  # tokens in a row; longer conversations are cut
    seed: int = option(0, minimum=0, maximum=2**31 - 1)  # of the order
    thinking: bool = False  # as prompts.thinking: the chat template asks for reasoning first
    data_dir: str | None = location("disk")  # None: ~/.cache/dflash/datasets
    raw_dir: str | None = location("disk")  # files of published sets; None: raw/ in data_dir

    @property
    def shares(self) -> dict[str, float]:
        """The mixture without data sets of share 0; shares need not add up to 1."""
        if not self.mixture and self.files:
            return {"jsonl": 1.0}
        return {name: share for name, share in self.mixture.items() if share}
