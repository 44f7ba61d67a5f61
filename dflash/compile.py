"""Compiles a run for TPUs that need not be present: dflash compile CONFIG tpu.topology=…"""

import contextlib
import dataclasses
import json
import os
import pathlib
import sys
import tempfile
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from absl import flags

from dflash import cli
from dflash.config import loader, tpu_schema

if TYPE_CHECKING:
    from dflash.compiler.report import Report

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


SUBCOMMAND = cli.Subcommand(
    "compile",
    "Compiles the programs of a decoding or training config for a TPU topology, on any Linux host, "
    "and reports what the compiler says of memory, time, copies and collectives.",
    examples=(
        "dflash compile configs/qwen3_4b_dflash.yml tpu.topology=v5e:1x1",
        "dflash compile configs/qwen3_4b_dflash.yml tpu.topology=v5e:1x1 --rows 1,16",
        "dflash compile configs/train/qwen3_4b_dflash.yml mesh.fsdp=4 \\",
        "    tpu.topology=v5p:2x2x1",
    ),
    schema=(tpu_schema.CompileDecode, tpu_schema.CompileTrain),
    shared=("workdir", "print_config", "compilation_cache"),
    define_flags=_define_flags,
    statuses="3: the run does not fit, or passes tpu.max_hbm_gb or tpu.max_cycle_ms",
)


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """The command; see `dflash compile --help`."""
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
      config: a YAML file.
      *overrides: `key=value`, such as "tpu.topology=v5p:2x2x1".
      workdir, rows, kernels: as the flags of these names.
    Raises:
      UserError: what the command would end with.
    """
    flags_given = {"workdir": workdir, "rows": rows, "kernels": kernels}
    return _found(cli.parse(SUBCOMMAND, config, *overrides, **flags_given))


def _compile(command: cli.Command) -> int:
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
    from dflash.compiler import bundles, curve, report, session, table
    from dflash.runs.display import Display

    display = Display()

    def keep(found: report.Report, points=(), kernels=None, *, complete: bool = False) -> None:
        if command.workdir:
            _write(command, report.to_json(found), points, kernels or {}, complete)

    with display.progress("compiling", every_s=0) as progress:
        found = session.compile_run(command.config, progress, keep)
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


def _write(command: cli.Command, found: dict[str, Any], points, kernels, complete: bool) -> None:
    """Writes compile.json and config.yml to the work directory."""
    from dflash.compiler import curve
    from dflash.runs import files

    content = {
        "complete": complete,
        **found,
        "rows": curve.to_json(points),
        "kernels": {
            name: [dataclasses.asdict(part) for part in parts] for name, parts in kernels.items()
        },
    }
    directory = pathlib.Path(command.workdir).expanduser()
    with files.explained(directory):
        directory.mkdir(parents=True, exist_ok=True)
        files.write_whole(directory / "compile.json", json.dumps(content, indent=2))
        files.write_whole(directory / "config.yml", loader.to_yaml(command.config))


if __name__ == "__main__":
    main()
