"""Runs a config over a grid of values: python -m dflash.sweep CONFIG [key=value ...] --workdir DIR.

The config's `sweep:` block says which values; see dflash/config/sweep.py. The same command on the
same directory goes on where the last one ended. Exit status: 0 when every point is finished; 1 when
some have failed; 2 for a config that cannot be used, before anything has run.
"""

import contextlib
import pathlib

from absl import flags

from dflash import cli, errors, registry
from dflash.config import sweep as sweeps

DESCRIPTION = (
    "Runs a config once for every combination of values in its `sweep:` block, and leaves one "
    "table, sweep.csv, and a heat map of each main figure in --workdir. Finished points are "
    "skipped."
)


def main(argv: list[str] | None = None) -> None:
    """The command; see `python -m dflash.sweep --help`."""
    cli.run(
        _sweep,
        name="dflash.sweep",
        load=sweeps.load,
        define_flags=_define_flags,
        description=DESCRIPTION,
        argv=argv,
    )


def _define_flags(values: flags.FlagValues) -> None:
    flags.DEFINE_integer(
        "index",
        None,
        "Run this point alone, from 0: one host each.",
        lower_bound=0,
        flag_values=values,
    )


def _sweep(command: cli.Command) -> int:
    sweep: sweeps.Sweep = command.config
    if command.coordinator_address is not None:
        raise errors.ConfigError(
            "--coordinator_address: a point runs in one process; give each host its own --index"
        )
    if command.dry_run:
        print("\n".join(f"{index:>4}  {name}" for index, name in enumerate(sweep.points)))
        return 0
    if command.workdir is None:
        raise errors.ConfigError("--workdir: required: where points and their table go")
    # jax is imported here, after all points have been found good.
    from dflash.runs import files, heat_map
    from dflash.runs import sweeps as driver
    from dflash.runs.display import Display

    kind = registry.load(registry.RUNS[sweep.run].implementation)
    directory = pathlib.Path(command.workdir).expanduser()
    with contextlib.closing(Display(stream=False)) as display:
        runner = kind(display)
        outcome = driver.run(sweep, runner, directory, display, index=command.flags["index"])
        columns = driver.columns(runner, outcome.rows.values())
        if outcome.rows:
            display.table(driver.table(sweep, columns, outcome.rows))
        with files.explained(directory):
            for metric in columns:
                heat_map.draw(sweep, metric, outcome.rows, directory / f"{metric}.png")
        for name, reason in outcome.failed.items():
            display.note(f"failed: {name}: {reason}")
    return 1 if outcome.failed else 0


if __name__ == "__main__":
    main()
