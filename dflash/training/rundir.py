"""Work directory of a training run: its files, and which keys a resumed run may change.

config.yml        resolved config of the latest start
date.txt          date of the first start, for chat templates that print it
checkpoints/      training states of the last few checkpoints and of the best one
damaged/          checkpoints with a wrong checksum or a missing file
metrics.jsonl     one line per logged step and per evaluation
tensorboard/      the same metrics for TensorBoard
hf/               exported weights: the best, or the last without evaluations
"""

import datetime
import os
import pathlib

from dflash import errors
from dflash.config import loader, train_schema
from dflash.config.train_schema import TrainRun
from dflash.runs.directory import AnotherConfigError, RunDirectory

CHECKPOINTS, METRICS = "checkpoints", "metrics.jsonl"
TENSORBOARD, EXPORT = "tensorboard", "hf"
_VERSION = "2:"  # Version of the rule by which `identity` is computed.


def open_directory(path: str | os.PathLike, config: TrainRun, date: datetime.date) -> RunDirectory:
    """Opens and locks the work directory of a training run; see `RunDirectory` for the errors."""
    try:
        return RunDirectory(
            path, config, is_used=_has_checkpoints, may_change=train_schema.is_free, date=date
        )
    except AnotherConfigError as error:
        weights = f"{config.task}.checkpoint={path}/{EXPORT}"
        advice = f"to train on from its weights, give {weights} as well"
        raise errors.WorkdirError(f"{error}; {advice}") from error


def identity(config: TrainRun) -> str:
    """Returns a hash of the keys that a resumed run must not change, for its checkpoints.

    It covers only values that differ from their defaults, so that adding a config key to the
    schema changes no identity.
    """
    flat = loader.flatten(loader.non_defaults(config))
    fixed = {key: value for key, value in flat if not train_schema.is_free(key)}
    return _VERSION + loader.digest(fixed)


def same_run(saved: str | None, config: TrainRun) -> bool:
    """Returns whether a checkpoint with this identity belongs to a run of `config`.

    The first version of identities, which has no version prefix, hashed every key, defaults
    included. It cannot be compared and is accepted, since config.yml has been compared already.
    """
    return saved is not None and (not saved.startswith(_VERSION) or saved == identity(config))


def _has_checkpoints(directory: pathlib.Path) -> bool:
    checkpoints = directory / CHECKPOINTS
    return checkpoints.is_dir() and any(path.name.isdecimal() for path in checkpoints.iterdir())
