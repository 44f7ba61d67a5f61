"""The target's features of training rows, computed once and kept in files.

A file has the features [T, C·D] and the hidden states [T, D] of one packed row side by side, in the
compute dtype. Its name is a hash of the row, and that of its directory a hash of the target and of
whatever else the values depend on, so runs with other data or settings can share the files.
"""

import hashlib
import pathlib
from typing import Any

import jax
import numpy as np

from dflash import errors
from dflash.checkpoints import checkpoint
from dflash.config import loader
from dflash.storage import files, paths
from dflash.training import step as steps_lib
from dflash.training.state import Params
from dflash.training.tasks import DrafterTask
from dflash.training.trainer import BatchIterator


class KeptFeatures:
    """Batches with the target's features and, if the loss reads them, its hidden states."""

    def __init__(self, batches: BatchIterator, task: DrafterTask, frozen: Params):
        """Creates the directory of the files.

        Raises:
          ConfigError: There are several processes, which may lack different rows.
          WorkdirError: The directory cannot be created.
        """
        if jax.process_count() > 1:
            raise errors.ConfigError("train.keep_features: one process only; leave it out")
        self._batches, self._task, self._frozen = batches, task, frozen
        self._compute = steps_lib.make_feature_step(task.features, dtype=task.dtype)
        self._directory = paths.to_path(task.config.train.keep_features) / _identity(task)
        with files.explained(self._directory):
            self._directory.mkdir(parents=True, exist_ok=True)

    def __next__(self) -> dict[str, np.ndarray]:
        batch = next(self._batches)
        names = [_name(batch, row) for row in range(len(batch["tokens"]))]
        kept = [self._read(name, batch["tokens"].shape[1]) for name in names]
        if any(rows is None for rows in kept):
            kept = self._keep(batch, names)
        widths = self._task.feature_widths
        parts = np.split(np.stack(kept), np.cumsum([*widths.values()])[:-1], axis=-1)
        return batch | dict(zip(widths, parts, strict=True))

    def state(self) -> Any:
        """Returns the position of the next batch, as JSON values."""
        return self._batches.state()

    def _read(self, name: str, length: int) -> np.ndarray | None:
        """Returns the values [T, C·D + D] of a row, or None if there is no complete file."""
        path = self._directory / name
        size = length * self._task.feature_bytes
        if not path.is_file() or path.stat().st_size != size:
            return None
        return files.view(path, 0, size).view(self._task.dtype).reshape(length, -1)

    def _keep(self, batch: dict[str, np.ndarray], names: list[str]) -> np.ndarray:
        """Computes the values of all rows of a batch, and writes their files."""
        placed = steps_lib.place(batch, self._task.learner.sharding, len(names))
        outputs = jax.device_get(self._compute(self._frozen, placed))
        values = np.concatenate([outputs[name] for name in self._task.feature_widths], axis=-1)
        for name, rows in zip(names, values, strict=True):
            with files.explained(self._directory / name):
                files.write_whole(self._directory / name, rows.tobytes())
        return values


def _identity(task: DrafterTask) -> str:
    """Returns a hash of what the values of a row depend on, besides its tokens."""
    config, directories = task.config.target, [task.target_source.directory]
    if config.adapter is not None:
        directories.append(checkpoint.find(config.adapter, download=False))
    weights = [_files(directory) for directory in directories if directory is not None]
    settings = list(task.working.feature_layers), task.feature_widths, str(task.dtype)
    return loader.digest([loader.non_defaults(config), weights, settings])


def _files(directory: pathlib.Path) -> list[Any]:
    """Returns what changes when a file of a checkpoint is written again, as JSON values."""
    stats = ((str(path), path.stat()) for path in directory.rglob("*") if path.is_file())
    return sorted([path, status.st_size, status.st_mtime_ns] for path, status in stats)


def _name(batch: dict[str, np.ndarray], row: int) -> str:
    digest = hashlib.sha256()
    for key in ("tokens", "positions", "segment_ids"):
        digest.update(np.ascontiguousarray(batch[key][row]).tobytes())
    return digest.hexdigest()[:32]
