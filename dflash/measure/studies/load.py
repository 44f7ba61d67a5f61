"""Study of load: throughput at several batch sizes, on each task and on a mix of all tasks."""

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from dflash import errors
from dflash.config.benchmark_schema import BenchmarkRun
from dflash.measure import bench as benches
from dflash.measure import cells, roofline, warnings
from dflash.measure.plots import Line
from dflash.measure.roofline import Machine
from dflash.measure.samples import TaskRound
from dflash.measure.studies.result import Step, StudyResult, machine_note, with_warnings
from dflash.measure.workload import MIX

BATCHES = (1, 2, 4, 8, 16, 32, 64)
_SHOWN = ("batch", "task", "drafter", "tau", "tokens_per_second", "over_fixed", "speedup")


def load(config: BenchmarkRun) -> Iterator[Step]:
    """Compares rows chosen per cycle with the best of plain decoding and all fixed block sizes."""
    chosen = {name for name, drafter in config.strategies.items() if drafter.adaptive}
    sizes = config.study.values or BATCHES
    rows, machine, target = [], None, None
    for number, size in enumerate(sizes):
        decode = dataclasses.replace(config.decode, batch_size=size)
        # Use enough prompts that a slot that becomes free has something to decode.
        prompts = max(config.prompts_per_task, 2 * size if size > 1 else 1)
        variant = dataclasses.replace(config, decode=decode, prompts_per_task=prompts)
        bench = benches.prepare(variant, target=target)
        _check_full(bench, size)
        bench.workload = bench.workload.with_mix()
        bench.load()
        target = bench.target
        machine = machine or roofline.machine_of(target.sharding)
        before = rows
        for step, fresh in _steps(bench, machine):
            rows = [*before, *fresh]
            result = _result(chosen, machine, rows) if fresh else None
            named = dataclasses.replace(step, what=f"batch {size}, {step.what}", result=result)
            yield named.within(number / len(sizes), 1 / len(sizes))


def _check_full(bench: benches.Bench, size: int) -> None:
    """Raises InputError if a task cannot fill all slots, so that its figures would mislead."""
    for task, items in bench.workload.tasks.items():
        if len(items) < size:
            raise errors.InputError(
                f"study.values: {size} slots need as many prompts, but {task} has only "
                f"{len(items)}; remove the value, or use --acceptance, which draws any "
                "number of prompts"
            )


def _steps(
    bench: benches.Bench, machine: Machine
) -> Iterator[tuple[Step, Sequence[Mapping[str, Any]]]]:
    """Measures every cell; after each task of each round, the step comes with the rows so far."""
    yield Step("decoding the answers that later turns follow", 0), ()
    bench.decode_later_turns()
    yield Step(f"compiling for {len(bench.jobs)} strategies", 0), ()
    bench.compile()
    yield Step("warming up", 0), ()
    bench.warm_up()
    total, rounds = bench.config.rounds * len(bench.workload.tasks), []
    for round_ in bench.run():
        rounds.append(round_)
        where = f"round {round_.round + 1} of {bench.config.rounds}, {round_.task}, done"
        yield Step(where, len(rounds) / total), _rows(bench, machine, rounds)


def _rows(bench: benches.Bench, machine: Machine, rounds: Sequence[TaskRound]) -> list[dict]:
    """Computes a row for each cell."""
    size = bench.config.decode.batch_size
    rows = []
    for cell in cells.cells(rounds, cells.setting_of(bench, machine)):
        cost, drafter = cell.cost_ms, bench.jobs[cell.strategy].drafter
        least = roofline.draft_work(bench.target, drafter, batch=size).ideal_ms(machine)
        rows.append(
            with_warnings(
                {
                    "drafter": cell.strategy,
                    "batch": size,
                    "task": cell.task,
                    "tau": cell.tau,
                    "tokens_per_second": cell.tokens_per_second,
                    "speedup": cell.speedup,
                    "cycle_ms": cost and cost.cycle,
                    "draft_ms": cost and cost.draft,
                    "verify_ms": cost and cost.verify,
                    "plain_token_ms": cell.baseline_cycle_ms,
                    "roofline_ms": cell.roofline_ms and cell.roofline_ms + least,
                },
                (*cell.warnings, *warnings.of_forward("the draft", cost and cost.draft, least)),
            )
        )
    return rows


def _result(chosen: Collection[str], machine: Machine, rows: Sequence[dict]) -> StudyResult:
    """Makes the result from the cells of all strategies; `chosen` names those that choose rows."""
    rows = [row | {"over_fixed": _over_fixed(row, rows, chosen)} for row in rows]
    task = MIX if any(row["task"] == MIX for row in rows) else rows[0]["task"]
    lines = []
    for name in dict.fromkeys(row["drafter"] for row in rows):
        strategy_rows = [row for row in rows if row["drafter"] == name and row["task"] == task]
        lines.append(
            Line(
                name,
                [row["batch"] for row in strategy_rows],
                [row["tokens_per_second"] for row in strategy_rows],
                flagged=[bool(row[warnings.KEY]) for row in strategy_rows],
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
