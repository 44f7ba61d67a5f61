"""Data sets whose examples are drawn at random, seeded by their number."""

import random
import re
from collections.abc import Callable, Iterator, Mapping

from dflash.data.example import Example, Split, pair, split_of

COUNT: Mapping[Split, int] = {"train": 20_000, "validation": 1000, "test": 1000}
_NAME = re.compile(r"{(\w+)}")
Draw = Callable[[random.Random], tuple[str, str]]  # a question and its answer


def examples(
    task: str, split: Split, draw: Draw, count: Mapping[Split, int] = COUNT
) -> Iterator[Example]:
    """Yields the `count[split]` examples of a split."""
    for index in range(count[split]):
        yield example(task, split, index, draw)


def example(task: str, split: Split, index: int, draw: Draw) -> Example:
    """Draws an example, which depends on the arguments alone; no question is in two splits."""
    rng = random.Random(f"{split}/{index}")
    while True:
        question, answer = draw(rng)
        if split_of(question) == split:
            return pair(task, f"{split}/{index}", question, answer)


def fill(text: str, words: Mapping[str, str]) -> str:
    """Replaces names in braces by words; leaves empty braces unchanged."""
    return _NAME.sub(lambda match: words[match[1]], text)
