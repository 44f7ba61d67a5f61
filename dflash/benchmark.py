"""Measures drafting strategies: dflash benchmark CONFIG [key=value ...] --workdir DIR."""

import os
from typing import Any

from absl import flags

from dflash.cli import subcommand as cli
from dflash.config import benchmark_schema


def _define_flags(values: flags.FlagValues) -> None:
    where = {"flag_values": values}
    flags.DEFINE_bool(
        "wide", False, "Print all figures, not only those that fit into 80 columns.", **where
    )
    flags.DEFINE_string(
        "trace",
        None,
        "Force the acceptance lengths recorded in this JSON file; short for trace=FILE.",
        **where,
    )
    flags.DEFINE_string(
        "acceptance",
        None,
        "Force acceptance lengths drawn from published histograms, such as math500,gsm8k, to time "
        "models without trained weights; short for acceptance=[…].",
        **where,
    )


def _overrides(values: flags.FlagValues) -> list[str]:
    trace = [] if values.trace is None else [f"trace={values.trace}"]
    return trace + ([] if values.acceptance is None else [f"acceptance=[{values.acceptance}]"])


SUBCOMMAND = cli.Subcommand(
    "benchmark",
    "Measures drafting strategies against plain decoding, in turns, on held-out prompts, and "
    "writes results.json, results.csv, plots and report.html to --workdir. With study.name=… it "
    "answers a single question instead, such as what verification costs.",
    examples=(
        "dflash benchmark configs/benchmark/tiny.yml --workdir runs/tiny_benchmark",
        "dflash benchmark configs/benchmark/tiny.yml tasks=math rounds=1",
        "dflash benchmark configs/benchmark/tiny.yml study.name=verify",
        "dflash benchmark configs/benchmark/qwen3_4b_trace.yml --acceptance math500",
    ),
    schema=benchmark_schema.BenchmarkRun,
    shared=cli.RUN_FLAGS,
    define_flags=_define_flags,
    overrides=_overrides,
)


def run(
    config: str | os.PathLike,
    *overrides: str,
    workdir: str | os.PathLike | None = None,
    profile_dir: str | os.PathLike | None = None,
    compilation_cache: str | None = None,
) -> dict[str, Any]:
    """Measures, as `dflash benchmark` does, and prints its table.

    The keyword arguments are the flags of these names.

    Args:
      config: Path of a YAML file, looked up as on the command line.
      *overrides: Overrides of the form `key=value`.
    Returns:
      The content of results.json, or of study.json; see docs/measuring.md.
    Raises:
      UserError: The command would exit with an error.
    """
    command = cli.parse(
        SUBCOMMAND,
        config,
        *overrides,
        workdir=workdir,
        profile_dir=profile_dir,
        compilation_cache=compilation_cache,
    )
    return _run(command)


def _benchmark(command: cli.Command) -> None:
    # jax is imported here, after the config has been validated.
    from dflash.measure import benchmark_run

    if command.dry_run:
        print("\n".join(benchmark_run.plan(command.config)))
    else:
        _run(command)


def _run(command: cli.Command) -> dict[str, Any]:
    from dflash.measure import benchmark_run

    return benchmark_run.run(
        command.config,
        workdir=command.workdir,
        profile_dir=command.profile_dir,
        wide=command.flags["wide"],
    )


main = cli.entry_point(SUBCOMMAND, _benchmark)

if __name__ == "__main__":
    main()
