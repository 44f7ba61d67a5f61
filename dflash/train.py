"""Trains a target or a drafter: dflash train CONFIG [key=value ...] --workdir DIR.

The same command on the same directory continues where the last one ended, however it ended. Exit
status: 0 when all steps are done; 143 after SIGTERM and 130 after SIGINT, with the state saved; 1
if numbers are not finite or files cannot be written; 2 for an unusable config or input.
"""

import contextlib
from collections.abc import Sequence
from typing import NoReturn

from dflash import cli, errors
from dflash.config import train_schema

SUBCOMMAND = cli.Subcommand(
    "train",
    "Trains a target from scratch, or a drafter against a frozen target, and writes weights for "
    "decoding to DIR/hf. The same command continues where an earlier one ended.",
    examples=(
        "dflash train configs/train/qwen3_4b_dflash.yml --dry_run mesh.fsdp=8",
        "dflash train configs/train/qwen3_4b_dflash.yml mesh.fsdp=8 --workdir w",
        "dflash train configs/train/tiny_dflash.yml --workdir w data.files=[] \\",
        "    target.checkpoint=assets/tiny_target data.mixture.jsonl=0    # on a laptop",
    ),
    schema=train_schema.TrainRun,
    shared=cli.RUN_FLAGS,
    statuses="143: SIGTERM, with the state saved, as after 130",
)


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """The command; see `dflash train --help`."""
    cli.run(SUBCOMMAND, _train, argv)


def _train(command: cli.Command) -> int:
    # jax is imported here, after the config has been validated.
    import jax

    from dflash.offline.evaluation import DraftingTest
    from dflash.parallel import distributed
    from dflash.runs import dates
    from dflash.training import job as jobs
    from dflash.training import rundir, session

    distributed.initialize(command.coordinator_address, command.num_processes, command.process_id)
    # A dry run touches no device, so it asks no other process for the date.
    date = None if command.dry_run else dates.find(command.workdir)
    job = jobs.prepare(command.config, date=date, dry=command.dry_run)
    if command.dry_run:
        print("\n".join(job.plan().lines()))
        return 0
    if command.workdir is None:
        raise errors.ConfigError("--workdir: required: where checkpoints and weights go")
    profile = command.profile_dir
    with (
        rundir.open_directory(command.workdir, command.config, date) as directory,
        jax.profiler.trace(profile) if profile else contextlib.nullcontext(),
    ):
        return session.run(job, directory, job.drafting_test(DraftingTest)).exit_status


if __name__ == "__main__":
    main()
