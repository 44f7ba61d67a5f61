"""Decodes prompts: python -m dflash.decode CONFIG [key=value ...] [--workdir DIR]."""

import contextlib
import sys

from dflash import cli
from dflash.config import schema

DESCRIPTION = (
    "Decodes prompts with a target and a drafting strategy, losslessly: in float32 the output is "
    "the target's own, token for token."
)


def main(argv: list[str] | None = None) -> None:
    """The command; see `python -m dflash.decode --help`."""
    cli.run(
        _decode, name="dflash.decode", schema=schema.DecodeRun, description=DESCRIPTION, argv=argv
    )


def _decode(command: cli.Command) -> None:
    # jax is imported here, after the config has been validated.
    from dflash.offline import job as jobs
    from dflash.offline import session
    from dflash.parallel import distributed
    from dflash.runs import dates

    distributed.initialize(command.coordinator_address, command.num_processes, command.process_id)
    # A dry run touches no device, so it asks no other process for the date.
    date = None if command.dry_run else dates.find(command.workdir)
    job = jobs.prepare(command.config, stdin=sys.stdin, dry=command.dry_run, date=date)
    if command.dry_run:
        print("\n".join(job.plan().lines()))
        return
    with (
        session.open_records(command.workdir, command.config, date) as records,
        contextlib.closing(session.open_display(stream=command.stream)) as display,
    ):
        session.run(job, records, display, profile_dir=command.profile_dir)


if __name__ == "__main__":
    main()
