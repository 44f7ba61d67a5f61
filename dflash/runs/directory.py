"""The work directory of a run: one run at a time, one config, whole files, clear failures.

config.yml      the resolved config of the latest run
.lock           held while a run has the directory, unless it is in a bucket

Everything else belongs to the command: records of prompts, checkpoints, tables.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from dflash import errors
from dflash.config import loader, strict_yaml
from dflash.runs.shards import Shard
from dflash.storage import files, paths

CONFIG = "config.yml"
_LOCK = ".lock"
_MAX_KEYS_SHOWN = 5
# The kernel may release the lock of a run that was killed a moment after its process is gone.
_PATIENCE_S = 2.0


class RunDirectory:
    """A work directory that this run holds alone until it is closed; without a path, nothing.

    Attributes:
      path: The directory; None for a run that leaves nothing.
      config_hash: `loader.config_hash` of the run's config.
    """

    def __init__(
        self,
        path: str | os.PathLike | None,
        config: Any,
        *,
        is_used: Callable[[pathlib.Path], bool],
        may_change: Callable[[str], bool] = lambda key: False,
        take: bool = True,
        shard: Shard | None = None,
    ):
        """Takes a directory for a run and makes it if it is missing.

        A directory that is used continues only with the same config; any other one gets this
        run's.

        Args:
          path: Where; `~` is the home directory.
          config: The run's resolved config, kept as config.yml.
          is_used: Whether a directory holds results that belong to the config beside them.
          may_change: Whether a continued run may have another value of a dotted key.
          take: False for processes that only read: the first process of a run holds the directory.
          shard: Of several runs that share the directory, which one; each holds its own part.
        Raises:
          WorkdirError: It cannot be written, is in use by another run, or belongs to another
            config.
        """
        self.path = None if path is None else paths.to_path(path)
        self.config_hash = loader.config_hash(config)
        self._held = contextlib.ExitStack()
        if self.path is None or not take:
            return
        with files.explained(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            lock = _LOCK if shard is None else f"{_LOCK}.{shard.index}-of-{shard.count}"
            try:
                self._held.enter_context(_locked(self.path, lock))
                self._held.enter_context(files.ended_in_order(self.path))
                _check(self.path, config, is_used(self.path), may_change)
                self.write(CONFIG, loader.to_yaml(config))
            except BaseException:
                self.close()
                raise

    def write(self, name: str, content: str | bytes) -> None:
        """Writes a file whole.

        Raises:
          WorkdirError: It cannot be written.
        """
        if self.path is not None:
            with files.explained(self.path / name):
                files.write_whole(self.path / name, content)

    def write_json(self, name: str, values: Mapping[str, Any]) -> None:
        """Writes values as JSON.

        Raises:
          WorkdirError: They cannot be written.
        """
        self.write(name, files.to_json(values))

    def close(self) -> None:
        """Releases the directory for the next run."""
        self._held.close()

    def __enter__(self):
        return self

    def __exit__(self, *unused):
        self.close()


def check_config(
    directory: pathlib.Path, config: Any, may_change: Callable[[str], bool] = lambda key: False
) -> bool:
    """Refuses a directory whose config.yml is another config; returns whether it has one.

    The stored config is read with today's schema: a key that it was written without has today's
    default.

    Args:
      directory: Where config.yml is looked for.
      config: The run's resolved config.
      may_change: Whether the value of a dotted key may differ.
    Raises:
      WorkdirError: The two differ, in keys that the message names; or config.yml is not a config
        of this kind of run.
    """
    path = directory / CONFIG
    if not path.exists():
        return False
    stored, here = (
        {key: value for key, value in loader.flatten(loader.to_dict(one)) if not may_change(key)}
        for one in (_read_config(path, type(config)), config)
    )
    differences = [
        f"{key}: {_show(stored, key)} there, {_show(here, key)} here"
        for key in {**stored, **here}
        if _show(stored, key) != _show(here, key)
    ]
    if len(differences) > _MAX_KEYS_SHOWN:
        differences[_MAX_KEYS_SHOWN:] = [f"{len(differences) - _MAX_KEYS_SHOWN} more"]
    if differences:
        raise another_config(directory, f" ({'; '.join(differences)})")
    return True


def another_config(directory: pathlib.Path, differences: str = "") -> errors.WorkdirError:
    """The error for a directory that belongs to another run."""
    return errors.WorkdirError(
        f"{directory}: belongs to a run of another config{differences}: "
        "use another --workdir, or delete this one"
    )


def _check(
    directory: pathlib.Path, config: Any, used: bool, may_change: Callable[[str], bool]
) -> None:
    if not used and _is_resolved(directory / CONFIG, type(config)):
        return  # of a run that left nothing else
    if not check_config(directory, config, may_change) and used:
        raise errors.WorkdirError(
            f"{directory / CONFIG}: missing, so the config of the results here is unknown: "
            "use another --workdir"
        )


def _read_config(path: pathlib.Path, schema: type) -> Any:
    """Reads the config of an earlier run, perhaps by an earlier version.

    Raises:
      WorkdirError: It does not fit today's schema, or is no config at all.
    """
    try:
        return loader.load(path, schema=schema)
    except errors.ConfigError as error:
        more = f" (and {len(error.problems) - 1} more)" if len(error.problems) > 1 else ""
        raise errors.WorkdirError(
            f"{error.problems[0]}{more}; the config of a run of another kind or version: "
            "use another --workdir, or the version that wrote it"
        ) from error


def _is_resolved(path: pathlib.Path, schema: type) -> bool:
    """Whether a run wrote a config.yml: every group stands there, unlike in a person's file."""
    if not path.exists():
        return False
    _read_config(path, schema)  # raises if another program wrote it
    node, _ = strict_yaml.parse(path.read_text(encoding="utf-8"), CONFIG)
    return {field.name for field in dataclasses.fields(schema)} <= set(node.value)


def _show(values: Mapping[str, Any], key: str) -> str:
    return json.dumps(values[key], default=str) if key in values else "unset"


@contextlib.contextmanager
def _locked(directory: pathlib.Path, name: str) -> Iterator[None]:
    """Keeps other runs out of a directory by a file of it.

    Raises:
      WorkdirError: Another run has the directory.
    """
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
            os.close(descriptor)  # releases the lock too
