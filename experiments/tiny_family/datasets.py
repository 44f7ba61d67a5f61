"""Generated data sets with all their splits, on which the tiny family was trained."""

import platform
from collections.abc import Iterator

from dflash.data import datasets
from dflash.data.dataset import Dataset
from dflash.data.example import Example, Split
from experiments.tiny_family import arithmetic, chat, code, copying, numbered
from experiments.tiny_family.word_problems import problems

TRAIN_PROBLEMS = 160_000  # Enough that the tiny family's recipes read none twice.


class Math(datasets.Math):
    """Generated word problems; see `word_problems`."""

    version = "2.0.0"
    variant = f"n{TRAIN_PROBLEMS}"

    def count(self, split: Split) -> int:
        return TRAIN_PROBLEMS if split == "train" else problems.HELD_OUT_EXAMPLES

    def examples(self, split: Split) -> Iterator[Example]:
        yield from problems.examples(split, self.count(split))


class _Literal(Dataset):
    """Data set whose prompts determine the answers, so an answer is right only if identical."""

    has_answers = True

    def is_correct(self, example: Example, text: str, *, finished: bool = True) -> bool | None:
        return finished and text.strip() == example.response.strip()


class Arithmetic(_Literal):
    """Small calculations; see `arithmetic`."""

    name = arithmetic.TASK
    variant = "all"

    def examples(self, split: Split) -> Iterator[Example]:
        return numbered.examples(self.name, split, arithmetic.draw)


class _Library(_Literal):
    """Data set made of the standard library of the running Python; it differs between versions."""

    variant = f"python{platform.python_version()}"


class Copying(_Library):
    """Words to repeat, including names of modules; see `copying`."""

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
    """Questions about a text in the prompt, and letters; see `chat`."""

    name = chat.TASK
    version = "3.0.0"

    def examples(self, split: Split) -> Iterator[Example]:
        return chat.examples(split)


DATASETS = {
    dataset.name: f"{__name__}:{dataset.__name__}"
    for dataset in (Math, Arithmetic, Copying, Code, Chat)
}
