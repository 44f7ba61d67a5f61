"""Acceptance by category, with the names and definitions of SPEED-Bench's own harness.

The harness is specdec_bench of github.com/NVIDIA/Model-Optimizer. `Request_AL` is the mean number
of tokens per step of a question, bonus tokens included, over all of its turns. `Category_AL`
and `Average_AL` are means over questions. A step is a cycle here, so the first token, which prefill
returns, is not counted.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

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
            by_strategy.setdefault(task, {})[strategy] = acceptance(tasks[task], task_samples)
    return by_strategy


def acceptance(items: Sequence[Item], samples: Sequence[Sample]) -> Values:
    """Computes acceptance lengths by question and category."""
    known = {item.prompt.index: item for item in items}
    requests: dict[str, list[int]] = {}
    categories: dict[str, str] = {}
    for completion in (completion for sample in samples for completion in sample.completions):
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
    }
