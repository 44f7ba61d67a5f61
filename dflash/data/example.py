"""Training examples, and their assignment to splits."""

import dataclasses
import hashlib
import random
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar, get_args

Item = TypeVar("Item")
Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = get_args(Split)
HELD_OUT_PERCENT = 5  # percentage of the sources in validation, and the same again in test


@dataclasses.dataclass(frozen=True)
class Example:
    """Conversation that ends with a message of the assistant, as text or as token ids.

    Attributes:
      source: Unit that is never divided among splits, such as the name of a module.
      messages: Messages with "role", "content" and the further fields that the chat template
        renders; empty for an example of token ids.
      prompt_ids: Token ids of the prompt; empty for an example of messages.
      output_ids: Token ids of the output, including the end token; empty for messages.
      category: Category of the question in a published set; not compared.
      question: Number or name of the question in a published set; not compared.
      place: File and line, such as "a.jsonl:7", for error messages; not compared.
    """

    task: str
    source: str
    messages: tuple[Mapping[str, Any], ...] = ()
    prompt_ids: tuple[int, ...] = ()
    output_ids: tuple[int, ...] = ()
    context_only: tuple[int, ...] = ()
    variables: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    category: str = dataclasses.field(default="", compare=False)
    question: str = dataclasses.field(default="", compare=False)
    place: str = dataclasses.field(default="", compare=False)

    @property
    def prompt(self) -> tuple[Mapping[str, Any], ...]:
        """Messages before the last answer."""
        return self.messages[:-1]

    @property
    def opening(self) -> tuple[Mapping[str, Any], ...]:
        """Messages before the first answer; a greeting of the assistant is no answer."""
        roles = [message["role"] for message in self.messages]
        return self.messages[: roles.index("assistant", 1)]

    @property
    def later_turns(self) -> tuple[str, ...]:
        """Messages of the user after the first answer."""
        later = self.messages[len(self.opening) :]
        return tuple(message["content"] for message in later if message["role"] == "user")

    @property
    def response(self) -> str:
        """Last answer."""
        return self.messages[-1]["content"]


def pair(task: str, source: str, prompt: str, response: str) -> Example:
    """Builds an example of one question and its answer."""
    messages = {"role": "user", "content": prompt}, {"role": "assistant", "content": response}
    return Example(task, source, messages)


def split_of(source: str, held_out_percent: float = HELD_OUT_PERCENT) -> Split:
    """Returns the split of a source, which depends on a hash of its name alone."""
    place = stable_hash(source) / 2**64 * 100
    if place < held_out_percent:
        return "test"
    return "validation" if place < 2 * held_out_percent else "train"


def stable_hash(text: str) -> int:
    """Returns a 64-bit hash of a text that is the same on every machine and in every process."""
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:8], "big")


def shuffled(items: Sequence[Item]) -> list[Item]:
    """Returns the items in an order that depends only on their number."""
    order = list(items)
    random.Random(0).shuffle(order)
    return order
