"""Work directory of a run, locked by one run at a time and bound to one config.

    config.yml      resolved config of the latest run
    .lock           locked while a run uses the directory, unless it is in a bucket

All other files belong to the command: records of prompts, checkpoints, tables.
"""

import contextlib
import dataclasses
import datetime
import json
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from dflash import errors
from dflash.config import loader, strict_yaml
from dflash.parallel import agreement
from dflash.runs import dates
from dflash.runs.shards import Shard
from dflash.storage import files, hub, paths

CONFIG = "config.yml"
_LOCK = ".lock"
# Defaults of earlier versions, by key, whose runs continue without the key. If it does change the
# prompts or the data, the comparison of their token ids finds that.
_EARLIER_DEFAULTS = dict.fromkeys(("prompts.thinking", "data.thinking", "thinking"), False)
_MAX_KEYS_SHOWN = 5
# The kernel may release the lock of a killed run a moment after its process has disappeared.
_PATIENCE_S = 2.0


class RunDirectory(contextlib.AbstractContextManager):
    """Work directory that is locked until it is closed; does nothing without a path.

    Only the first process locks and writes the directory; the others may read it.

    Attributes:
      writes: This process writes to the directory.
    """

    def __init__(
        self,
        path: str | os.PathLike | None,
        config: Any,
        *,
        is_used: Callable[[pathlib.Path], bool],
        may_change: Callable[[str], bool] = lambda key: False,
        date: datetime.date | None = None,
        shard: Shard | None = None,
    ):
        """Creates the directory if it is missing, locks it, and checks and writes its config.

        All processes return once the first one holds the lock. A directory with results accepts
        only the config that they belong to.

        Args:
          path: Path of the directory; `~` is the home directory.
          config: The run's resolved config, stored as config.yml. There, checkpoints of the hub
            name the commit that the run reads, and a run that resumes must read the same.
          is_used: Returns whether a directory holds results that belong to its config.yml.
          may_change: Returns whether a resumed run may have another value of a dotted key.
          date: Date of the run, stored for later starts; see `dates.find`.
          shard: Shard of the run, which has a lock of its own; None for a run without shards.
        Raises:
          WorkdirError: The directory cannot be written, is in use by another run, or belongs to
            another config.
        """
        self.path = None if path is None else paths.to_path(path)
        self.config_hash = loader.config_hash(config)
        config = loader.pin_checkpoints(config)
        self._held = contextlib.ExitStack()
        self.writes = self.path is not None and jax.process_index() == 0
        if self.writes:
            lock = _LOCK if shard is None else f"{_LOCK}.{shard.index}-of-{shard.count}"
            with files.explained(self.path), contextlib.ExitStack() as locks:
                files.make_private(self.path)
                locks.enter_context(_locked(self.path, lock))
                locks.enter_context(files.ended_in_order(self.path))
                _check(self.path, config, is_used(self.path), may_change)
                self.write(CONFIG, loader.to_yaml(config))
                if date is not None:
                    self.write(dates.FILE, f"{date}\n")
                self._held = locks.pop_all()
        if self.path is not None:
            agreement.barrier("work directory taken")

    def write(self, name: str, content: str | bytes) -> None:
        """Writes a file atomically."""
        if self.writes:
            with files.explained(self.path / name):
                files.write_whole(self.path / name, content)

    def write_json(self, name: str, values: Mapping[str, Any]) -> None:
        """Writes values as a JSON file, atomically."""
        self.write(name, files.to_json(values))

    def close(self) -> None:
        """Releases the directory for the next run."""
        self._held.close()

    def __exit__(self, *unused):
        self.close()


def check_config(
    directory: pathlib.Path, config: Any, may_change: Callable[[str], bool] = lambda key: False
) -> bool:
    """Raises if a directory's config.yml differs from `config`; returns whether there is one.

    The stored config is read with the current schema, so that keys missing in it have the current
    defaults.

    Args:
      may_change: Returns whether the value of a dotted key may differ.
    Raises:
      WorkdirError: The configs differ, in keys that the message names; or config.yml is not a
        config of this kind of run.
    """
    path = directory / CONFIG
    if not path.exists():
        return False
    stored, here = (
        {key: value for key, value in loader.flatten(loader.to_dict(x)) if not may_change(key)}
        for x in (_read_config(path, type(config)), config)
    )
    differences = [
        f"{key}: {_show(stored, key)} there, {_show(here, key)} here"
        for key in {**stored, **here}
        if _show(stored, key) != _show(here, key)
        and not hub.name_the_same(stored.get(key), here.get(key))
        and not ((key, stored.get(key)) in _EARLIER_DEFAULTS.items() and here.get(key) is None)
    ]
    if len(differences) > _MAX_KEYS_SHOWN:
        differences[_MAX_KEYS_SHOWN:] = [f"{len(differences) - _MAX_KEYS_SHOWN} more"]
    if differences:
        raise another_config(directory, f" ({'; '.join(differences)})")
    return True


class AnotherConfigError(errors.WorkdirError):
    """A work directory belongs to a run with another config."""


def another_config(directory: pathlib.Path, differences: str = "") -> AnotherConfigError:
    """Returns the error for a directory that belongs to a run with another config."""
    return AnotherConfigError(
        f"{directory}: belongs to a run of another config{differences}: "
        "use another --workdir, or delete this one"
    )


def _check(
    directory: pathlib.Path, config: Any, used: bool, may_change: Callable[[str], bool]
) -> None:
    if not used and _is_resolved(directory / CONFIG, type(config)):
        return  # An earlier run wrote its config but no results.
    if not check_config(directory, config, may_change) and used:
        raise errors.WorkdirError(
            f"{directory / CONFIG}: missing, so the config of the results is unknown: use another "
            "--workdir"
        )


def _read_config(path: pathlib.Path, schema: type) -> Any:
    """Reads the config of an earlier run or version; raises WorkdirError if it is unusable."""
    try:
        return loader.load(path, schema=schema, earlier_run=True)
    except errors.ConfigError as error:
        more = f" (and {len(error.problems) - 1} more)" if len(error.problems) > 1 else ""
        raise errors.WorkdirError(
            f"{error.problems[0]}{more}; another command or version has written this config: "
            "use another --workdir, or the version that wrote it"
        ) from error


def _is_resolved(path: pathlib.Path, schema: type) -> bool:
    if not path.exists():
        return False
    _read_config(path, schema)  # Raise if the file is not a config of this kind of run.
    node, _ = strict_yaml.parse(path.read_text(encoding="utf-8"), CONFIG)
    return {field.name for field in dataclasses.fields(schema)} <= set(node.value)


def _show(values: Mapping[str, Any], key: str) -> str:
    return json.dumps(values[key], default=str) if key in values else "unset"


@contextlib.contextmanager
def _locked(directory: pathlib.Path, name: str) -> Iterator[None]:
    """Locks a directory by the file `name` in it."""
    try:
        descriptor = files.lock(directory / name, _PATIENCE_S)
    except BlockingIOError as error:
        raise errors.WorkdirError(
            f"{directory}: in use by another run: wait for it, or use another --workdir"
        ) from error
    try:
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)  # Closing the file releases the lock.
