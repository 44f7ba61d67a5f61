"""The work directory of a training run: whose it is, and what a continued run may change.

config.yml        the resolved config of the latest start
checkpoints/      the training state, last few and best
damaged/          checkpoints that could not be restored, set aside
metrics.jsonl     a line per logged step and per evaluation
tensorboard/      the same for TensorBoard
features/         the target's features, with train.features=cached
hf/               the exported weights: the best evaluated ones, or the last
"""

import hashlib
import json
import os
import pathlib

import jax

from dflash import errors
from dflash.config import loader, train_schema
from dflash.config.train_schema import TrainRun
from dflash.runs import directories

CHECKPOINTS, METRICS = "checkpoints", "metrics.jsonl"
TENSORBOARD, FEATURES, EXPORT = "tensorboard", "features", "hf"
_LOCK = ".lock"


class RunDirectory:
    """A work directory that this run holds alone, until it is closed."""

    def __init__(self, directory: str | os.PathLike, config: TrainRun):
        """Takes the directory, and makes it where it is missing.

        Raises:
          WorkdirError: it cannot be written, is in use by another run, or holds checkpoints of a
            run that differs in what matters.
        """
        self.path = pathlib.Path(directory).expanduser().absolute()
        self.identity = identity(config)
        self._descriptor = -1
        if jax.process_index() == 0:
            with directories.explained(self.path):
                self.path.mkdir(parents=True, exist_ok=True)
                self._descriptor = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT, 0o666)
                try:
                    directories.lock(self.path, self._descriptor)
                    self._check(config)
                    directories.write_whole(self.path / directories.CONFIG, loader.to_yaml(config))
                except BaseException:
                    self.close()
                    raise
        if jax.process_count() > 1:
            from jax.experimental import multihost_utils

            multihost_utils.sync_global_devices("work directory taken")

    def close(self) -> None:
        """Lets the next run have the directory."""
        if self._descriptor >= 0:
            os.close(self._descriptor)  # and with it goes the lock
            self._descriptor = -1

    def __enter__(self):
        return self

    def __exit__(self, *unused):
        self.close()

    def _check(self, config: TrainRun) -> None:
        """Compares this run's config with that of the checkpoints, in the keys that matter."""
        checkpoints = self.path / CHECKPOINTS
        if not checkpoints.is_dir() or not any(p.name.isdecimal() for p in checkpoints.iterdir()):
            return  # nothing was learned here yet
        if not directories.check_config(self.path, loader.to_yaml(config), _matters):
            raise errors.WorkdirError(
                f"{self.path / directories.CONFIG}: missing, so nobody knows what the checkpoints "
                "are of: use another --workdir"
            )


def identity(config: TrainRun) -> str:
    """Twelve hex digits over what a continued run must not change."""
    flat = directories.flatten(loader.to_dict(config))
    content = {key: value for key, value in flat if _matters(key)}
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:12]


def _matters(key: str) -> bool:
    """Whether a continued run must not change the value of a dotted key."""
    return not train_schema.is_free(key)
