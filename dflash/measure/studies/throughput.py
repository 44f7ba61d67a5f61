"""Study of throughput at several batch sizes, on each task and on a mix of all tasks."""

import functools
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from dflash.config.benchmark_schema import BenchmarkRun
from dflash.measure import bench as benches
from dflash.measure import warnings
from dflash.measure.plots import Line
from dflash.measure.roofline import Machine
from dflash.measure.studies import variants
from dflash.measure.studies.result import Step, StudyResult, machine_note
from dflash.measure.workload import MIX

_SHOWN = ("batch", "task", "drafter", "tau", "tokens_per_second", "over_fixed", "speedup")


def load(config: BenchmarkRun) -> Iterator[Step]:
    """Compares rows chosen per cycle with the best of plain decoding and all fixed block sizes."""
    names = list(benches.with_baseline(config.strategies))
    chosen = {name for name, drafter in config.strategies.items() if drafter.adaptive}
    make_result = functools.partial(_result, chosen)
    yield from variants.by_batch(config, names, make_result, mix=True)


def _result(chosen: Collection[str], machine: Machine, rows: Sequence[dict]) -> StudyResult:
    """Makes the result from the cells of all strategies; `chosen` names those that choose rows."""
    rows = [row | {"over_fixed": _over_fixed(row, rows, chosen)} for row in rows]
    task = MIX if any(row["task"] == MIX for row in rows) else rows[0]["task"]
    lines = []
    for name in dict.fromkeys(row["drafter"] for row in rows):
        own = [row for row in rows if row["drafter"] == name and row["task"] == task]
        lines.append(
            Line(
                name,
                [row["batch"] for row in own],
                [row["tokens_per_second"] for row in own],
                flagged=[bool(row[warnings.KEY]) for row in own],
            )
        )
    order = sorted(rows, key=lambda row: (row["batch"], row["task"]))
    return StudyResult(
        f"Throughput by batch size ({task})",
        [{**dict.fromkeys(_SHOWN), **row} for row in order],
        lines,
        "batch",
        "tokens per second",
        log=True,
        notes=[
            "over_fixed: tokens per second over the best of plain decoding and all fixed block "
            "sizes, for strategies that choose their rows; prompts in turns",
            machine_note(machine),
        ],
        narrow=_SHOWN,
    )


def _over_fixed(row: dict[str, Any], rows: Sequence[dict], chosen: Collection[str]) -> float | None:
    """Returns a row's throughput over that of the best fixed choice at its batch size and task."""
    if row["drafter"] not in chosen or not row["tokens_per_second"]:
        return None
    fixed = [
        other["tokens_per_second"] or 0.0
        for other in rows
        if other["drafter"] not in chosen
        and (other["batch"], other["task"]) == (row["batch"], row["task"])
    ]
    return row["tokens_per_second"] / max(fixed) if any(fixed) else None
