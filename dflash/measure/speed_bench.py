"""Acceptance by category, with the names and definitions of SPEED-Bench's own harness.

The harness is specdec_bench of github.com/NVIDIA/Model-Optimizer. `Request_AL` is the mean number
of tokens per step of a question, bonus tokens included, over all of its turns. `Category_AL`
and `Average_AL` are means over questions. A step is a cycle here, so the first token, which prefill
returns, is not counted. Times are in seconds; that of a request begins with its prefill.
"""

import collections
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from dflash.inference.request import RequestOutput
from dflash.measure.samples import Sample, TaskRound
from dflash.measure.workload import Item

Values = dict[str, Any]


def by_task(tasks: Mapping[str, Sequence[Item]], done: Iterable[TaskRound]) -> dict[str, Values]:
    """Returns the content of categories.json, {task: {strategy: figures}}.

    Tasks without categories and strategies that ran no cycle are left out.
    """
    samples: dict[tuple[str, str], list[Sample]] = {}
    for round_ in done:
        for sample in round_.samples:
            samples.setdefault((sample.task, sample.strategy), []).append(sample)
    by_strategy: dict[str, Values] = {}
    for (task, strategy), task_samples in samples.items():
        if any(item.category for item in tasks[task]) and any(
            sample.cycles for sample in task_samples
        ):
            values = {**acceptance(tasks[task], task_samples), **timing(task_samples)}
            by_strategy.setdefault(task, {})[strategy] = values
    return by_strategy


def acceptance(items: Sequence[Item], samples: Sequence[Sample]) -> Values:
    """Computes acceptance lengths by question and category, and their distribution."""
    known = {item.prompt.index: item for item in items}
    requests: dict[str, list[int]] = {}
    categories: dict[str, str] = {}
    for completion in _completions(samples):
        item = known[completion.id]
        requests.setdefault(item.question, []).extend(completion.acceptance_lengths)
        categories[item.question] = item.category
    means = {name: statistics.fmean(lengths) for name, lengths in requests.items() if lengths}
    of_category: dict[str, list[float]] = {}
    for name, mean in means.items():
        of_category.setdefault(categories[name], []).append(mean)
    return {
        "Request_AL": means,
        "Category_AL": {name: statistics.fmean(of_category[name]) for name in sorted(of_category)},
        "Average_AL": statistics.fmean(means.values()),
        **_distribution(length for lengths in requests.values() for length in lengths),
    }


def _distribution(lengths: Iterable[int]) -> Values:
    """Computes, by acceptance length k, the step count, P(length ≥ k) and P(≥ k | ≥ k - 1)."""
    counts = dict(sorted(collections.Counter(lengths).items()))
    total, remaining, before = sum(counts.values()), sum(counts.values()), 1.0
    conditional, joint = {}, {}
    for length, count in counts.items():
        joint[length] = remaining / total
        conditional[length] = joint[length] / before
        before, remaining = joint[length], remaining - count
    return {
        "Acceptance_Length_Histogram": counts,
        "Conditional_Acceptance_Rate": conditional,
        "Joint_Acceptance_Rate": joint,
    }


def timing(samples: Sequence[Sample]) -> Values:
    """Computes times of a strategy's requests; those of one queue run concurrently."""
    completions = list(_completions(samples))
    tokens = [len(completion.output_ids) for completion in completions]
    spans = [_span_s(sample.completions) for sample in samples]
    decoded = [
        completion
        for completion in completions
        if completion.acceptance_lengths and completion.decode_ms > 0
    ]
    return {
        "Output TPS": sum(tokens) / sum(spans),
        "E2E Request Time": _statistics(
            (completion.prefill_ms + completion.decode_ms) / 1e3 for completion in completions
        ),
        "TTFT Time": _statistics(completion.prefill_ms / 1e3 for completion in completions),
        "Request Generation Step Time": _statistics(
            completion.decode_ms / 1e3 / len(completion.acceptance_lengths)
            for completion in decoded
        ),
        "Request Generation Tokens Per Second": _statistics(
            1e3 * (len(completion.output_ids) - 1) / completion.decode_ms for completion in decoded
        ),
        "Number of Output Tokens": _statistics(tokens),
    }


def _span_s(completions: Sequence[RequestOutput]) -> float:
    begins = [
        completion.finished_at - (completion.decode_ms + completion.prefill_ms) / 1e3
        for completion in completions
    ]
    return max(completion.finished_at for completion in completions) - min(begins)


def _statistics(values: Iterable[float]) -> Values:
    array = np.array(list(values), np.float64)
    quantiles = {str(q): float(np.quantile(array, q)) for q in (0.25, 0.5, 0.75)}
    return {
        "min": float(array.min()),
        "max": float(array.max()),
        "mean": float(array.mean()),
        "std": float(array.std()),
        "quantiles": quantiles,
    }


def _completions(samples: Iterable[Sample]) -> Iterable[RequestOutput]:
    return (completion for sample in samples for completion in sample.completions)
