"""Samples of a benchmark: decoded prompts and their times, and statistics of them."""

import dataclasses
import functools
import statistics
from collections.abc import Mapping, Sequence

import numpy as np

from dflash.inference.request import RequestOutput
from dflash.measure.engine import Parts

DRAWS = 2000
INTERVAL_PERCENT = 95.0
# The bootstrap interval of a median lies within the range of the groups. All n groups fall on one
# side of the true median with probability 2^(1-n), which is below 5 % from n = 6 on.
MIN_GROUPS = 6
_SEED = 0


@dataclasses.dataclass(frozen=True)
class PromptTime:
    """Decode time of one prompt, from its first token to its last, in milliseconds.

    While any prompt is prefilled, the slots wait. That time counts for the time to first token, but
    for no prompt's decode time.

    Attributes:
      share_ms: The prompt's share of the elapsed time, which is divided equally, at every moment,
        among the prompts in flight. With one slot it equals `elapsed_ms`.
    """

    elapsed_ms: float
    share_ms: float


@dataclasses.dataclass(frozen=True)
class Sample:
    """Prompts of one queue, decoded once with one strategy.

    Attributes:
      completions: Completion of each prompt, in the order of the queue.
      conversations: Number of each prompt's conversation.
      marks: Whether each output has the right answer; None if its prompt has none.
    """

    task: str
    strategy: str
    round: int
    completions: tuple[RequestOutput, ...]
    conversations: tuple[int, ...]
    marks: tuple[bool | None, ...] = ()

    @functools.cached_property
    def times(self) -> tuple[PromptTime, ...]:
        """Returns the time of each prompt."""
        return prompt_times(self.completions)

    @property
    def elapsed_ms(self) -> float:
        """Returns the decode time, summed over prompts."""
        return sum(time.elapsed_ms for time in self.times)

    @property
    def clock_ms(self) -> float:
        """Returns the time during which any prompt was decoded: the sum of all shares."""
        return sum(time.share_ms for time in self.times)

    @property
    def tokens(self) -> int:
        """Returns the number of output tokens after the first of each prompt."""
        return sum(len(completion.output_ids) - 1 for completion in self.completions)

    @property
    def cycles(self) -> int:
        """Returns the number of cycles, summed over prompts."""
        return sum(len(completion.acceptance_lengths) for completion in self.completions)


@dataclasses.dataclass(frozen=True)
class TaskRound:
    """One round over one task: its samples, and the times of each strategy's parts.

    Strategies that choose their block size have no parts, since their cycles differ.
    """

    task: str
    round: int
    samples: tuple[Sample, ...]
    parts: Mapping[str, Parts]


def prompt_times(completions: Sequence[RequestOutput]) -> tuple[PromptTime, ...]:
    """Computes the times of prompts that shared the slots of one engine; see `PromptTime`."""
    last = np.array([completion.finished_at for completion in completions])
    first = last - [completion.decode_ms / 1e3 for completion in completions]
    dispatched = first - [completion.prefill_ms / 1e3 for completion in completions]
    # No prompt begins or ends between two neighboring edges.
    edges = np.unique(np.concatenate([dispatched, first, last]))
    begin, end = edges[:-1], edges[1:]

    def during(low, high):
        return (low[:, None] <= begin) & (end <= high[:, None])

    prefilling = during(dispatched, first).any(axis=0)
    clock_ms = np.where(prefilling, 0.0, 1e3 * (end - begin))
    in_flight = during(first, last)
    elapsed = (in_flight * clock_ms).sum(axis=1)
    shares = (in_flight * clock_ms / np.maximum(in_flight.sum(axis=0), 1)).sum(axis=1)
    return tuple(map(PromptTime, elapsed.tolist(), shares.tolist()))


def position_acceptance(
    sequences: Sequence[tuple[Sequence[int], Sequence[int]]], longest_path: int
) -> tuple[tuple[float, ...], tuple[float | None, ...]]:
    """Computes joint and conditional acceptance of draft positions 1 … G.

    The last cycle of each sequence is left out, since a limit or a stop token may have cut it
    short. A cycle gives no information about positions beyond its block, so the joint fraction is
    the product of the conditional ones (Kaplan & Meier 1958). If all blocks have the same size, it
    is the plain fraction of cycles.

    Args:
      sequences: Acceptance lengths (bonus included) and numbers of rows by cycle, per sequence.
      longest_path: G + 1.
    Returns:
      For each position, the fraction of cycles that accepted it; and the fraction among cycles that
      accepted all positions before it, None if there are no such cycles.
    """
    cycles = [pair for sequence in sequences for pair in list(zip(*sequence, strict=True))[:-1]]
    lengths, rows = np.array(cycles, int).reshape(-1, 2).T
    conditional = []
    for position in range(1, longest_path):
        tried = int(np.count_nonzero((lengths >= position) & (rows > position)))
        accepted = int(np.count_nonzero((lengths > position) & (rows > position)))
        conditional.append(accepted / tried if tried else None)
    joint = np.cumprod([share or 0.0 for share in conditional])
    return tuple(joint.tolist()), tuple(conditional)


def identical_share(samples: Sequence[Sample], plain: Sequence[Sample]) -> float:
    """Returns the fraction of outputs, over all rounds, that equal the baseline's."""
    expected = {
        completion.id: completion.output_ids
        for sample in plain
        for completion in sample.completions
    }
    equal = [
        completion.output_ids == expected[completion.id]
        for sample in samples
        for completion in sample.completions
    ]
    return statistics.fmean(equal)


def tokens_per_ms(samples: Sequence[Sample]) -> float | None:
    """Returns tokens after the first per millisecond of decoding."""
    return ratio(sum(s.tokens for s in samples), sum(s.clock_ms for s in samples))


def cycle_ms(samples: Sequence[Sample]) -> float | None:
    """Returns the mean time of a cycle as one sequence experiences it."""
    return ratio(sum(s.elapsed_ms for s in samples), sum(s.cycles for s in samples))


def ratio(part: float | None, total: float | None) -> float | None:
    """Returns part / whole; None if either is zero or unknown."""
    return part / total if part and total else None


def bootstrap(
    samples: Sequence[Sequence[Sample]], plain: Sequence[Sequence[Sample]]
) -> tuple[float, tuple[float, float] | None]:
    """Computes the mean speed-up over tasks, and its bootstrap interval.

    Conversations are resampled with replacement within each task. Each resampled conversation gets
    a random round of its own, except that conversations decoded together share one, since whatever
    slowed one of them slowed all. Strategy and baseline use the same draws, as they ran in turns.

    Returns:
      The mean, and the two ends of its interval; the interval is None if a task has fewer
      conversations than `MIN_GROUPS`.
    """
    tables = [
        np.concatenate([_table(of_strategy), _table(of_baseline)])
        for of_strategy, of_baseline in zip(samples, plain, strict=True)
    ]
    speedup = float(np.mean([_speedup(table.sum(axis=(1, 2))) for table in tables]))
    if min(table.shape[1] for table in tables) < MIN_GROUPS:
        return speedup, None
    random = np.random.default_rng(_SEED)
    drawn = []
    for table, task_samples in zip(tables, samples, strict=True):
        _, groups, rounds = table.shape
        together = any(len(set(sample.conversations)) > 1 for sample in task_samples)
        some_groups = random.integers(0, groups, (DRAWS, groups))
        some_rounds = random.integers(0, rounds, (DRAWS, 1 if together else groups))
        drawn.append(_speedup(table[:, some_groups, some_rounds].sum(axis=-1)))
    return speedup, interval(np.mean(drawn, axis=0))


def interval(drawn: np.ndarray) -> tuple[float, float]:
    """Returns the ends of the central interval that holds `INTERVAL_PERCENT` of `drawn` [draws]."""
    tail = (100 - INTERVAL_PERCENT) / 2
    low, high = np.percentile(drawn, [tail, 100 - tail])
    return float(low), float(high)


def _table(samples: Sequence[Sample]) -> np.ndarray:
    """Returns milliseconds and tokens, float64 [2, conversations, rounds]."""
    groups = sorted({number for sample in samples for number in sample.conversations})
    rounds = sorted({sample.round for sample in samples})
    table = np.zeros((2, len(groups), len(rounds)))
    for sample in samples:
        prompts = zip(sample.conversations, sample.times, sample.completions, strict=True)
        for number, time, completion in prompts:
            place = groups.index(number), rounds.index(sample.round)
            table[:, *place] += max(time.share_ms, 1e-9), len(completion.output_ids) - 1
    return table


def _speedup(sums: np.ndarray) -> np.ndarray:
    """Returns the speed-up [...] from milliseconds and tokens of strategy and baseline [4, ...]."""
    clock_ms, tokens, plain_ms, plain_tokens = sums
    return tokens / clock_ms * plain_ms / np.maximum(plain_tokens, 1)
