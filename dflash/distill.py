"""Makes a drafter for a target: dflash distill CONFIG [key=value ...] --workdir DIR.

The target answers questions; a drafter is trained on the answers, measured in the decode engine,
and exported with a model card. The same command on the same directory continues where the last one
ended, however it ended. The exit statuses are those of `dflash train`.
"""

from dflash import errors
from dflash.cli import subcommand as cli
from dflash.config import distill_schema

SUBCOMMAND = cli.Subcommand(
    "distill",
    "Makes a drafter for a target: the target answers questions, a drafter is trained on the "
    "answers, measured against decoding without it, and exported to DIR/drafter. The same command "
    "continues where an earlier one ended.",
    examples=(
        "dflash distill configs/distill/qwen3_4b_dflash.yml answers.files=q.jsonl \\",
        "    --dry_run",
        "dflash distill configs/distill/dflash2.yml target.checkpoint=hf:org/model \\",
        "    answers.files=questions.jsonl --workdir runs/mine",
    ),
    schema=distill_schema.DistillRun,
    shared=cli.RUN_FLAGS,
    statuses="143: SIGTERM, with the state saved, as after 130",
)


def _distill(command: cli.Command) -> int:
    # jax is imported here, after the config has been validated.
    from dflash.distillation import distill_plan, stages
    from dflash.runs import dates, frame

    if command.dry_run:
        print("\n".join(distill_plan.make(command.config, answers=stages.ANSWERS, dry=True)))
        return 0
    if command.workdir is None:
        raise errors.ConfigError("--workdir: required, for answers, checkpoints and weights")
    date = dates.find(command.workdir)
    directory = stages.open_directory(command.workdir, command.config, date)
    with frame.open_run(directory) as display:
        return stages.run(command.config, directory, date, display)


main = cli.entry_point(SUBCOMMAND, _distill)

if __name__ == "__main__":
    main()
