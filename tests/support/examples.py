"""Questions and answers for tests of data: held-out problems that the package ships."""

import itertools
import pathlib

from dflash.config.train_schema import DataConfig
from dflash.data import datasets

PROMPTS = datasets.HELD_OUT


def config(directory: pathlib.Path, count: int, **options) -> DataConfig:
    """Writes `count` problems to a file, and returns the config of the data set jsonl of them."""
    path = directory / "problems.jsonl"
    with (PROMPTS / "math.jsonl").open(encoding="utf-8") as lines:
        path.write_text("".join(itertools.islice(lines, count)), encoding="utf-8")
    return DataConfig(files=(str(path),), **{"held_out_percent": 0.0, **options})
