"""Runs a config over a grid of values: dflash sweep CONFIG [key=value ...] --workdir DIR.

The values come from the config's `sweep:` block; see dflash/config/sweep_points.py. The same
command on the same directory continues where the last one ended.
"""

import contextlib

from absl import flags

from dflash import errors
from dflash.cli import subcommand as cli
from dflash.config import registry
from dflash.config import sweep_points as sweeps
from dflash.storage import paths


def _define_flags(values: flags.FlagValues) -> None:
    flags.DEFINE_integer(
        "index",
        None,
        "Run only this point, counted from 0, such as one per host.",
        lower_bound=0,
        flag_values=values,
    )


SUBCOMMAND = cli.Subcommand(
    "sweep",
    "Runs a config once for every combination of values in its `sweep:` block, and writes one "
    "table, sweep.csv, to --workdir. Finished points are skipped.",
    examples=(
        "dflash sweep configs/sweeps/block_size.yml --workdir runs/block_size",
        "dflash sweep configs/sweeps/block_size.yml --dry_run    # lists the points",
        "dflash sweep configs/sweeps/block_size.yml --shard 3/8 --workdir w",
        "dflash sweep configs/tiny_dflash.yml sweep.zip.decode.seed=[1,2] --workdir w",
    ),
    schema=tuple(registry.load(entry.schema) for entry in registry.RUNS.values()),
    load=sweeps.load,
    configs=lambda sweep: (point.config for point in sweep.points.values()),
    shared=("workdir", "dry_run", "print_config", "shard", "compilation_cache"),
    define_flags=_define_flags,
    statuses="1 also if some points failed",
)


def _sweep(command: cli.Command) -> int:
    sweep: sweeps.Sweep = command.config
    if command.dry_run:
        print("\n".join(f"{index:>4}  {name}" for index, name in enumerate(sweep.points)))
        return 0
    if command.shard is not None and command.flags["index"] is not None:
        raise errors.ConfigError("--index, --shard: exclude each other; give only one")
    if command.workdir is None:
        raise errors.ConfigError("--workdir: required, for the points and their table")
    # jax is imported here, after all points have been validated.
    from dflash.runs import shards
    from dflash.runs import sweeps as driver
    from dflash.runs.display import Display
    from dflash.storage import files

    kind = registry.load(registry.RUNS[sweep.run].implementation)
    directory = paths.to_path(command.workdir)
    with contextlib.closing(Display(stream=False)) as display:
        runner = kind(display)
        outcome = driver.run(
            sweep,
            runner,
            directory,
            display,
            index=command.flags["index"],
            shard=command.shard or shards.WHOLE,
        )
        columns = driver.columns(runner, outcome.rows.values())
        if outcome.rows:
            keys = sum(map(len, sweep.axes))
            display.note(
                f"{directory / driver.TABLE} has all figures; a sweep draws no plots, but "
                "experiments/heat_maps.py of the repository does"
            )
            display.table(driver.table(sweep, columns, outcome.rows), keys)
        with files.explained(directory):
            for name in runner.finish(sweep, outcome.rows, directory):
                display.note(f"written: {name}")
        unfinished = [name for name in sweep.points if name not in outcome.rows]
        if command.shard is not None and unfinished:
            display.note(
                f"not finished yet: {len(unfinished)} of {len(sweep.points)} points: "
                f"{unfinished[0]}, …"
            )
        for name, reason in outcome.failed.items():
            display.note(f"failed: {name}: {reason}")
    return 1 if outcome.failed else 0


main = cli.entry_point(SUBCOMMAND, _sweep)

if __name__ == "__main__":
    main()
