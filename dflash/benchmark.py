"""Measures strategies on tasks: python -m dflash.benchmark CONFIG [key=value ...] --workdir DIR.

In addition to the common flags, --trace=FILE and --acceptance=NAME are short for trace=FILE and
acceptance=NAME: acceptance lengths are then forced, so that weights of any size can be timed.
"""

import contextlib
import sys

from absl import flags

from dflash import cli
from dflash.config import benchmark_schema

DESCRIPTION = (
    "Measures drafting strategies against plain decoding, on held-out prompts, in turns; writes "
    "results.json, results.csv, plots and report.html to --workdir. --trace=FILE takes acceptance "
    "lengths from a recording, --acceptance=NAME,NAME from published histograms."
)
_SHORTHANDS = ("trace", "acceptance")
_NEITHER = {"trace": "null", "acceptance": "[]"}


def main(argv: list[str] | None = None) -> None:
    """The command; see `python -m dflash.benchmark --help`."""
    cli.run(
        _benchmark,
        name="dflash.benchmark",
        schema=benchmark_schema.BenchmarkRun,
        description=DESCRIPTION,
        define_flags=_define_flags,
        argv=_as_overrides(sys.argv[1:] if argv is None else argv),
    )


def _define_flags(values: flags.FlagValues) -> None:
    flags.DEFINE_bool(
        "wide", False, "Print all figures, not only those of 80 columns.", flag_values=values
    )


def _as_overrides(argv: list[str]) -> list[str]:
    """Turns --trace FILE and --trace=FILE into trace=FILE, likewise --acceptance; at the end.

    If only one of the two is given, the other one is cleared in the config.
    """
    kept, given = [], {}
    arguments = iter(argv)
    for argument in arguments:
        flag, equals, value = argument.partition("=")
        name = flag.lstrip("-")
        if flag.startswith("-") and name in _SHORTHANDS:
            given[name] = value if equals else next(arguments, "")
        else:
            kept.append(argument)
    if "acceptance" in given:
        given["acceptance"] = f"[{given['acceptance']}]"
    overrides = (_NEITHER | given) if len(given) == 1 else given
    return kept + [f"{name}={value}" for name, value in overrides.items()]


def _benchmark(command: cli.Command) -> None:
    # jax is imported here, after the config has been validated.
    import jax

    from dflash.measure import bench as benches
    from dflash.measure import results, session
    from dflash.parallel import distributed
    from dflash.runs.display import Display

    if command.dry_run:
        print("\n".join(session.plan(command.config)))
        return
    distributed.initialize(command.coordinator_address, command.num_processes, command.process_id)
    first = jax.process_index() == 0
    display = Display() if first else Display.silent()
    where = command.workdir if first else None
    profile, wide = command.profile_dir, command.flags["wide"]
    with (
        results.open_directory(where, command.config) as directory,
        jax.profiler.trace(profile) if profile else contextlib.nullcontext(),
    ):
        if command.config.study is not None:
            session.study(command.config, directory, display, wide=wide)
        else:
            session.run(benches.prepare(command.config), directory, display, wide=wide)


if __name__ == "__main__":
    main()
