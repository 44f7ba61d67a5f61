"""Studies that measure whole cells of several variants: blocks, layers, taps, batch sizes."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from dflash import errors
from dflash.config.benchmark_schema import BenchmarkRun
from dflash.config.schema import DrafterConfig
from dflash.measure import bench as benches
from dflash.measure import cells, roofline, warnings
from dflash.measure.plots import Line
from dflash.measure.samples import TaskRound
from dflash.measure.studies.result import Step, StudyResult, machine_note, with_warnings
from dflash.measure.studies.timings import with_block_size

# Maps a machine and the rows so far to the result of a study.
MakeResult = Callable[[roofline.Machine, list[dict]], StudyResult]

USED_BLOCKS = (4, 8, 12, 16)
LAYERS = (1, 2, 3, 5, 8)
TAPS = (1, 3, 5)
BATCHES = (1, 2, 4, 8, 16, 32, 64)


def block(config: BenchmarkRun) -> Iterator[Step]:
    """Compares block sizes, used and trained, by their speed-up."""
    values = config.study.values or USED_BLOCKS
    trained = {}
    for name, job in benches.prepare_models(config).items():
        if job.drafter.num_draft_tokens:
            trained[name] = job.drafter.block_size
    variants, keys = {}, {}
    for name, size in trained.items():
        for used in (value for value in values if value <= size):
            label = f"{name}, {used} of {size}"
            variants[label] = with_block_size(name, config.strategies[name], used)
            keys[label] = {"drafter": name, "trained": size, "used": used}
    make_result = functools.partial(
        _table, "Block size, trained × used", "used", ("drafter", "trained")
    )
    yield from _measure(config, variants, keys, make_result)


def layers(config: BenchmarkRun) -> Iterator[Step]:
    """Compares numbers of draft layers, with random weights and forced acceptance."""
    values = config.study.values or LAYERS
    make_result = functools.partial(_table, "Number of draft layers", "layers", ("drafter",))
    yield from _architectures(config, "num_hidden_layers", "layers", values, make_result)


def taps(config: BenchmarkRun) -> Iterator[Step]:
    """Compares numbers of tapped target layers; see `layers`."""
    values = config.study.values or TAPS
    make_result = functools.partial(_table, "Number of tapped layers", "taps", ("drafter",))
    yield from _architectures(config, "num_target_features", "taps", values, make_result)


def batch(config: BenchmarkRun) -> Iterator[Step]:
    """Measures the gain from drafting at several batch sizes."""
    make_result = functools.partial(_table, "Batch size", "batch", ("drafter",))
    yield from by_batch(config, list(config.strategies), make_result)


def by_batch(
    config: BenchmarkRun,
    names: Sequence[str],
    make_result: MakeResult,
    *,
    mix: bool = False,
) -> Iterator[Step]:
    """Measures cells at several batch sizes.

    Args:
      config: Config of the run.
      names: Strategies to show, of which the baseline may be one.
      make_result: Makes the result from the rows so far, with the columns `drafter` and `batch`.
      mix: Measure a mix of all tasks too; see `Workload.with_mix`.
    """
    sizes = config.study.values or BATCHES
    rows, machine, target = [], None, None
    for number, size in enumerate(sizes):
        decode = dataclasses.replace(config.decode, batch_size=size)
        # Use enough prompts that a slot that becomes free has something to decode.
        prompts = max(config.prompts_per_task, 2 * size if size > 1 else 1)
        variant = dataclasses.replace(config, decode=decode, prompts_per_task=prompts)
        keys = {name: {"drafter": name, "batch": size} for name in names}
        measured = benches.prepare(variant, target=target)
        _check_full(measured, size)
        if mix:
            measured.workload = measured.workload.with_mix()
        measured.load()
        target = measured.target
        machine = machine or roofline.machine_of(target.sharding)
        before = list(rows)

        def result(machine, fresh, before=before):
            rows[:] = [*before, *fresh]
            return make_result(machine, list(rows))

        for step in _steps(measured, keys, machine, result):
            named = dataclasses.replace(step, what=f"batch {size}, {step.what}")
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


def _architectures(
    config: BenchmarkRun, field: str, column: str, values: Iterable[int], make_result: MakeResult
) -> Iterator[Step]:
    """Compares drafters that differ in one field of their architecture, with random weights."""
    variants, keys = {}, {}
    for name, drafter in config.strategies.items():
        for value in values:
            label = f"{name}, {column} {value}"
            variants[label] = _reshaped(name, drafter, field, value)
            keys[label] = {"drafter": name, column: value}
    yield from _measure(config, variants, keys, make_result)


def _reshaped(name: str, drafter: DrafterConfig, field: str, value: int) -> DrafterConfig:
    shape = getattr(drafter, "architecture", None)
    if shape is None or not hasattr(shape, field):
        raise errors.ConfigError(
            f"strategies.{name}: drafter {drafter.name!r} has no architecture.{field} to vary; "
            "set its architecture, or remove the strategy"
        )
    changes = {field: value}
    if "num_target_features" in changes and hasattr(shape, "target_layer_ids"):
        changes["target_layer_ids"] = None  # Spread them evenly.
    shape = dataclasses.replace(shape, **changes)
    return dataclasses.replace(drafter, checkpoint="random", architecture=shape)


def _measure(
    config: BenchmarkRun,
    variants: Mapping[str, DrafterConfig],
    keys: Mapping[str, Mapping],
    make_result: MakeResult,
) -> Iterator[Step]:
    """Measures the cells of all variants, in turns."""
    varied = dataclasses.replace(config, strategies=dict(variants))
    bench = benches.prepare(varied, cut=True)
    bench.load()
    yield Step("measuring the machine", 0)
    yield from _steps(bench, keys, roofline.machine_of(bench.target.sharding), make_result)


def _steps(
    bench: benches.Bench,
    keys: Mapping[str, Mapping],
    machine: roofline.Machine,
    make_result: MakeResult,
) -> Iterator[Step]:
    """Measures every cell, and yields a result of all of them after each task of each round."""
    yield Step("decoding the answers that later turns follow", 0)
    bench.decode_later_turns()
    yield Step(f"compiling for {len(bench.jobs)} strategies", 0)
    bench.compile()
    if bench.must_time_cycles:
        yield Step("timing cycles", 0)
        bench.time_cycles()
    yield Step("warming up", 0)
    bench.warm_up()
    total, rounds = bench.config.rounds * len(bench.workload.tasks), []
    for round_ in bench.run():
        rounds.append(round_)
        where = f"round {round_.round + 1} of {bench.config.rounds}, {round_.task}, done"
        yield Step(
            where, len(rounds) / total, make_result(machine, _rows(bench, keys, machine, rounds))
        )


def _rows(
    bench: benches.Bench,
    keys: Mapping[str, Mapping],
    machine: roofline.Machine,
    rounds: Sequence[TaskRound],
) -> list[dict]:
    """Computes a row for each cell of a strategy in `keys`."""
    size = bench.config.decode.batch_size
    rows = []
    for cell in cells.cells(rounds, cells.setting_of(bench, machine)):
        if cell.strategy not in keys:
            continue
        cost, drafter = cell.cost_ms, bench.jobs[cell.strategy].drafter
        least = roofline.draft_work(bench.target, drafter, batch=size).ideal_ms(machine)
        rows.append(
            with_warnings(
                {
                    **keys[cell.strategy],
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


def _table(
    title: str, column: str, names: tuple[str, ...], machine: roofline.Machine, rows: list[dict]
) -> StudyResult:
    """Returns the rows and, for each drafter and task, a line of the speed-up."""
    by_name: dict[str, list[dict]] = {}
    for row in rows:
        label = ", ".join(str(row[name]) for name in (*names, "task"))
        by_name.setdefault(label, []).append(row)
    lines = [
        Line(
            label,
            [row[column] for row in some],
            [row["speedup"] or math.nan for row in some],
            flagged=[bool(row[warnings.KEY]) for row in some],
        )
        for label, some in by_name.items()
    ]
    return StudyResult(
        title,
        rows,
        lines,
        column,
        "speed-up",
        even=1.0,
        notes=[
            "speed-up over plain decoding of the same batch, prompts in turns",
            machine_note(machine),
        ],
        narrow=(*names, column, "task", "tau", "speedup", "cycle_ms", "roofline_ms"),
    )
