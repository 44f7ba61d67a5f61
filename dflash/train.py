"""Trains a target or a drafter: python -m dflash.train CONFIG [key=value ...] --workdir DIR.

The same command on the same directory goes on where the last one ended, however it ended. Exit
status: 0 when all steps are done; 143 after SIGTERM and 130 after SIGINT, with the state saved; 1
when the numbers or the disk give out; 2 for an unusable config or input.
"""

import contextlib

from dflash import cli, errors
from dflash.config import train_schema

DESCRIPTION = (
    "Trains a target from scratch, or a drafter against a frozen target, and leaves weights that "
    "decode can use in DIR/hf. The same command goes on where an earlier one ended."
)


def main(argv: list[str] | None = None) -> None:
    """The command; see `python -m dflash.train --help`."""
    cli.run(
        _train,
        name="dflash.train",
        schema=train_schema.TrainRun,
        description=DESCRIPTION,
        argv=argv,
    )


def _train(command: cli.Command) -> int:
    # jax is imported here, after the config has been found good.
    import jax

    from dflash.parallel import distributed
    from dflash.training import job as jobs
    from dflash.training import rundir, session

    distributed.initialize(command.coordinator_address, command.num_processes, command.process_id)
    job = jobs.prepare(command.config, dry=command.dry_run)
    if command.dry_run:
        print("\n".join(job.plan().lines()))
        return 0
    if command.workdir is None:
        raise errors.ConfigError("--workdir: required: where checkpoints and weights go")
    profile = command.profile_dir
    with (
        rundir.open_directory(command.workdir, command.config) as directory,
        jax.profiler.trace(profile) if profile else contextlib.nullcontext(),
    ):
        return session.run(job, directory, _drafting_test(job)).exit_status


def _drafting_test(job):
    """Measures τ on held-out prompts through the decode engine; None if nothing drafts."""
    from dflash.offline.evaluation import DraftingTest

    wanted = job.config.evaluation
    if not wanted.prompts or not job.task.drafts:
        return None
    return DraftingTest(
        job.task.target,
        job.task.working,
        job.config.evaluation_decode,
        job.held_out_prompts(),
        stop_ids=job.task.target.arch.eos_token_id,
    )


if __name__ == "__main__":
    main()
