"""The work directory of a training run: its files, and which keys a continued run may change.

config.yml        the resolved config of the latest start
date.txt          the date of the first start, for chat templates that print it
checkpoints/      the training state: the last few, and the best
damaged/          checkpoints with a wrong checksum or a missing file
metrics.jsonl     a line per logged step and per evaluation
tensorboard/      the same for TensorBoard
features/         the target's features, with train.features=cached
hf/               the exported weights: the best, or the last if there were no evaluations
"""

import datetime
import os
import pathlib

import jax

from dflash.config import loader, train_schema
from dflash.config.train_schema import TrainRun
from dflash.parallel import agreement
from dflash.runs import dates
from dflash.runs.directory import RunDirectory

CHECKPOINTS, METRICS = "checkpoints", "metrics.jsonl"
TENSORBOARD, FEATURES, EXPORT = "tensorboard", "features", "hf"
_VERSION = "2:"  # of the way in which an identity is computed


def open_directory(path: str | os.PathLike, config: TrainRun, date: datetime.date) -> RunDirectory:
    """Takes the work directory of a training run; all processes return once the first has it.

    Args:
      path: the directory; made if it is missing.
      config: the run's config.
      date: the run's date, kept for later starts; see `dates.find`.
    Raises:
      WorkdirError: it cannot be written, is in use by another run, or holds checkpoints of a run
        with other values of keys that must not change.
    """
    directory = RunDirectory(
        path,
        config,
        is_used=_has_checkpoints,
        may_change=train_schema.is_free,
        take=jax.process_index() == 0,
    )
    if jax.process_index() == 0:
        directory.write(dates.FILE, f"{date}\n")
    agreement.barrier("work directory taken")
    return directory


def identity(config: TrainRun) -> str:
    """A hash of what a continued run must not change; saved with each checkpoint.

    It covers the values that differ from their defaults, so a new key changes no identity.
    """
    flat = loader.flatten(loader.non_defaults(config))
    fixed = {key: value for key, value in flat if not train_schema.is_free(key)}
    return _VERSION + loader.digest(fixed)


def same_run(saved: str | None, config: TrainRun) -> bool:
    """Whether a checkpoint with this identity belongs to a run of `config`.

    The first version hashed every key, defaults included. Its identities have no version in front
    and cannot be compared; the directory's config.yml has been.
    """
    return saved is not None and (not saved.startswith(_VERSION) or saved == identity(config))


def _has_checkpoints(directory: pathlib.Path) -> bool:
    checkpoints = directory / CHECKPOINTS
    return checkpoints.is_dir() and any(one.name.isdecimal() for one in checkpoints.iterdir())
