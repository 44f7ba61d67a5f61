"""A benchmark run: its plan, the measuring, studies, and the files that it leaves."""

import dataclasses
import math
import sys
from collections.abc import Sequence
from typing import Any

import jax

from dflash.config import loader
from dflash.config.benchmark_schema import BenchmarkRun
from dflash.loading import job as jobs
from dflash.measure import bench as benches
from dflash.measure import (
    cells,
    merge_benchmarks,
    page,
    plots,
    replay,
    results,
    roofline,
    speed_bench,
    studies,
    table,
    warnings,
    workload,
)
from dflash.measure.bench import Bench
from dflash.measure.load import Load, LoadMeter
from dflash.measure.samples import TaskRound
from dflash.measure.workload import Item
from dflash.runs import outputs
from dflash.runs.directory import RunDirectory
from dflash.runs.display import Display
from dflash.runs.shards import Shard
from dflash.text.prompts import Prompt

PAGE = "report.html"


def plan(config: BenchmarkRun) -> list[str]:
    """Returns the plan of each strategy, as lines, and allocates nothing.

    Forced acceptance lengths are read and checked. Data sets are not read, since that could
    download them.

    Raises:
      UserError: The config, a checkpoint or an input is unusable.
    """
    decodes = config.study is None or config.study.name in studies.DECODING
    if config.forced and decodes:
        cut = config.study is not None and config.study.name in studies.CUTTING
        ready = benches.prepare(config, cut=cut, dry=True).jobs
    else:
        ready = {
            name: jobs.prepare(config.decode_run(drafter), stdin=sys.stdin, dry=True)
            for name, drafter in benches.with_baseline(config.strategies).items()
        }
    lines = []
    for name, job in ready.items():
        lines += [f"strategy {name}", *job.plan().lines(), ""]
    return lines[:-1]


def run(
    bench: Bench,
    directory: RunDirectory,
    display: Display,
    *,
    wide: bool = False,
    shard: Shard | None = None,
) -> dict[str, Any]:
    """Measures every cell, and saves the results so far after each round of each task.

    Args:
      bench: Prepared benchmark, nothing loaded.
      directory: Directory for the files.
      display: Display of the progress.
      wide: Print all figures, not only those that fit into 80 columns.
      shard: Part to measure; plots, tables and page are then left to `sum_up`.
    Returns:
      The content of results.json.
    """
    with display.status("measuring the machine"):
        machine = roofline.machine_of(bench.target.sharding)
    if shard is not None:
        bench.divide(shard)
    file = str if shard is None else shard.file
    with display.status("loading weights"):
        bench.load()
    if bench.workload.has_later_turns:
        with display.status("decoding the answers that later turns follow"):
            bench.converse()
    with display.compiling() as compiling:
        bench.compile(compiling)
    with display.status("warming up"):
        bench.warm_up()
    done: list[TaskRound] = []
    total = bench.config.rounds * len(bench.workload.tasks)
    so_far, values, meter = None, {}, LoadMeter()
    with display.progress("measuring") as progress:
        for one in bench.run(progress):
            done.append(one)
            so_far = judged(bench, done, machine, meter.read())
            values = so_far.values(bench, complete=len(done) == total)
            directory.write_json(file(results.RESULTS), values)
    if shard is None:
        _finish(bench, so_far, done, values, directory, display, wide=wide)
    else:
        merge_benchmarks.save(directory, shard, done)
    return values


def sum_up(
    bench: Bench, directory: RunDirectory, display: Display, *, wide: bool = False
) -> dict[str, Any]:
    """Combines the figures of all shards, then writes and prints them.

    Args:
      bench: Prepared benchmark with the prompts of all shards, nothing loaded.
      directory: Directory of the shards; only the first process has a path.
      display: Display of the progress.
      wide: Print all figures, not only those that fit into 80 columns.
    Returns:
      The content of results.json; empty on all processes but the first.
    Raises:
      WorkdirError: Some shards have not finished.
    """
    if directory.path is None:
        return {}
    done, meter = merge_benchmarks.read(directory.path), LoadMeter()
    with display.status("measuring the machine"):
        machine = roofline.machine_of(bench.target.sharding)
    whole = judged(bench, done, machine, meter.read())
    values = whole.values(bench, complete=True)
    directory.write_json(results.RESULTS, values)
    _finish(bench, whole, done, values, directory, display, wide=wide)
    return values


def _finish(
    bench: Bench,
    found: "Judged",
    done: Sequence[TaskRound],
    values: dict[str, Any],
    directory: RunDirectory,
    display: Display,
    *,
    wide: bool,
) -> None:
    """Writes the tables, plots and page of a complete benchmark, and prints its table."""
    directory.write("results.csv", results.table_csv(results.rows(values)))
    words = bench.workload.acceptance["words"]
    categories = speed_bench.by_task(bench.workload.tasks, done)
    if categories:
        directory.write_json(results.CATEGORIES, categories)
    lines = table.lines(found.cells, found.averages, wide=wide)
    _say([*lines, *speed_bench.lines(categories)], [words, *found.notes])
    if directory.path is not None:
        with display.status("plots and page"):
            report(bench, found.cells, done, values, found.notes, directory)


@dataclasses.dataclass(frozen=True)
class Judged:
    """Figures of the completed rounds.

    Attributes:
      cells, averages: Figures of each cell, and of each strategy over all tasks.
      machine: Peak rates of the machine.
      load: Load of the machine since the run began.
    """

    cells: list[cells.Cell]
    averages: list[cells.Average]
    machine: roofline.Machine
    load: Load

    @property
    def notes(self) -> list[str]:
        """Returns sentences to print with the figures: warnings first, then conclusions."""
        return [*table.doubt_lines(self.cells), *table.limits(self.cells)]

    def values(self, bench: Bench, *, complete: bool) -> dict[str, Any]:
        """Returns the content of results.json."""
        facts = {
            "acceptance": dict(bench.workload.acceptance),
            "baseline": bench.baseline,
            "machine": dataclasses.asdict(self.machine),
            "load": dataclasses.asdict(self.load),
            **common_facts(bench.config),
        }
        return results.as_values(self.cells, self.averages, facts, complete=complete)


def judged(
    bench: Bench, done: Sequence[TaskRound], machine: roofline.Machine, load: Load
) -> Judged:
    """Computes the figures of the completed rounds."""
    setting = cells.setting_of(bench, machine, warnings.of_load(load.others_share))
    found = cells.cells(done, setting)
    averages = cells.averages(found, done, baseline=bench.baseline)
    return Judged(found, averages, machine, load)


def study(
    config: BenchmarkRun, directory: RunDirectory, display: Display, *, wide: bool = False
) -> dict[str, Any]:
    """Runs the config's study and writes study.json, study.csv and study.png.

    Results so far are saved after each turn.

    Returns:
      The content of study.json.
    """
    name, meter, answer = config.study.name, LoadMeter(), None
    with display.progress(f"study {name}") as progress:
        for step in studies.STUDIES[name](config):
            progress(step.what, step.done)
            if step.result is not None:
                answer = step.result
                values = _study_values(config, answer, meter.read())
                directory.write_json(results.STUDY, values | {"complete": False})
    load = meter.read()
    values = _study_values(config, answer, load) | {"complete": True}
    directory.write_json(results.STUDY, values)
    directory.write("study.csv", results.table_csv(answer.rows))
    # Studies of single forwards decode nothing, so acceptance lengths do not affect them.
    decodes = name in studies.DECODING
    directory.write("study.png", answer.png(_forced_note(config) if decodes else ""))
    notes = [f"not trustworthy: {one.words}" for one in warnings.of_load(load.others_share)]
    if decodes:
        notes.append(workload.words(config)["words"])
    _say(answer.text(wide=wide), notes)
    return values


def _study_values(config: BenchmarkRun, answer: studies.StudyResult, load: Load) -> dict[str, Any]:
    """Returns the content of study.json."""
    return {
        "schema": results.STUDY_SCHEMA,
        "study": config.study.name,
        "title": answer.title,
        "notes": list(answer.notes),
        "doubts": [dataclasses.asdict(one) for one in warnings.of_load(load.others_share)],
        "load": dataclasses.asdict(load),
        "acceptance": workload.words(config),
        **common_facts(config),
        "rows": [dict(row) for row in answer.rows],
    }


def _forced_note(config: BenchmarkRun) -> str:
    return "acceptance lengths are forced, not found" if config.forced else ""


def report(
    bench: Bench,
    found: list[cells.Cell],
    done: Sequence[TaskRound],
    values: dict[str, Any],
    notes: Sequence[str],
    directory: RunDirectory,
) -> None:
    """Writes the plots and the page, which holds each plot in a light and a dark theme."""
    note = _forced_note(bench.config)
    drawn = {
        name: {
            "speedup": plots.speedups(found, bench.baseline, note, theme),
            "acceptance": plots.survival(found, note, theme),
            "cost": plots.costs(found, theme),
        }
        for name, theme in (("light", plots.LIGHT), ("dark", plots.DARK))
    }
    for name, png in drawn["light"].items():
        directory.write(f"{name}.png", png)
    replays = record_replays(bench, found, done) if jax.process_count() == 1 else {}
    directory.write(PAGE, page.render(values, notes=notes, plots=drawn, replays=replays))


def record_replays(bench: Bench, found: list[cells.Cell], done: Sequence[TaskRound]) -> dict:
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
        request, lanes = bench.request(item, at_most=size), {}
        for name, engine in bench.engines.items():
            if not engine.has_parts:
                continue  # A replay runs cycles one by one, which cannot choose block sizes.
            cell = next(one for one in found if (one.task, one.strategy) == (task, name))
            words = bench.jobs[name].tokenizer
            recorded = replay.record(engine, request, item.lengths or (), words)
            cycle_ms = cell.cost_ms.cycle if cell.cost_ms else 0.0
            lanes[name] = page.Timed(recorded, cell.ttft_ms, cycle_ms)
        replays[task] = (_shown(item.prompt), lanes)
    return replays


def _longest(bench: Bench, task: str, done: Sequence[TaskRound]) -> Item:
    """Returns the task's item with the longest output of the baseline."""
    lengths = {
        one.id: len(one.output_ids)
        for round_ in done
        for sample in round_.samples
        if (sample.task, sample.strategy) == (task, bench.baseline)
        for one in sample.completions
    }
    return max(bench.workload.tasks[task], key=lambda item: lengths.get(item.prompt.index, 0))


def _shown(prompt: Prompt) -> str:
    """Returns a prompt as text for the page."""
    if prompt.messages is not None:
        return "\n".join(message["content"] for message in prompt.messages)
    return prompt.text or f"{len(prompt.ids)} random tokens"


def common_facts(config: BenchmarkRun) -> dict[str, Any]:
    """Returns the settings and versions that every figure of a run depends on."""
    used = math.prod(dataclasses.asdict(config.mesh).values())
    return {
        "batch_size": config.decode.batch_size,
        "config_hash": loader.config_hash(config),
        "config": loader.to_dict(config),
        "devices": [f"{one.platform}:{one.device_kind}" for one in jax.devices()[:used]],
        "processes": jax.process_count(),
        "versions": outputs.versions(),
    }


def _say(lines: Sequence[str], notes: Sequence[str]) -> None:
    """Prints lines and then sentences, on the first process only."""
    if jax.process_index() == 0:
        print("\n".join([*lines, "", *table.wrapped(notes)]), flush=True)
