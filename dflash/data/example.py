"""Training examples, and the splits that they belong to."""

import dataclasses
import hashlib
import random
from collections.abc import Mapping, Sequence
from typing import Literal, TypeVar, get_args

Item = TypeVar("Item")
Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = get_args(Split)
HELD_OUT_PERCENT = 5  # share of the sources in validation, and again in test


@dataclasses.dataclass(frozen=True)
class Example:
    """A conversation whose last message is the assistant's, or the token ids of one.

    Attributes:
      task: name of the data set, such as "math".
      source: unit that is never divided among splits, such as a module's name.
      messages: each with "role" and "content"; empty where ids are given.
      prompt_ids: token ids of the prompt; empty where messages are given.
      output_ids: token ids of the model's output, end token included.
      category: kind of the question, where a published set has kinds; not stored.
      question: its number or name in that set; not stored.
    """

    task: str
    source: str
    messages: tuple[Mapping[str, str], ...] = ()
    prompt_ids: tuple[int, ...] = ()
    output_ids: tuple[int, ...] = ()
    category: str = dataclasses.field(default="", compare=False)
    question: str = dataclasses.field(default="", compare=False)

    @property
    def prompt(self) -> tuple[Mapping[str, str], ...]:
        """The messages before the last answer."""
        return self.messages[:-1]

    @property
    def opening(self) -> tuple[Mapping[str, str], ...]:
        """The messages before the first answer."""
        roles = [message["role"] for message in self.messages]
        return self.messages[: roles.index("assistant")]

    @property
    def later_turns(self) -> tuple[str, ...]:
        """The user's later messages, each after an answer."""
        rest = self.messages[len(self.opening) :]
        return tuple(message["content"] for message in rest if message["role"] == "user")

    @property
    def response(self) -> str:
        """The last answer."""
        return self.messages[-1]["content"]


def pair(task: str, source: str, prompt: str, response: str) -> Example:
    """An example of one question and its answer."""
    messages = {"role": "user", "content": prompt}, {"role": "assistant", "content": response}
    return Example(task, source, messages)


def split_of(source: str, held_out_percent: float = HELD_OUT_PERCENT) -> Split:
    """The split that a source belongs to, by a hash of its name alone."""
    place = stable_hash(source) / 2**64 * 100
    if place < held_out_percent:
        return "test"
    return "validation" if place < 2 * held_out_percent else "train"


def stable_hash(text: str) -> int:
    """64 bits of a text, equal on every machine and in every process."""
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:8], "big")


def shuffled(items: Sequence[Item], seed: int = 0) -> list[Item]:
    """The items in an order that depends on their number and the seed only."""
    order = list(items)
    random.Random(seed).shuffle(order)
    return order
