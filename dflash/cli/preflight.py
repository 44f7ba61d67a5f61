"""Checks of places on disk, before any work begins and before jax is imported."""

import functools
import os
import pathlib
from collections.abc import Callable, Iterable

from dflash import errors
from dflash.checkpoints import checkpoint, lora
from dflash.config import loader, registry
from dflash.storage import paths


def check(configs: Iterable[object], *, files: bool = True) -> None:
    """Checks the files, checkpoints and directories that configs name.

    Args:
      files: The run reads weights, data and prompts, as a plan does not.
    Raises:
      UserError: A place is missing or of the wrong kind; one line for each, with its key.
    """
    problems: dict[str, type[errors.UserError]] = {}
    find_problem = functools.cache(paths.find_problem)  # Look each bucket up once.
    entries = (entry for config in configs for entry in loader.locations(config))
    for key, place, location in dict.fromkeys(entries):
        try:
            if place == "disk":
                check_local(location)
            check_bucket(location, find_problem)
            if place == "checkpoint":
                checkpoint.check(location, weights=files)
            elif place == "adapter":
                lora.check(location)
            elif place == "tokenizer":
                checkpoint.find(location, download=False)
            elif place in ("directory", "disk"):
                _check_directory(location)
            elif files:
                check_file(location)
        except errors.UserError as error:
            problems |= {f"{key}: {line}": type(error) for line in str(error).splitlines()}
    if problems:
        kind = next(iter(problems.values()))
        raise kind("\n".join(problems))


def check_writable(*directories: str | None) -> None:
    """Raises if a directory cannot be created or written.

    For buckets, only existence is checked; permission to write shows with the first file.

    Raises:
      ConfigError: A bucket cannot be reached.
      WorkdirError: A directory cannot be written; the message gives the reason.
    """
    for directory in directories:
        if directory is None:
            continue
        check_bucket(directory)
        if paths.in_bucket(directory):
            continue
        above = paths.to_path(directory).absolute()
        try:
            while not os.path.lexists(above):
                above = above.parent
            reason = None if above.is_dir() else "Not a directory"
            if reason is None and not os.access(above, os.W_OK | os.X_OK):
                reason = "Permission denied"
        except (OSError, ValueError) as error:  # No file can have this name.
            reason = getattr(error, "strerror", None) or str(error)
        if reason is not None:
            raise errors.WorkdirError(f"{directory}: cannot be written: {reason}")


def check_local(location: str | None) -> None:
    """Raises ConfigError if a place that must be on a file system is the URL of a bucket."""
    if location is not None and paths.in_bucket(location):
        raise errors.ConfigError(
            f"{location}: must be on a file system, not in a bucket: give a directory on a disk, "
            "or the one where the bucket is mounted"
        )


def check_bucket(
    location: str | None, find_problem: Callable[[str], str | None] = paths.find_problem
) -> None:
    """Raises if a URL's bucket cannot be reached; paths pass.

    Args:
      find_problem: Returns the problem of a bucket or None; see `paths.find_problem`.
    Raises:
      ConfigError: The bucket is missing or does not answer, or the scheme is unsupported.
    """
    if location is None or not paths.in_bucket(location):
        return
    paths.check_scheme(location)
    reason = find_problem(paths.bucket_of(location))
    if reason is not None:
        raise errors.ConfigError(f"{location}: {reason}")


def check_file(file: str) -> None:
    """Raises InputError, which suggests a similar name, if a file cannot be read."""
    path = paths.to_path(file)
    try:
        path.stat()
        reason = "Is a directory" if path.is_dir() else None
        if reason is None and not paths.in_bucket(file) and not os.access(path, os.R_OK):
            reason = "Permission denied"
    except (OSError, ValueError) as error:
        reason = f"{getattr(error, 'strerror', None) or error}{_namesake(path)}"
    if reason is not None:
        raise errors.InputError(f"{file}: cannot be read: {reason}")


def _namesake(path: pathlib.Path) -> str:
    """Returns "; did you mean 'x'?" if a file beside the missing one has a similar name."""
    try:
        beside = [
            str(path.with_name(sibling.name))
            for sibling in path.parent.iterdir()
            if sibling.is_file()
        ]
    except (OSError, ValueError):
        return ""
    return registry.suggest(str(path), beside, exhaustive=False)


def _check_directory(directory: str) -> None:
    path = paths.to_path(directory)
    try:
        is_other = path.exists() and not path.is_dir()
    except (OSError, ValueError) as error:
        raise errors.ConfigError(f"{directory}: {getattr(error, 'strerror', error)}") from error
    if is_other:
        raise errors.ConfigError(f"{directory}: is a file, expected a directory")
