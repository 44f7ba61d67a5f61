"""What every work directory needs: one run at a time, whole files, one config, clear failures."""

import contextlib
import fcntl
import json
import os
import pathlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import yaml

from dflash import errors

CONFIG = "config.yml"  # the resolved config of the run that has the directory
MAX_KEYS_SHOWN = 5
# A run that was killed a moment ago may not have let go of its lock yet.
PATIENCE_S = 2.0


def lock(directory: pathlib.Path, descriptor: int) -> None:
    """Keeps other runs out of `directory` for as long as one of its files, `descriptor`, is open.

    Raises:
      WorkdirError: another run has the directory.
    """
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError as error:
            if time.monotonic() > deadline:
                raise errors.WorkdirError(
                    f"{directory}: in use by another run: wait for it, or use another --workdir"
                ) from error
        except OSError:
            return  # some network file systems have no locks; the run can do without
        time.sleep(PATIENCE_S / 20)


@contextlib.contextmanager
def waiting_lock(path: pathlib.Path) -> Iterator[None]:
    """Holds a lock file for a moment; others that want it wait.

    Raises:
      OSError: it cannot be made.
    """
    with path.open("w") as file:
        with contextlib.suppress(OSError):  # some network file systems have no locks
            fcntl.flock(file, fcntl.LOCK_EX)  # let go when the file is closed, by a kill too
        yield


def write_whole(path: pathlib.Path, text: str) -> None:
    """Writes a file so that readers, and whoever comes after a crash, see all of it or the old."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)  # the renaming too is only then safe
    finally:
        os.close(directory)


@contextlib.contextmanager
def explained(path: pathlib.Path) -> Iterator[None]:
    """Turns failures of the file system into one line.

    Raises:
      WorkdirError: in place of an OSError.
    """
    try:
        yield
    except OSError as error:
        where = error.filename or path
        reason = "not a directory" if isinstance(error, FileExistsError) else error.strerror
        raise errors.WorkdirError(f"{where}: cannot be written: {reason or error}") from error


def flatten(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the leaves of nested mappings as dotted keys and values."""
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from flatten(item, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, value


def check_config(
    directory: pathlib.Path, config_yaml: str, matters: Callable[[str], bool] = lambda key: True
) -> bool:
    """Refuses a directory whose config.yml is another one than a run's; whether it has one at all.

    Args:
      directory: where config.yml is looked for.
      config_yaml: the run's resolved config.
      matters: whether the value of a dotted key may not differ.
    Raises:
      WorkdirError: the two differ, in keys that the message names; or config.yml is not a config.
    """
    path = directory / CONFIG
    try:
        there = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return False
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise errors.WorkdirError(f"{path}: not a config: use another --workdir") from error
    pair = (
        {key: value for key, value in flatten(config) if matters(key)}
        for config in (there, yaml.safe_load(config_yaml))
    )
    found = differences(*pair)
    if found:
        raise another_config(directory, f" ({found})")
    return True


def another_config(directory: pathlib.Path, keys: str = "") -> errors.WorkdirError:
    """The error for a directory that is another run's; `keys` says where the configs differ."""
    return errors.WorkdirError(
        f"{directory}: belongs to a run of another config{keys}: "
        "use another --workdir, or delete this one"
    )


def differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """Says in which dotted keys two flat configs differ; empty where they do not."""
    found = [
        f"{key}: {_show(there, key)} there, {_show(here, key)} here"
        for key in {**there, **here}
        if _show(there, key) != _show(here, key)
    ]
    if len(found) > MAX_KEYS_SHOWN:
        found[MAX_KEYS_SHOWN:] = [f"{len(found) - MAX_KEYS_SHOWN} more"]
    return "; ".join(found)


def _show(values: Mapping[str, Any], key: str) -> str:
    return json.dumps(values[key], default=str) if key in values else "unset"
