"""Compiles a run for TPUs, without a TPU: dflash compile CONFIG [key=value ...] [--flags]."""

import os
import sys
from typing import TYPE_CHECKING

from dflash.cli import subcommand as cli
from dflash.config import tpu_schema

if TYPE_CHECKING:
    from dflash.compiler.report import CompileReport

_OVER_BUDGET = 3

SUBCOMMAND = cli.Subcommand(
    "compile",
    "Compiles the programs of a decoding or training config for a TPU topology, on any Linux host, "
    "and reports the compiler's estimates of memory, time, copies and collectives. It needs "
    "pip install 'dflash-jax[tpu]'.",
    examples=(
        "dflash compile configs/qwen3_4b_dflash.yml tpu.topology=v5e:1x1",
        "dflash compile configs/train/qwen3_4b_dflash.yml mesh.fsdp=4 \\",
        "    tpu.topology=v5p:2x2x1",
    ),
    schema=(tpu_schema.CompileDecode, tpu_schema.CompileTrain),
    shared=("workdir", "print_config", "compilation_cache"),
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


def _compile(command: cli.Command) -> int:
    exceeded = _report(command).exceeded_budgets(command.config.tpu)
    for line in exceeded:
        print(f"over budget: {line}", file=sys.stderr)
    return _OVER_BUDGET if exceeded else 0


def _report(command: cli.Command) -> "CompileReport":
    # jax is imported here, after the config has been validated.
    from dflash.compiler import compile_run

    return compile_run.run(command.config, workdir=command.workdir)


main = cli.entry_point(SUBCOMMAND, _compile)

if __name__ == "__main__":
    main()
