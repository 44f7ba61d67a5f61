"""Data sets by name, with the examples of each split.

A new data set is a subclass of `Dataset`, in any module, and a line in dflash/config/registry.py.
"""

import functools
import hashlib
import itertools
import pathlib
from collections.abc import Iterator

from dflash import errors
from dflash.config import registry
from dflash.config.train_schema import DataConfig
from dflash.data import answers, files
from dflash.data.dataset import Dataset
from dflash.data.example import Example, Split
from dflash.text import jsonl

HELD_OUT = pathlib.Path(__file__).parents[1] / "assets" / "prompts"


class _HeldOut(Dataset):
    """Held-out examples of the tiny family, in dflash/assets/prompts; only the split test.

    The generators of its training data are in the repository, experiments/tiny_family.
    """

    variant = "held_out"
    has_answers = True

    def examples(self, split: Split) -> Iterator[Example]:
        if split == "test":
            file = str(HELD_OUT / f"{self.name}.jsonl")
            yield from files.read_examples(file, jsonl.entries(file), self.name)

    def sample(self, split: Split, limit: int | None = None) -> list[Example]:
        return list(itertools.islice(self.examples(split), limit))

    def is_correct(self, example: Example, text: str, *, finished: bool = True) -> bool | None:
        return finished and text.strip() == example.response.strip()

    def empty(self, split: Split) -> errors.InputError:
        return errors.InputError(
            f"data set {self.name}: the package has its split test only; to train, set data.files, "
            "or generate it with experiments/tiny_family of the repository"
        )


class Math(_HeldOut):
    """Word problems with worked solutions."""

    name = "math"

    def is_correct(self, example: Example, text: str, *, finished: bool = True) -> bool | None:
        return answers.agree(text, example.response, finished=finished)


class Code(_HeldOut):
    """Functions to change or to write; an answer is right only if identical."""

    name = "code"


class Chat(_HeldOut):
    """Questions about a text in the prompt, and letters; graded as code."""

    name = "chat"


class Jsonl(Dataset):
    """Conversations in the user's own files; see `files`."""

    name = files.TASK
    version = "3.0.0"
    takes_long = True

    @functools.cached_property
    def variant(self) -> str:
        digest = hashlib.sha256(f"{self._config.held_out_percent}".encode())
        for file in self._config.files:
            digest.update(files.content_hash(file))
        return digest.hexdigest()[:16]

    def examples(self, split: Split) -> Iterator[Example]:
        return files.examples(self._config.files, split, self._config.held_out_percent)

    def empty(self, split: Split) -> errors.InputError:
        held_out = f"data.held_out_percent={self._config.held_out_percent:g}"
        advice = f"lower {held_out}" if split == "train" else f"raise {held_out}"
        return errors.InputError(f"{super().empty(split)}: {advice}, or give more questions")


def find(name: str, config: DataConfig) -> Dataset:
    """Builds a data set; the ConfigError for an unknown name suggests the nearest one."""
    if name not in registry.DATASETS:
        near = registry.suggest(name, registry.DATASETS)
        raise errors.ConfigError(f"unknown data set {name!r}{near}")
    return registry.load(registry.DATASETS[name])(config)


def find_all(config: DataConfig) -> dict[str, Dataset]:
    """Builds the data sets of a run by name.

    Call this once per run, because hashing the user's files may take long.
    """
    return {name: find(name, config) for name in config.shares}


def task_examples(
    name: str, limit: int | None = None, *, raw_dir: str | None = None
) -> list[Example]:
    """Returns test examples for measuring a model, always the same ones; stores nothing.

    Args:
      limit: Maximum number of examples; None for all.
      raw_dir: Directory of the raw files of published sets; see `raw`.
    Raises:
      ConfigError: The data set does not exist.
      InputError: The file of a published set is unusable, or missing and cannot be downloaded.
    """
    return find(name, DataConfig(raw_dir=raw_dir)).sample("test", limit)
