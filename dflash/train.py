"""Trains a target or a drafter: dflash train CONFIG [key=value ...] --workdir DIR.

The same command on the same directory continues where the last one ended, however it ended. Exit
status: 0 when all steps are done; 143 after SIGTERM and 130 after SIGINT, with the state saved; 1
if numbers are not finite or files cannot be written; 2 for an unusable config or input.
"""

import dataclasses
import os
import pathlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dflash import errors
from dflash.cli import subcommand as cli
from dflash.config import train_schema
from dflash.storage import paths

if TYPE_CHECKING:
    from dflash.training.trainer import TrainOutcome

SUBCOMMAND = cli.Subcommand(
    "train",
    "Trains a target from scratch, or a drafter against a frozen target, and writes weights for "
    "decoding to DIR/hf. The same command continues where an earlier one ended.",
    examples=(
        "dflash train configs/train/qwen3_4b_dflash.yml --dry_run mesh.fsdp=8",
        "dflash train configs/train/qwen3_4b_dflash.yml mesh.fsdp=8 --workdir w",
        "dflash train configs/train/dflash2.yml target.checkpoint=assets/tiny_target \\",
        "    data.files=answers.jsonl train.dtype=float32 --workdir w    # on a laptop",
    ),
    schema=train_schema.TrainRun,
    shared=cli.RUN_FLAGS,
    statuses="143: SIGTERM, with the state saved, as after 130",
)


@dataclasses.dataclass(frozen=True)
class Trained:
    """Result of a training run.

    Attributes:
      weights: Directory of the exported weights, which `dflash.LLM` reads.
      step: Number of finished steps.
      best: {"goal", "evaluation", "step", "score"} of the best evaluation; None without any.
      finished: All steps are done. Otherwise a signal stopped the run, and the same call continues
        it.
    """

    weights: pathlib.Path
    step: int
    best: Mapping[str, Any] | None
    finished: bool


def run(
    config: str | os.PathLike,
    *overrides: str,
    workdir: str | os.PathLike,
    profile_dir: str | os.PathLike | None = None,
    compilation_cache: str | None = None,
) -> Trained:
    """Trains or continues to train, as `dflash train` does.

    The keyword arguments are the flags of these names.

    Args:
      config: Path of a YAML file, looked up as on the command line.
      *overrides: Overrides of the form `key=value`.
    Raises:
      UserError: The command would exit with an error.
    """
    from dflash.training import rundir

    command = cli.parse(
        SUBCOMMAND,
        config,
        *overrides,
        workdir=workdir,
        profile_dir=profile_dir,
        compilation_cache=compilation_cache,
    )
    outcome = _outcome(command)
    return Trained(
        weights=paths.to_path(workdir) / rundir.EXPORT,
        step=outcome.step,
        best=outcome.best,
        finished=outcome.exit_status == 0,
    )


def _train(command: cli.Command) -> int:
    # jax is imported here, after the config has been validated.
    from dflash.training import train_job

    if command.dry_run:
        # A plan runs in one process without devices, so it cannot ask others for the date.
        print("\n".join(train_job.prepare(command.config, date=None, dry=True).plan().lines()))
        return 0
    return _outcome(command).exit_status


def _outcome(command: cli.Command) -> "TrainOutcome":
    """Trains, from scratch or from the work directory's newest checkpoint."""
    from dflash.offline.evaluation import DraftingTest
    from dflash.runs import dates, frame
    from dflash.training import rundir, train_job, train_run

    date = dates.find(command.workdir)
    job = train_job.prepare(command.config, date=date)
    if command.workdir is None:
        raise errors.ConfigError("--workdir: required, for checkpoints and weights")
    directory = rundir.open_directory(command.workdir, command.config, date)
    with frame.open_run(directory, profile_dir=command.profile_dir):
        return train_run.run(job, directory, job.drafting_test(DraftingTest))


main = cli.entry_point(SUBCOMMAND, _train)

if __name__ == "__main__":
    main()
