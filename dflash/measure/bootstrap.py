"""Bootstrap intervals of speed-ups, resampling conversations and rounds."""

from collections.abc import Sequence

import numpy as np

from dflash.measure.samples import Sample

DRAWS = 2000
INTERVAL_PERCENT = 95.0
# The bootstrap interval of a median lies within the range of the groups. All n groups fall on one
# side of the true median with probability 2^(1-n), which is below 5 % from n = 6 on.
MIN_GROUPS = 6
_SEED = 0


def bootstrap(
    samples: Sequence[Sequence[Sample]], plain: Sequence[Sequence[Sample]]
) -> tuple[float, tuple[float, float] | None]:
    """Computes the mean speed-up over tasks, and its bootstrap interval.

    Conversations are resampled with replacement within each task. Each resampled conversation gets
    a random round of its own, except that conversations decoded together share one, since whatever
    slowed one of them slowed all. Strategy and baseline use the same draws, as they ran in turns.

    Args:
      samples: Samples of the strategy, by task.
      plain: Samples of the baseline, by task.
    Returns:
      The mean, and the two ends of its interval; the interval is None if a task has fewer
      conversations than `MIN_GROUPS`.
    """
    tables = [
        np.concatenate([_table(ours), _table(theirs)])
        for ours, theirs in zip(samples, plain, strict=True)
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
