"""From a target to its drafter: python -m dflash.distill CONFIG [key=value ...] --workdir DIR.

The target answers questions, a drafter is trained on the answers, measured through the decode
engine, and exported with a model card. The same command on the same directory continues where the
last one ended, however it ended. Exit status as that of `dflash.train`.
"""

from dflash import cli, errors
from dflash.config import distill_schema

DESCRIPTION = (
    "Makes a drafter for a target: the target answers questions, a drafter is trained on the "
    "answers, measured against decoding without it, and exported to DIR/drafter. The same command "
    "continues where an earlier one ended."
)


def main(argv: list[str] | None = None) -> None:
    """The command; see `python -m dflash.distill --help`."""
    cli.run(
        _distill,
        name="dflash.distill",
        schema=distill_schema.DistillRun,
        description=DESCRIPTION,
        argv=argv,
    )


def _distill(command: cli.Command) -> int:
    # jax is imported here, after the config has been validated.
    from dflash.distillation import plan, stages
    from dflash.parallel import distributed
    from dflash.runs import dates

    distributed.initialize(command.coordinator_address, command.num_processes, command.process_id)
    if command.dry_run:
        print("\n".join(plan.make(command.config, answers=stages.ANSWERS, dry=True)))
        return 0
    if command.workdir is None:
        raise errors.ConfigError("--workdir: required: where answers, checkpoints and weights go")
    date = dates.find(command.workdir)
    with stages.open_directory(command.workdir, command.config, date) as directory:
        return stages.run(command.config, directory, date)


if __name__ == "__main__":
    main()
