"""Compiles a run for TPUs, without a TPU: dflash compile CONFIG [key=value ...] [--flags]."""

import os
import sys
from typing import TYPE_CHECKING

from absl import flags

from dflash import errors
from dflash.cli import subcommand as cli
from dflash.config import tpu_schema

if TYPE_CHECKING:
    from dflash.compiler.forecast import Forecast
    from dflash.compiler.report import CompileReport

_OVER_BUDGET = 3


def _define_flags(values: flags.FlagValues) -> None:
    flags.DEFINE_bool(
        "forecast",
        False,
        "Report instead the cost of a cycle of each of the config's strategies, by batch and "
        "context; continues in --workdir.",
        flag_values=values,
    )


SUBCOMMAND = cli.Subcommand(
    "compile",
    "Compiles the programs of a decoding or training config for a TPU topology, on any Linux host, "
    "and reports the compiler's estimates of memory, time, copies and collectives. It needs "
    "pip install 'dflash-jax[tpu]'.",
    examples=(
        "dflash compile configs/qwen3_4b_dflash.yml tpu.topology=v5e:1x1",
        "dflash compile configs/train/qwen3_4b_dflash.yml mesh.fsdp=4 \\",
        "    tpu.topology=v5p:2x2x1",
        "dflash compile configs/forecast/qwen3_4b.yml --forecast --workdir w",
    ),
    schema=(tpu_schema.CompileDecode, tpu_schema.CompileTrain),
    shared=("workdir", "print_config", "compilation_cache"),
    define_flags=_define_flags,
    statuses="3: the run does not fit, or passes tpu.max_hbm_gb or tpu.max_cycle_ms",
)


def run(
    config: str | os.PathLike, *overrides: str, workdir: str | os.PathLike | None = None
) -> "CompileReport":
    """Compiles for a TPU, as `dflash compile` does, and prints the report.

    Args:
      config: Path of a YAML file, looked up as on the command line.
      *overrides: Overrides of the form `key=value`, such as "tpu.topology=v5p:2x2x1".
    Raises:
      UserError: The command would exit with an error.
    """
    return _report(cli.parse(SUBCOMMAND, config, *overrides, workdir=workdir))


def forecast(
    config: str | os.PathLike, *overrides: str, workdir: str | os.PathLike | None = None
) -> "Forecast":
    """Forecasts costs, as `dflash compile --forecast` does, and prints them.

    Args:
      config: Path of a YAML file, looked up as on the command line.
      *overrides: Overrides of the form `key=value`, such as "forecast.batches=[1,8]".
    Raises:
      UserError: The command would exit with an error.
    """
    flag_values = {"workdir": workdir, "forecast": True}
    return _forecast(cli.parse(SUBCOMMAND, config, *overrides, **flag_values))


def _compile(command: cli.Command) -> int:
    if command.flags["forecast"]:
        _forecast(command)
        return 0
    exceeded = _report(command).exceeded_budgets(command.config.tpu)
    for line in exceeded:
        print(f"over budget: {line}", file=sys.stderr)
    return _OVER_BUDGET if exceeded else 0


def _report(command: cli.Command) -> "CompileReport":
    # jax is imported here, after the config has been validated.
    from dflash.compiler import compile_run

    return compile_run.run(command.config, workdir=command.workdir)


def _forecast(command: cli.Command) -> "Forecast":
    if not isinstance(command.config, tpu_schema.CompileDecode):
        raise errors.ConfigError("--forecast: expected a decoding config, got a training config")
    # jax is imported here, after the config has been validated.
    from dflash.compiler import forecast_run

    return forecast_run.run(command.config, command.workdir)


main = cli.entry_point(SUBCOMMAND, _compile)

if __name__ == "__main__":
    main()
