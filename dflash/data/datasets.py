"""The data sets by name: what their contents depend on, and their examples, split by split.

A new one is a class here or anywhere, and a line in dflash/config/registry.py.
"""

import abc
import functools
import hashlib
import platform
from collections.abc import Iterator
from typing import ClassVar

from dflash import errors
from dflash.config import registry
from dflash.config.data_schema import DataConfig
from dflash.data import answers, files
from dflash.data.example import SPLITS, Example, Split, shuffled
from dflash.data.generated import arithmetic, chat, code, copying, numbered
from dflash.data.generated.word_problems import problems


class Dataset(abc.ABC):
    """A data set. Equal name, version, variant and split mean equal examples.

    Attributes:
      name: as in the registry.
      version: raise it when the examples change.
      variant: whatever else the examples depend on, as part of a directory's name.
      has_answers: whether some examples have a final answer to compare with.
      takes_long: whether there may be too many examples to go through them at every start.
    """

    name: ClassVar[str]
    version: ClassVar[str] = "1.0.0"
    has_answers: ClassVar[bool] = False
    takes_long: ClassVar[bool] = False

    def __init__(self, config: DataConfig):
        self._config = config

    @property
    @abc.abstractmethod
    def variant(self) -> str: ...

    @abc.abstractmethod
    def examples(self, split: Split) -> Iterator[Example]:
        """Yields every example of a split, in a fixed order."""

    def sample(self, split: Split, limit: int | None = None) -> list[Example]:
        """Up to `limit` examples from all over a split, always the same ones."""
        return shuffled(list(self.examples(split)))[:limit]

    def is_correct(self, example: Example, text: str, *, finished: bool = True) -> bool | None:
        """Whether `text`, in place of the example's last answer, has the same final answer.

        Args:
          example: with the right answer.
          text: to be graded.
          finished: False where the text was cut off at a limit; see `answers.find`.
        Returns:
          None where there is no final answer to compare with, as in a conversation.
        """
        del example, text, finished
        return None

    def empty(self, split: Split) -> errors.InputError:
        """The error for a split without examples."""
        return errors.InputError(f"data set {self.name}: no examples in its split {split}")


class Math(Dataset):
    """Generated word problems; see `word_problems`."""

    name = problems.TASK
    version = "2.0.0"
    has_answers = True

    @property
    def variant(self) -> str:
        return f"n{self._config.math_examples}"

    def examples(self, split: Split) -> Iterator[Example]:
        return problems.examples(split, self._count(split))

    def sample(self, split: Split, limit: int | None = None) -> list[Example]:
        return list(problems.examples(split, limit or self._count(split)))

    def is_correct(self, example: Example, text: str, *, finished: bool = True) -> bool | None:
        return answers.agree(text, example.response, finished=finished)

    def _count(self, split: Split) -> int:
        return self._config.math_examples if split == "train" else problems.HELD_OUT_EXAMPLES


class _Literal(Dataset):
    """The prompt determines the answer, so a text is right if it is the answer to the letter."""

    has_answers = True

    def is_correct(self, example: Example, text: str, *, finished: bool = True) -> bool | None:
        return finished and text.strip() == example.response.strip()


class Arithmetic(_Literal):
    """Small calculations; see `arithmetic`."""

    name = arithmetic.TASK

    @property
    def variant(self) -> str:
        return "all"

    def examples(self, split: Split) -> Iterator[Example]:
        return numbered.examples(self.name, split, arithmetic.draw)


class _Library(_Literal):
    """Examples from the running Python's standard library; they differ between versions."""

    @property
    def variant(self) -> str:
        return f"python{platform.python_version()}"


class Copying(_Library):
    """Words to repeat, names of modules among them; see `copying`."""

    name = copying.TASK

    def examples(self, split: Split) -> Iterator[Example]:
        return numbered.examples(self.name, split, copying.draw)


class Code(_Library):
    """Functions to change or to write; see `code`."""

    name = code.TASK
    version = "3.0.0"

    def examples(self, split: Split) -> Iterator[Example]:
        return code.examples(split)


class Chat(_Library):
    """Questions whose answer stands in the prompt, and letters; see `chat`."""

    name = chat.TASK
    version = "3.0.0"

    def examples(self, split: Split) -> Iterator[Example]:
        return chat.examples(split)


class Jsonl(Dataset):
    """The user's own files; see `files`."""

    name = files.TASK
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
    """Builds a data set by its name.

    Raises:
      ConfigError: no such data set; the message suggests the nearest name.
    """
    if name not in registry.DATASETS:
        near = registry.suggest(name, registry.DATASETS)
        raise errors.ConfigError(f"unknown data set {name!r}{near}")
    return registry.load(registry.DATASETS[name])(config)


def find_all(config: DataConfig) -> dict[str, Dataset]:
    """Builds the data sets of a run, by name; build them once, since files may be long to hash.

    Raises:
      ConfigError: there is no such data set.
    """
    return {name: find(name, config) for name in config.shares}


def task_examples(
    name: str, split: Split = "test", limit: int | None = None, *, raw_dir: str | None = None
) -> list[Example]:
    """Examples for measuring a model, always the same ones; nothing is stored.

    Args:
      name: a data set other than jsonl.
      split: see `SPLITS`.
      limit: number of examples; None for all.
      raw_dir: directory of the raw files of published sets; see `raw`.
    Raises:
      ConfigError: no such data set.
      InputError: a published set's file is unusable, or missing and cannot be downloaded.
      ValueError: no such split.
    """
    if split not in SPLITS:
        raise ValueError(f"no split {split!r}, only {', '.join(SPLITS)}")
    return find(name, DataConfig(raw_dir=raw_dir)).sample(split, limit)
