"""Measurements of a benchmark: the prompts of one queue, decoded together, and their times."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import numpy as np

from dflash.inference.request import Completion
from dflash.measure.parts import Parts


@dataclasses.dataclass(frozen=True)
class PromptTime:
    """Decode time of one prompt, from its first token to its last, in milliseconds.

    While any prompt is prefilled, the slots wait. That time counts for the time to first token, but
    for no prompt's decode time.

    Attributes:
      elapsed_ms: Elapsed time.
      share_ms: The prompt's share of the elapsed time, which is divided equally, at every moment,
        among the prompts in flight. With one slot it equals `elapsed_ms`.
    """

    elapsed_ms: float
    share_ms: float


@dataclasses.dataclass(frozen=True)
class Sample:
    """Prompts of one queue, decoded once with one strategy.

    Attributes:
      task, strategy: Names of the task and the strategy.
      round: Number of the round.
      completions: Completion of each prompt, in the order of the queue.
      conversations: Number of each prompt's conversation.
      marks: Whether each output has the right answer; None if its prompt has none.
    """

    task: str
    strategy: str
    round: int
    completions: tuple[Completion, ...]
    conversations: tuple[int, ...]
    marks: tuple[bool | None, ...] = ()

    @functools.cached_property
    def times(self) -> tuple[PromptTime, ...]:
        """Returns the time of each prompt."""
        return prompt_times(self.completions)

    @property
    def elapsed_ms(self) -> float:
        """Returns the decode time, summed over prompts."""
        return sum(one.elapsed_ms for one in self.times)

    @property
    def clock_ms(self) -> float:
        """Returns the time in which any prompt was decoded, which is the sum of all shares."""
        return sum(one.share_ms for one in self.times)

    @property
    def tokens(self) -> int:
        """Returns the number of output tokens after the first of each prompt."""
        return sum(len(one.output_ids) - 1 for one in self.completions)

    @property
    def cycles(self) -> int:
        """Returns the number of cycles, summed over prompts."""
        return sum(len(one.acceptance_lengths) for one in self.completions)


@dataclasses.dataclass(frozen=True)
class TaskRound:
    """One round over one task: its samples, and the times of each strategy's parts.

    Strategies that choose their block size have no parts, since their cycles differ.
    """

    task: str
    round: int
    samples: tuple[Sample, ...]
    parts: Mapping[str, Parts]


def prompt_times(completions: Sequence[Completion]) -> tuple[PromptTime, ...]:
    """Computes the times of prompts that shared the slots of one engine; see `PromptTime`."""
    last = np.array([one.finished_at for one in completions])
    first = last - [one.decode_ms / 1e3 for one in completions]
    asked = first - [one.prefill_ms / 1e3 for one in completions]
    # No prompt begins or ends between two neighboring edges.
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
