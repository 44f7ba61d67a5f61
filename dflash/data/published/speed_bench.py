"""SPEED-Bench: questions of eleven categories, and prompts of fixed lengths.

| name | rows | prepared file (RAW_DIR/speed/…) | categories |
|---|---|---|---|
| speed-bench | 880 | qualitative | coding, math, humanities, stem, writing, summarization, roleplay, rag, multilingual, reasoning, qa |
| speed-bench-1k … -32k | 1,536 each | throughput_1k … throughput_32k | three entropy bands of the answers, such as high_entropy |

The published files have placeholders for most prompts, because of the licenses of their sources. The
script `prepare_data.py` of github.com/NVIDIA/Model-Optimizer, examples/specdec_bench, fetches them:

    python3 prepare_data.py --dataset speed --config all

Supported are the layout of this script (`CONFIG/test.parquet`) and that of NeMo-Skills
(`CONFIG.jsonl`).
"""  # noqa: E501

import functools
import itertools
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from dflash import errors
from dflash.data.example import Example, Split
from dflash.data.published import raw
from dflash.data.published.benchmarks import Benchmark

_HOME = "https://huggingface.co/datasets/nvidia/SPEED-Bench"
_PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED"


class SpeedBench(Benchmark):
    """Questions of eleven categories, 80 each; some have several turns."""

    name = "speed-bench"
    config: ClassVar[str] = "qualitative"

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        cls.raw_file = _file(cls.config)

    def conversation(self, row: Mapping[str, Any]) -> tuple[Sequence[str], Sequence[str]]:
        turns = row["turns"]
        turns = [turns] if isinstance(turns, str) else turns  # one of its loaders writes str
        if isinstance(turns, list) and any(_PLACEHOLDER in str(turn) for turn in turns):
            raise errors.InputError(
                f"{self._path}: as published, without most of its prompts; prepare it with "
                "prepare_data.py of github.com/NVIDIA/Model-Optimizer, examples/specdec_bench"
            )
        return turns, ()

    def sample(self, split: Split, limit: int | None = None) -> list[Example]:
        """Returns `limit` examples, drawn from the categories in turn as its own script does."""
        everything = list(self.examples(split))
        by_category: dict[str, list[int]] = {}
        for index, example in enumerate(everything):
            by_category.setdefault(example.category, []).append(index)
        rounds = itertools.zip_longest(*by_category.values())
        order = [index for indices in rounds for index in indices if index is not None]
        return [everything[index] for index in sorted(order[:limit])]

    @functools.cached_property
    def _path(self) -> pathlib.Path:
        directory = raw.raw_directory(self._config.raw_dir, self._config.data_dir) / "speed"
        prepared = directory / self.config / "test.parquet", directory / f"{self.config}.jsonl"
        for path in prepared:
            if path.is_file():
                return path
        raise errors.InputError(
            f"{prepared[0]}: missing, and so is {prepared[1].name}: SPEED-Bench is prepared with "
            "prepare_data.py of github.com/NVIDIA/Model-Optimizer, examples/specdec_bench"
        )


def _file(config: str) -> raw.RawFile:
    return raw.RawFile(f"speed/{config}", f"{_HOME}/{config}/test.parquet")


SpeedBench.raw_file = _file(SpeedBench.config)


class SpeedBench1k(SpeedBench):
    """Prompts of 1,024 tokens of o200k_base."""

    name, config = "speed-bench-1k", "throughput_1k"


class SpeedBench2k(SpeedBench):
    """Prompts of 2,048 tokens of o200k_base."""

    name, config = "speed-bench-2k", "throughput_2k"


class SpeedBench8k(SpeedBench):
    """Prompts of 8,192 tokens of o200k_base."""

    name, config = "speed-bench-8k", "throughput_8k"


class SpeedBench16k(SpeedBench):
    """Prompts of 16,384 tokens of o200k_base."""

    name, config = "speed-bench-16k", "throughput_16k"


class SpeedBench32k(SpeedBench):
    """Prompts of 32,768 tokens of o200k_base."""

    name, config = "speed-bench-32k", "throughput_32k"
