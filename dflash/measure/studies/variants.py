"""Studies that measure whole cells for each of several variants: blocks, layers, taps, batches."""

import dataclasses
from collections.abc import Iterable, Mapping

from dflash import errors
from dflash.config.benchmark_schema import BenchmarkRun
from dflash.config.schema import DrafterConfig
from dflash.measure import bench as benches
from dflash.measure import cells, roofline
from dflash.measure.studies.result import StudyResult, machine_note
from dflash.measure.studies.timings import with_block_size

USED_BLOCKS = (4, 8, 12, 16)
LAYERS = (1, 2, 3, 5, 8)
TAPS = (1, 3, 5)
BATCHES = (1, 2, 4, 8, 16, 32, 64)


def block(config: BenchmarkRun) -> StudyResult:
    """Which block to use with a drafter of which trained block."""
    values = config.study.values or USED_BLOCKS
    trained = {}
    for name, job in benches.prepare_models(config).items():
        if job.drafter.num_draft_tokens:
            trained[name] = job.drafter.block_size
    variants, keys = {}, {}
    for name, size in trained.items():
        for used in (one for one in values if one <= size):
            label = f"{name}, {used} of {size}"
            variants[label] = with_block_size(name, config.strategies[name], used)
            keys[label] = {"drafter": name, "trained": size, "used": used}
    measured = _measure(config, variants, keys)
    return _table("Block size, trained × used", *measured, "used", ("drafter", "trained"))


def layers(config: BenchmarkRun) -> StudyResult:
    """What another number of draft layers costs; with random weights, at forced acceptance."""
    values = config.study.values or LAYERS
    measured = _architectures(config, "num_hidden_layers", "layers", values)
    return _table("Number of draft layers", *measured, "layers", ("drafter",))


def taps(config: BenchmarkRun) -> StudyResult:
    """What another number of tapped target layers costs; see `layers`."""
    values = config.study.values or TAPS
    measured = _architectures(config, "num_target_features", "taps", values)
    return _table("Number of tapped layers", *measured, "taps", ("drafter",))


def batch(config: BenchmarkRun) -> StudyResult:
    """What drafting is worth when the target has other sequences to serve too."""
    rows, machine, target = [], None, None
    for size in config.study.values or BATCHES:
        decode = dataclasses.replace(config.decode, batch_size=size)
        prompts = max(config.prompts_per_task, size)
        variant = dataclasses.replace(config, decode=decode, prompts_per_task=prompts)
        keys = {name: {"drafter": name, "batch": size} for name in config.strategies}
        measured = benches.prepare(variant, target=target)
        _check_full(measured, size)
        measured.load()
        target = measured.target
        machine = machine or roofline.machine_of(target.sharding)
        rows += _rows(measured, keys, machine)
    return _table("Batch size", rows, machine, "batch", ("drafter",))


def _check_full(bench: benches.Bench, size: int) -> None:
    """Raises InputError if a task cannot fill all slots: its figures would be of fewer."""
    for task, items in bench.workload.tasks.items():
        if len(items) < size:
            raise errors.InputError(
                f"study.values: {size} slots, but {task} has only {len(items)} prompts; leave it "
                "out, or draw lengths by --acceptance, of which there are as many as it takes"
            )


def _architectures(
    config: BenchmarkRun, field: str, column: str, values: Iterable[int]
) -> tuple[list[dict], roofline.Machine]:
    """Random drafters of other shapes, beside one another."""
    variants, keys = {}, {}
    for name, drafter in config.strategies.items():
        for value in values:
            label = f"{name}, {column} {value}"
            variants[label] = _reshaped(name, drafter, field, value)
            keys[label] = {"drafter": name, column: value}
    return _measure(config, variants, keys)


def _reshaped(name: str, drafter: DrafterConfig, field: str, value: int) -> DrafterConfig:
    shape = getattr(drafter, "architecture", None)
    if shape is None or not hasattr(shape, field):
        raise errors.ConfigError(
            f"strategies.{name}: drafter {drafter.name!r} states no architecture.{field} to vary; "
            "state its architecture, or leave it out"
        )
    changes = {field: value}
    if "num_target_features" in changes and hasattr(shape, "target_layer_ids"):
        changes["target_layer_ids"] = None  # evenly spread
    shape = dataclasses.replace(shape, **changes)
    return dataclasses.replace(drafter, checkpoint="random", architecture=shape)


def _measure(
    config: BenchmarkRun, variants: Mapping[str, DrafterConfig], keys: Mapping[str, Mapping]
) -> tuple[list[dict], roofline.Machine]:
    """Rows of the cells of all variants, which run side by side."""
    varied = dataclasses.replace(config, strategies=dict(variants))
    bench = benches.prepare(varied, cut=True)
    bench.load()
    machine = roofline.machine_of(bench.target.sharding)
    return _rows(bench, keys, machine), machine


def _rows(
    bench: benches.Bench, keys: Mapping[str, Mapping], machine: roofline.Machine
) -> list[dict]:
    """Measures every cell; a row for each of a strategy that has keys."""
    bench.converse()
    bench.compile()
    bench.warm_up()
    size = bench.config.decode.batch_size
    rows = []
    for cell in cells.of_bench(bench, list(bench.run())):
        if cell.strategy not in keys:
            continue
        cost, drafter = cell.cost_ms, bench.jobs[cell.strategy].drafter
        context = sum(len(i.prompt.ids) for i in bench.workload.tasks[cell.task])
        context = context // len(bench.workload.tasks[cell.task])
        least = roofline.target_work(
            bench.target, batch=size, rows=cell.block_size, context=context,
            kv_dtype=bench.config.decode.kv_dtype,
        ).ideal_ms(machine)  # fmt: skip
        least += roofline.draft_work(bench.target, drafter, batch=size).ideal_ms(machine)
        rows.append(
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
                "roofline_ms": least,
            }
        )
    return rows


def _table(
    title: str, rows: list[dict], machine: roofline.Machine, column: str, names: tuple[str, ...]
) -> StudyResult:
    """The rows and, for every drafter and task, a line of the speed-up."""

    def label(row) -> str:
        return ", ".join(str(row[name]) for name in (*names, "task"))

    lines: dict[str, tuple[list, list]] = {}
    for row in rows:
        places, values = lines.setdefault(label(row), ([], []))
        places.append(row[column])
        values.append(row["speedup"] or 0.0)
    notes = ["speed-up over plain decoding of the same batch, prompts in turns"]
    notes.append(machine_note(machine))
    return StudyResult(title, rows, lines, column, "speed-up", (), False, notes)
