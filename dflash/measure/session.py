"""A benchmark run: its plan, the measuring, studies, and the files that it leaves."""

import dataclasses
import math
import sys
import time
from typing import Any

import jax

from dflash.config import loader
from dflash.config.benchmark_schema import BenchmarkRun
from dflash.measure import bench as benches
from dflash.measure import cells, page, plots, replay, results, studies, workload
from dflash.measure.bench import Bench
from dflash.offline import job as jobs
from dflash.runs import outputs
from dflash.runs.directory import RunDirectory
from dflash.runs.display import Display
from dflash.text.prompts import Prompt

PAGE = "report.html"


def plan(config: BenchmarkRun) -> list[str]:
    """What each strategy will take, as lines; nothing is allocated.

    Acceptance lengths that are to be forced are read and checked. Data sets are not read: that may
    mean to download them.

    Raises:
      UserError: whatever is wrong.
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


def run(bench: Bench, directory: RunDirectory, display: Display) -> dict[str, Any]:
    """Measures every cell and writes what there is after every round of every task.

    Returns:
      The content of results.json.
    """
    with display.status("loading weights"):
        bench.load()
    if bench.workload.has_later_turns:
        with display.status("decoding the answers that later turns follow"):
            bench.converse()
    with display.status(f"compiling for {len(bench.jobs)} strategies"):
        bench.compile()
    with display.status("warming up"):
        bench.warm_up()
    done: list[benches.TaskRound] = []
    total = bench.config.rounds * len(bench.workload.tasks)
    values: dict[str, Any] = {}
    begin = time.perf_counter()
    for one in bench.run():
        done.append(one)
        values = summarize(bench, done, complete=len(done) == total)
        directory.write_json(results.RESULTS, values)
        seconds = time.perf_counter() - begin
        display.note(
            f"round {one.round + 1} of {bench.config.rounds} · {one.task} · {seconds:.0f} s"
        )
    found, averages = table(bench, done)
    directory.write("results.csv", results.table_csv(results.rows(values)))
    show(bench, found, averages)
    if directory.path is not None:
        with display.status("plots and page"):
            report(bench, found, values, directory)
    return values


def study(config: BenchmarkRun, directory: RunDirectory, display: Display) -> None:
    """Answers the config's study and writes study.json, study.csv and study.png."""
    with display.status(f"study {config.study.name}"):
        answer = studies.STUDIES[config.study.name](config)
    words = workload.words(config)
    note = "acceptance lengths are forced, not found" if config.forced else ""
    values = {
        "schema": results.STUDY_SCHEMA,
        "study": config.study.name,
        "title": answer.title,
        "notes": list(answer.notes),
        "acceptance": words,
        **common_facts(config),
        "rows": [dict(row) for row in answer.rows],
    }
    directory.write_json(results.STUDY, values)
    directory.write("study.csv", results.table_csv(answer.rows))
    directory.write("study.png", answer.png(note))
    _say([*answer.text(), words["words"]])


def report(bench: Bench, found: list[cells.Cell], values, directory: RunDirectory) -> None:
    """Writes the plots and the page."""
    note = "acceptance lengths are forced, not found" if bench.workload.forced else ""
    drawn = {
        "speedup": plots.speedups(found, bench.baseline, note),
        "acceptance": plots.survival(found, note),
        "cost": plots.costs(found, note),
    }
    for name, png in drawn.items():
        directory.write(f"{name}.png", png)
    replays = record_replays(bench, found) if jax.process_count() == 1 else {}
    notes = [*results.limits(found), *results.notes(found)]
    text = page.render(values, notes=notes, plots=drawn, replays=replays)
    directory.write(PAGE, text)


def record_replays(bench: Bench, found: list[cells.Cell]) -> dict:
    """Each task's first prompt once more with every strategy, untimed."""
    size = bench.config.replay_tokens
    if not size:
        return {}
    replays = {}
    for task, items in bench.workload.tasks.items():
        request, lanes = bench.request(items[0], at_most=size), {}
        for name, engine in bench.engines.items():
            if not engine.has_parts:
                continue  # outside the loop, cycle by cycle, no block size would be chosen
            cell = next(one for one in found if (one.task, one.strategy) == (task, name))
            words = bench.jobs[name].tokenizer
            recorded = replay.record(engine, request, items[0].lengths or (), words)
            cycle_ms = cell.cost_ms.cycle if cell.cost_ms else 0.0
            lanes[name] = page.Timed(recorded, cell.ttft_ms, cycle_ms)
        replays[task] = (_shown(items[0].prompt), lanes)
    return replays


def _shown(prompt: Prompt) -> str:
    """A prompt as its reader sees it."""
    if prompt.messages is not None:
        return "\n".join(message["content"] for message in prompt.messages)
    return prompt.text or f"{len(prompt.ids)} random tokens"


def table(bench: Bench, done) -> tuple[list[cells.Cell], list[cells.Average]]:
    """Cells and averages of the rounds that are done."""
    found = cells.of_bench(bench, done)
    return found, cells.averages(found, done, baseline=bench.baseline)


def summarize(bench: Bench, done, *, complete: bool) -> dict[str, Any]:
    """The content of results.json."""
    return results.as_values(*table(bench, done), facts(bench), complete=complete)


def facts(bench: Bench) -> dict[str, Any]:
    """What the figures depend on besides the samples."""
    return {
        "acceptance": dict(bench.workload.acceptance),
        "baseline": bench.baseline,
        **common_facts(bench.config),
    }


def common_facts(config: BenchmarkRun) -> dict[str, Any]:
    """What every figure of a run depends on."""
    used = math.prod(dataclasses.asdict(config.mesh).values())
    return {
        "batch_size": config.decode.batch_size,
        "config_hash": loader.config_hash(config),
        "config": loader.to_dict(config),
        "devices": [f"{one.platform}:{one.device_kind}" for one in jax.devices()[:used]],
        "processes": jax.process_count(),
        "versions": outputs.versions(),
    }


def show(bench: Bench, found, averages) -> None:
    """Prints the table, where acceptance comes from, and each strategy's largest loss."""
    words = bench.workload.acceptance["words"]
    notes = [words, *results.limits(found), *results.notes(found)]
    _say([*results.lines(found, averages), "", *notes])


def _say(lines: list[str]) -> None:
    """Prints lines on the first process."""
    if jax.process_index() == 0:
        print("\n".join(lines), flush=True)
