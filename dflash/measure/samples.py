"""What was measured: prompts that were decoded through one queue, and the time of each."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import numpy as np

from dflash.inference.request import Completion
from dflash.measure.parts import Parts


@dataclasses.dataclass(frozen=True)
class PromptTime:
    """The decode time of one prompt, from its first token to its last, in milliseconds.

    While a prompt is prefilled the slots wait; that time belongs to its time to first token, and to
    no prompt's decode time.

    Attributes:
      elapsed_ms: time that passed.
      share_ms: part of it that is the prompt's own: at every moment time is divided equally among
        the prompts in flight. With one slot the two are equal.
    """

    elapsed_ms: float
    share_ms: float


@dataclasses.dataclass(frozen=True)
class Sample:
    """Prompts that were decoded through one queue, once, with one strategy.

    Attributes:
      task, strategy: names.
      round: number of the round.
      completions: one per prompt, in the order of the queue.
      conversations: number of each prompt's conversation.
      marks: whether each output has the right answer; None where its prompt has none.
    """

    task: str
    strategy: str
    round: int
    completions: tuple[Completion, ...]
    conversations: tuple[int, ...]
    marks: tuple[bool | None, ...] = ()

    @functools.cached_property
    def times(self) -> tuple[PromptTime, ...]:
        """The time of each prompt."""
        return prompt_times(self.completions)

    @property
    def elapsed_ms(self) -> float:
        """Decode time summed over prompts."""
        return sum(one.elapsed_ms for one in self.times)

    @property
    def clock_ms(self) -> float:
        """Time in which some prompt was decoded: the sum of all shares."""
        return sum(one.share_ms for one in self.times)

    @property
    def tokens(self) -> int:
        """Output tokens after the first of each prompt."""
        return sum(len(one.output_ids) - 1 for one in self.completions)

    @property
    def cycles(self) -> int:
        """Cycles summed over prompts."""
        return sum(len(one.acceptance_lengths) for one in self.completions)


@dataclasses.dataclass(frozen=True)
class TaskRound:
    """One round over one task: its samples, and the times of each strategy's parts.

    A strategy that chooses its block size has no parts: its cycles differ.
    """

    task: str
    round: int
    samples: tuple[Sample, ...]
    parts: Mapping[str, Parts]


def prompt_times(completions: Sequence[Completion]) -> tuple[PromptTime, ...]:
    """The times of prompts that shared the slots of one engine; see `PromptTime`."""
    last = np.array([one.finished_at for one in completions])
    first = last - [one.decode_ms / 1e3 for one in completions]
    asked = first - [one.prefill_ms / 1e3 for one in completions]
    # Between two neighbouring edges nothing begins or ends.
    edges = np.unique(np.concatenate([asked, first, last]))
    begin, end = edges[:-1], edges[1:]

    def during(low, high):
        return (low[:, None] <= begin) & (end <= high[:, None])

    prefilling = during(asked, first).any(axis=0)
    clock_ms = np.where(prefilling, 0.0, 1e3 * (end - begin))
    in_flight = during(first, last)
    elapsed = (in_flight * clock_ms).sum(axis=1)
    shares = (in_flight * clock_ms / np.maximum(in_flight.sum(axis=0), 1)).sum(axis=1)
    return tuple(map(PromptTime, elapsed.tolist(), shares.tolist()))
