"""Compiles a run for TPUs that need not be present: dflash compile CONFIG tpu.topology=…"""

import contextlib
import dataclasses
import json
import os
import pathlib
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from absl import flags

from dflash import errors
from dflash.cli import subcommand as cli
from dflash.compiler.forecast import PLAIN, Forecast
from dflash.config import loader, tpu_schema
from dflash.storage import files, paths

if TYPE_CHECKING:
    from dflash.compiler.compile_points import Job, Machine
    from dflash.compiler.report import Report
    from dflash.measure.acceptance import Expected

_OVER_BUDGET = 3


def _define_flags(values: flags.FlagValues) -> None:
    flags.DEFINE_string(
        "rows",
        None,
        "Also the cost of verifying so many rows at once, such as 1,16,64,128.",
        flag_values=values,
    )
    flags.DEFINE_bool(
        "kernels",
        False,
        "Also the static schedules of our own kernels; takes some disk and time.",
        flag_values=values,
    )
    flags.DEFINE_bool(
        "forecast",
        False,
        "Instead the expected speed-up of each of the config's strategies, by task, batch and "
        "context, and the best choice; continues in --workdir.",
        flag_values=values,
    )


SUBCOMMAND = cli.Subcommand(
    "compile",
    "Compiles the programs of a decoding or training config for a TPU topology, on any Linux host, "
    "and reports what the compiler says of memory, time, copies and collectives.",
    examples=(
        "dflash compile configs/qwen3_4b_dflash.yml tpu.topology=v5e:1x1",
        "dflash compile configs/qwen3_4b_dflash.yml tpu.topology=v5e:1x1 --rows 1,16",
        "dflash compile configs/train/qwen3_4b_dflash.yml mesh.fsdp=4 \\",
        "    tpu.topology=v5p:2x2x1",
        "dflash compile configs/forecast/qwen3_4b.yml --forecast --workdir w",
    ),
    schema=(tpu_schema.CompileDecode, tpu_schema.CompileTrain),
    shared=("workdir", "print_config", "compilation_cache"),
    define_flags=_define_flags,
    statuses="3: the run does not fit, or passes tpu.max_hbm_gb or tpu.max_cycle_ms",
)


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Runs the command; see `dflash compile --help`."""
    cli.run(SUBCOMMAND, _compile, argv)


def run(
    config: str | os.PathLike,
    *overrides: str,
    workdir: str | os.PathLike | None = None,
    rows: str | None = None,
    kernels: bool = False,
) -> "Report":
    """Compiles for a TPU, as `dflash compile` does, and prints its report.

    Args:
      config: Path of a YAML file, looked up as on the command line.
      *overrides: Overrides of the form `key=value`, such as "tpu.topology=v5p:2x2x1".
      workdir, rows, kernels: Values of the flags with these names.
    Raises:
      UserError: The command would exit with an error.
    """
    flags_given = {"workdir": workdir, "rows": rows, "kernels": kernels}
    return _found(cli.parse(SUBCOMMAND, config, *overrides, **flags_given))


def forecast(
    config: str | os.PathLike, *overrides: str, workdir: str | os.PathLike | None = None
) -> Forecast:
    """Forecasts speed-ups, as `dflash compile --forecast` does, and prints them.

    Args:
      config: Path of a YAML file, looked up as on the command line.
      *overrides: Overrides of the form `key=value`, such as "forecast.batches=[1,8]".
      workdir: Value of the flag with this name.
    Raises:
      UserError: The command would exit with an error.
    """
    flags_given = {"workdir": workdir, "forecast": True}
    return _forecast(cli.parse(SUBCOMMAND, config, *overrides, **flags_given))


def _compile(command: cli.Command) -> int:
    if command.flags["forecast"]:
        _forecast(command)
        return 0
    broken = _found(command).broken_budgets(command.config.tpu)
    for line in broken:
        print(f"over budget: {line}", file=sys.stderr)
    return _OVER_BUDGET if broken else 0


def _found(command: cli.Command) -> "Report":
    # jax is imported below, after the config has been found good.
    from dflash.compiler import curve, topology

    rows = curve.parse_rows(command.flags["rows"])
    with contextlib.ExitStack() as stack:
        schedules = None
        if command.flags["kernels"]:
            schedules = stack.enter_context(tempfile.TemporaryDirectory())
        topology.prepare_environment(schedules)
        return _report(command, rows, schedules)


def _report(command: cli.Command, rows: Sequence[int], schedules: str | None) -> "Report":
    from dflash.compiler import bundles, compile_run, curve, report, table
    from dflash.runs.display import Display

    display = Display()

    def keep(found: report.Report, points=(), kernels=None, *, complete: bool = False) -> None:
        if command.workdir:
            _write(command, report.to_json(found), points, kernels or {}, complete)

    with display.progress("compiling", every_s=0) as progress:
        found = compile_run.compile_run(command.config, progress, keep)
    print("\n".join(table.lines(found)), flush=True)
    kernels = {}
    if schedules:
        names = {name for program in found.programs.values() for name in program.kernels}
        kernels = bundles.of_kernels(pathlib.Path(schedules), sorted(names))
        print("\n".join(bundles.lines(kernels)))
    points = []
    if rows:
        with display.progress("compiling by rows", every_s=0) as progress:
            points = curve.measure(
                command.config,
                rows,
                found.topology,
                found.rates,
                progress,
                lambda some: keep(found, some, kernels),
            )
        print("\n".join(curve.lines(points, found.topology.chip)))
    keep(found, points, kernels, complete=True)
    return found


def _forecast(command: cli.Command) -> Forecast:
    # jax is imported below, after the config has been found good.
    from dflash.compiler import compile_points, forecast_table, topology
    from dflash.measure import acceptance, table
    from dflash.runs.display import Display

    config = command.config
    if not isinstance(config, tpu_schema.CompileDecode):
        raise errors.ConfigError("--forecast: takes a decoding config, not one that trains")
    if command.flags["rows"] is not None or command.flags["kernels"]:
        raise errors.ConfigError("--forecast: excludes --rows and --kernels")
    known, jobs = acceptance.read(config.forecast.acceptance), compile_points.jobs(config)
    topology.prepare_environment()
    directory = paths.to_path(command.workdir) if command.workdir else None
    with Display().progress("compiling", every_s=0) as progress, files.explained(directory):
        machine = compile_points.machine_of(config)
        measured = compile_points.measure(jobs, machine, directory, progress)
    shapes = {job.strategy: _shape(job, measured) for job in jobs if job.strategy != PLAIN}
    expected = acceptance.expected(known, shapes, config.drafter.name)
    chip = machine.topology.chip
    tokens = {name: one.tokens for name, one in expected.items()}
    found = Forecast(measured, tokens, chip.hbm_gb * 1e9 / chip.devices)
    contexts = sorted(set(config.forecast.contexts))
    text = [
        *table.wrapped([_machine_line(machine, config.mesh)]),
        *forecast_table.lines(found, contexts),
        *(_beside_published(found, expected, contexts[0]) if chip.name == "v5p" else ()),
        "",
        *table.wrapped(f"acceptance of {name}: {one.source}" for name, one in expected.items()),
    ]
    print("\n".join(text), flush=True)
    if directory:
        content = forecast_table.to_json(found, contexts)
        content |= {"acceptance": {name: one.source for name, one in expected.items()}}
        _write_forecast(command, directory, content, _plots(found, contexts))
    return found


def _shape(job: "Job", measured: Mapping[tuple[str, int], Any]):
    from dflash.measure import acceptance

    tree = getattr(job.drafter, "tree", None)
    rows = measured[job.strategy, job.batch].rows
    return acceptance.Shape(job.drafter.name, rows, tree and tree.budget)


def _machine_line(machine: "Machine", mesh: Any) -> str:
    from dflash.compiler import forecast_table

    axes = " × ".join(f"{axis} {size}" for axis, size in dataclasses.asdict(mesh).items())
    found = machine.topology
    name = f"{found.slices} × {found.name}" if found.slices > 1 else found.name
    return f"{name}, mesh {axes}; {forecast_table.LABEL}"


def _beside_published(
    found: Forecast, expected: Mapping[str, "Expected"], context: int
) -> list[str]:
    """What was published of a port to v5p, where its acceptance is what is assumed."""
    from dflash.measure import published

    for name, one in expected.items():
        rows = found.points[name, found.batches[0]].rows
        if one.published and one.longest == rows and found.batches[0] == 1:
            plain, own = (found.points[which, 1].cost(context) for which in (PLAIN, name))
            times = (
                published.Times(plain.roofline_ms, own.roofline_ms),
                published.Times(plain.cycles_ms, own.cycles_ms),
            )
            heading = f"{name}, batch 1, after {context:,} tokens"
            return ["", *published.beside(heading, one.tokens, *times)]
    return []


def _plots(found: Forecast, contexts: Sequence[int]) -> dict[str, bytes]:
    """Speed-ups over batches: on average by strategy, and by task with the best choice."""
    from dflash.compiler import forecast_table
    from dflash.measure import plots

    drawn = {}
    for context in contexts if found.tasks else ():
        words = {"x": "batch", "y": "speed-up over plain decoding", "note": forecast_table.LABEL}
        means = {name: [found.mean(name, batch, context) for batch in found.batches]
                 for name in found.tokens}  # fmt: skip
        best = {task: [(one := found.best(task, batch, context)) and one.speedup
                       for batch in found.batches] for task in found.tasks}  # fmt: skip
        for kind, title, curves in (
            ("strategies", f"Expected speed-up, mean over tasks, after {context:,} tokens", means),
            ("tasks", f"Expected speed-up, best choice, after {context:,} tokens", best),
        ):
            lines = [_line(name, found.batches, values) for name, values in curves.items()]
            drawn[f"expected_{kind}_{context}.png"] = plots.curves(
                [line for line in lines if line.places], title=title, even=1.0, log="x", **words
            )
    return drawn


def _line(name: str, batches: Sequence[int], values: Sequence[float | None]):
    from dflash.measure import plots

    points = [(batch, value) for batch, value in zip(batches, values, strict=True) if value]
    return plots.Line(name, [batch for batch, _ in points], [value for _, value in points])


def _write_forecast(
    command: cli.Command,
    directory: pathlib.Path,
    content: Mapping[str, Any],
    drawn: Mapping[str, bytes],
) -> None:
    """Writes forecast.json, config.yml and the plots to the work directory."""
    with files.explained(directory):
        directory.mkdir(parents=True, exist_ok=True)
        files.write_whole(directory / "forecast.json", json.dumps(content, indent=1))
        files.write_whole(directory / "config.yml", loader.to_yaml(command.config))
        for name, image in drawn.items():
            files.write_whole(directory / name, image)


def _write(command: cli.Command, found: dict[str, Any], points, kernels, complete: bool) -> None:
    """Writes compile.json and config.yml to the work directory."""
    from dflash.compiler import curve

    content = {
        "complete": complete,
        **found,
        "rows": curve.to_json(points),
        "kernels": {
            name: [dataclasses.asdict(part) for part in parts] for name, parts in kernels.items()
        },
    }
    directory = paths.to_path(command.workdir)
    with files.explained(directory):
        directory.mkdir(parents=True, exist_ok=True)
        files.write_whole(directory / "compile.json", json.dumps(content, indent=2))
        files.write_whole(directory / "config.yml", loader.to_yaml(command.config))


if __name__ == "__main__":
    main()
