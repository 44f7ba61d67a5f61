"""Runs of benchmarks, studies and sweep points: measurements, files and figures."""

import dataclasses
import os
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from dflash import errors
from dflash.config.benchmark_schema import BenchmarkRun
from dflash.inference import difference
from dflash.loading import job as jobs
from dflash.measure import bench as benches
from dflash.measure import (
    cells,
    report,
    results,
    roofline,
    speed_bench,
    studies,
    table,
    warnings,
    workload,
)
from dflash.measure.bench import Bench
from dflash.measure.samples import TaskRound
from dflash.models.decoder import Decoder
from dflash.runs import frame
from dflash.runs.directory import RunDirectory
from dflash.runs.display import Display
from dflash.runs.processor_load import Load, LoadMeter
from dflash.runs.sweeps import Runner


def plan(config: BenchmarkRun) -> list[str]:
    """Returns the plan of each strategy, as lines, and allocates nothing.

    Forced acceptance lengths are read and checked. Data sets are not read, since that could
    download them.
    """
    decodes = config.study is None or config.study.name in studies.DECODING
    if config.forced and decodes:
        ready = benches.prepare(config, dry=True).jobs
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
    config: BenchmarkRun,
    *,
    workdir: str | os.PathLike | None = None,
    profile_dir: str | os.PathLike | None = None,
    wide: bool = False,
) -> dict[str, Any]:
    """Runs a benchmark or a study, and prints its figures.

    Args:
      wide: Print all figures, not only those that fit into 80 columns.
    Returns:
      The content of results.json, or of study.json.
    """
    directory = results.open_directory(workdir, config)
    with frame.open_run(directory, profile_dir=profile_dir) as display:
        if config.study is not None:
            return run_study(config, directory, display, wide=wide)
        return measure(benches.prepare(config), directory, display, wide=wide)


def measure(
    bench: Bench,
    directory: RunDirectory,
    display: Display,
    *,
    wide: bool = False,
) -> dict[str, Any]:
    """Measures every cell, and saves the results so far after each round of each task.

    Args:
      bench: Prepared benchmark, nothing loaded.
    Raises:
      UnequalError: Rounding does not explain a difference from the baseline's outputs.
    """
    with display.status("measuring the machine"):
        machine = roofline.machine_of(bench.target.sharding)
    with display.status("loading weights"):
        bench.load()
    if bench.workload.has_later_turns:
        with display.status("decoding the answers that later turns follow"):
            bench.decode_later_turns()
    with display.compiling() as compiling:
        bench.compile(compiling)
    with display.status("warming up"):
        bench.warm_up()
    done: list[TaskRound] = []
    total = bench.config.rounds * len(bench.workload.tasks)
    so_far, values, meter = None, {}, LoadMeter()
    with display.progress("measuring") as progress:
        for round_ in bench.run(progress):
            done.append(round_)
            so_far = figures_of(bench, done, machine, meter.read())
            values = so_far.values(bench, complete=len(done) == total)
            directory.write_json(results.RESULTS, values)
    differences = bench.differences(done)
    values["differences"] = difference.lines(differences)
    directory.write_json(results.RESULTS, values)
    _finish(bench, so_far, done, values, directory, display, wide=wide)
    for line in values["differences"]:
        display.note(line)
    difference.refuse_faults(differences)
    return values


def _finish(
    bench: Bench,
    figures: "Figures",
    done: Sequence[TaskRound],
    values: dict[str, Any],
    directory: RunDirectory,
    display: Display,
    *,
    wide: bool,
) -> None:
    directory.write("results.csv", results.table_csv(results.rows(values)))
    words = workload.acceptance_source(bench.config)["words"]
    categories = speed_bench.by_task(bench.workload.tasks, done)
    if categories:
        directory.write_json(results.CATEGORIES, categories)
    table.show(table.lines(figures.cells, figures.averages, wide=wide), [words, *figures.notes])
    if directory.writes:
        with display.status("plots and page"):
            report.write(bench, figures.cells, done, values, figures.notes, directory)


@dataclasses.dataclass(frozen=True)
class Figures:
    """Figures of the completed rounds."""

    cells: list[cells.Cell]
    averages: list[cells.Average]
    machine: roofline.Machine
    load: Load

    @property
    def notes(self) -> list[str]:
        """Returns sentences to print with the figures: warnings first, then conclusions."""
        return [*table.warning_lines(self.cells), *table.limits(self.cells)]

    def values(self, bench: Bench, *, complete: bool) -> dict[str, Any]:
        """Returns the content of results.json."""
        facts = {
            "acceptance": workload.acceptance_source(bench.config),
            "baseline": bench.baseline,
            "machine": dataclasses.asdict(self.machine),
            "load": dataclasses.asdict(self.load),
            **results.common_facts(bench.config),
        }
        return results.as_values(self.cells, self.averages, facts, complete=complete)


def figures_of(
    bench: Bench, done: Sequence[TaskRound], machine: roofline.Machine, load: Load
) -> Figures:
    """Computes the figures of the completed rounds."""
    setting = cells.setting_of(bench, machine, warnings.of_load(load.others_share))
    all_cells = cells.cells(done, setting)
    averages = cells.averages(all_cells, done, baseline=bench.baseline)
    return Figures(all_cells, averages, machine, load)


def run_study(
    config: BenchmarkRun, directory: RunDirectory, display: Display, *, wide: bool = False
) -> dict[str, Any]:
    """Runs the config's study and writes study.json, study.csv and study.png.

    Results so far are saved after each turn.

    Returns:
      The content of study.json.
    """
    name, meter = config.study.name, LoadMeter()
    with display.progress(f"study {name}") as progress:
        for step in studies.STUDIES[name](config):
            progress(step.what, step.done)
            if step.result is not None:
                answer, load = step.result, meter.read()
                values = _content(config, answer, load)
                directory.write_json(results.STUDY, values | {"complete": False})
    values |= {"complete": True}
    directory.write_json(results.STUDY, values)
    directory.write("study.csv", results.table_csv(answer.rows))
    # Studies of single forwards decode nothing, so acceptance lengths do not affect them.
    decodes = name in studies.DECODING
    directory.write("study.png", answer.png(workload.forced_note(config) if decodes else ""))
    notes = [f"not trustworthy: {warning.words}" for warning in warnings.of_load(load.others_share)]
    if decodes:
        notes.append(workload.acceptance_source(config)["words"])
    table.show(answer.text(wide=wide), notes)
    return values


def _content(config: BenchmarkRun, answer: studies.StudyResult, load: Load) -> dict[str, Any]:
    return {
        "schema": results.STUDY_SCHEMA,
        "study": config.study.name,
        "title": answer.title,
        "notes": list(answer.notes),
        warnings.KEY: [
            dataclasses.asdict(warning) for warning in warnings.of_load(load.others_share)
        ],
        "load": dataclasses.asdict(load),
        "acceptance": workload.acceptance_source(config),
        **results.common_facts(config),
        "rows": [dict(row) for row in answer.rows],
    }


class BenchmarkPoints(Runner):
    """Runner of sweep points that are benchmarks; each point has a work directory of its own."""

    metrics = results.FIGURES
    shown = ("tau", "speedup")

    def __init__(self, display: Display):
        super().__init__(display)
        self._targets: dict[str, Decoder] = {}  # At most one, by `jobs.target_key`.

    def check(self, config: BenchmarkRun) -> None:
        if config.study is not None:
            raise errors.ConfigError(
                "study: sweeps do not run studies; use dflash benchmark for this one"
            )
        benches.prepare(config)

    def affinity(self, config: BenchmarkRun) -> str:
        return jobs.target_key(config.decode_run(benches.BASELINE))

    def run(self, config: BenchmarkRun, directory: pathlib.Path) -> Mapping[str, Any]:
        key = self.affinity(config)
        # Free another target first: memory may not hold two.
        self._targets = {other: target for other, target in self._targets.items() if other == key}
        bench = benches.prepare(config, target=self._targets.get(key))
        with results.open_directory(directory, config) as opened:
            values = measure(bench, opened, Display.silent())
        self._targets[key] = bench.target
        return {
            f"{row['task']}.{row['strategy']}.{name}": row[name]
            for row in results.rows(values)
            if row["strategy"] != bench.baseline
            for name in self.metrics
        }
