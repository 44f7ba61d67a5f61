"""Report of a benchmark: plots, and an HTML page with plots and replays."""

from collections.abc import Sequence
from typing import Any

import jax

from dflash.measure import page, plots, replay, workload
from dflash.measure.bench import Bench
from dflash.measure.cells import Cell
from dflash.measure.samples import TaskRound
from dflash.measure.workload import Item
from dflash.runs.directory import RunDirectory
from dflash.text.prompts import Prompt

PAGE = "report.html"


def write(
    bench: Bench,
    cells: Sequence[Cell],
    done: Sequence[TaskRound],
    values: dict[str, Any],
    notes: Sequence[str],
    directory: RunDirectory,
) -> None:
    """Writes the plots and the page, which holds each plot in a light and a dark theme."""
    note = workload.forced_note(bench.config)
    drawn = {
        name: {
            "speedup": plots.speedups(cells, bench.baseline, note, theme),
            "acceptance": plots.survival(cells, note, theme),
            "cost": plots.costs(cells, theme),
        }
        for name, theme in (("light", plots.LIGHT), ("dark", plots.DARK))
    }
    for name, png in drawn["light"].items():
        directory.write(f"{name}.png", png)
    replays = _record_replays(bench, cells, done) if jax.process_count() == 1 else {}
    directory.write(PAGE, page.render(values, notes=notes, plots=drawn, replays=replays))


def _record_replays(bench: Bench, cells: Sequence[Cell], done: Sequence[TaskRound]) -> dict:
    """Replays a prompt of each task with every strategy, untimed: the one with the longest output.

    Returns:
      By task, the prompt's text and the replay of each strategy.
    """
    size = bench.config.replay_tokens
    if not size or not bench.engines:
        return {}
    replays = {}
    for task in bench.workload.tasks:
        item = _longest(bench, task, done)
        request, by_strategy = bench.request(item, at_most=size), {}
        for name, engine in bench.engines.items():
            if not engine.has_parts:
                continue  # A replay runs single cycles, which cannot choose block sizes.
            cell = next(cell for cell in cells if (cell.task, cell.strategy) == (task, name))
            words = bench.jobs[name].tokenizer
            recorded = replay.record(engine, request, item.lengths or (), words)
            cycle_ms = cell.cost_ms.cycle if cell.cost_ms else 0.0
            by_strategy[name] = page.TimedReplay(recorded, cell.ttft_ms, cycle_ms)
        replays[task] = (_as_text(item.prompt), by_strategy)
    return replays


def _longest(bench: Bench, task: str, done: Sequence[TaskRound]) -> Item:
    """Returns the task's item with the longest output of the baseline."""
    lengths = {
        completion.id: len(completion.output_ids)
        for round_ in done
        for sample in round_.samples
        if (sample.task, sample.strategy) == (task, bench.baseline)
        for completion in sample.completions
    }
    return max(bench.workload.tasks[task], key=lambda item: lengths.get(item.prompt.index, 0))


def _as_text(prompt: Prompt) -> str:
    """Returns a prompt as text for the page."""
    if prompt.messages is not None:
        return "\n".join(message["content"] for message in prompt.messages)
    return prompt.text or f"{len(prompt.ids)} random tokens"
