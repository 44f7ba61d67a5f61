"""Data sets whose examples are drawn one by one, each by its number."""

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
    """Yields the examples of a split, `count[split]` of them."""
    for index in range(count[split]):
        yield example(task, split, index, draw)


def example(task: str, split: Split, index: int, draw: Draw) -> Example:
    """Makes one example; equal arguments give equal examples, and no question is in two splits."""
    rng = random.Random(f"{split}/{index}")
    while True:
        question, answer = draw(rng)
        if split_of(question) == split:
            return pair(task, f"{split}/{index}", question, answer)


def fill(text: str, words: Mapping[str, str]) -> str:
    """Puts words in the place of their names in braces; empty braces stay."""
    return _NAME.sub(lambda match: words[match[1]], text)
