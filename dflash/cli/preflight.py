"""Checks of places on disk, before any work begins and before jax is imported."""

import functools
import os
import pathlib
from collections.abc import Callable, Iterable

from dflash import errors
from dflash.checkpoints import checkpoint
from dflash.config import locations as places
from dflash.config import registry
from dflash.storage import paths


def check(configs: Iterable[object], *, files: bool = True) -> None:
    """Checks the files, checkpoints and directories that configs name.

    Args:
      configs: Resolved configs.
      files: The run reads weights, data and prompts, as a plan does not.
    Raises:
      UserError: A place is missing or of the wrong kind; one line for each, with its key.
    """
    found: dict[str, type[errors.UserError]] = {}
    trouble = functools.cache(paths.find_problem)  # Look each bucket up once.
    for key, place, given in dict.fromkeys(one for c in configs for one in places.locations(c)):
        try:
            if place == "disk":
                check_local(given)
            check_bucket(given, trouble)
            if place == "checkpoint":
                checkpoint.check(given, weights=files)
            elif place == "tokenizer":
                checkpoint.check_reference(given)
            elif place in ("directory", "disk"):
                _check_directory(given)
            elif files:
                check_file(given)
        except errors.UserError as error:
            found |= {f"{key}: {line}": type(error) for line in str(error).splitlines()}
    if found:
        kind = next(iter(found.values()))
        raise kind("\n".join(found))


def check_writable(*directories: str | None) -> None:
    """Raises if a directory cannot be created or written.

    For buckets, only existence is checked; permission to write shows with the first file.

    Raises:
      ConfigError: A bucket cannot be reached.
      WorkdirError: A directory cannot be written; the message gives the reason.
    """
    for given in directories:
        if given is None:
            continue
        check_bucket(given)
        if paths.in_bucket(given):
            continue
        above = paths.to_path(given).absolute()
        try:
            while not os.path.lexists(above):
                above = above.parent
            reason = None if above.is_dir() else "Not a directory"
            if reason is None and not os.access(above, os.W_OK | os.X_OK):
                reason = "Permission denied"
        except (OSError, ValueError) as error:  # No file can have this name.
            reason = getattr(error, "strerror", None) or str(error)
        if reason is not None:
            raise errors.WorkdirError(f"{given}: cannot be written: {reason}")


def check_local(given: str | None) -> None:
    """Raises if a place that must be on a file system is in a bucket.

    Raises:
      ConfigError: The place is the URL of a bucket.
    """
    if given is not None and paths.in_bucket(given):
        raise errors.ConfigError(
            f"{given}: must be on a file system, not in a bucket: give a directory on a disk, or "
            "the one where the bucket is mounted"
        )


def check_bucket(
    given: str | None, trouble: Callable[[str], str | None] = paths.find_problem
) -> None:
    """Raises if a URL's bucket cannot be reached; paths pass.

    Args:
      given: Path, URL or None.
      trouble: Returns the problem of a bucket or None; see `paths.find_problem`.
    Raises:
      ConfigError: The bucket is missing or does not answer, or the scheme is unsupported.
    """
    if given is None or not paths.in_bucket(given):
        return
    paths.check_scheme(given)
    reason = trouble(paths.bucket_of(given))
    if reason is not None:
        raise errors.ConfigError(f"{given}: {reason}")


def check_file(given: str) -> None:
    """Raises if a file cannot be read.

    Raises:
      InputError: The file is missing, a directory, or unreadable; the message suggests a similar
        name.
    """
    path = paths.to_path(given)
    try:
        path.stat()
        reason = "Is a directory" if path.is_dir() else None
        if reason is None and not paths.in_bucket(given) and not os.access(path, os.R_OK):
            reason = "Permission denied"
    except (OSError, ValueError) as error:
        reason = f"{getattr(error, 'strerror', None) or error}{_namesake(path)}"
    if reason is not None:
        raise errors.InputError(f"{given}: cannot be read: {reason}")


def _namesake(path: pathlib.Path) -> str:
    """Returns "; did you mean 'x'?" if a file beside the missing one has a similar name."""
    try:
        beside = [str(path.with_name(one.name)) for one in path.parent.iterdir() if one.is_file()]
    except (OSError, ValueError):
        return ""
    return registry.suggest(str(path), beside, exhaustive=False)


def _check_directory(given: str) -> None:
    path = paths.to_path(given)
    try:
        taken = path.exists() and not path.is_dir()
    except (OSError, ValueError) as error:
        raise errors.ConfigError(f"{given}: {getattr(error, 'strerror', error)}") from error
    if taken:
        raise errors.ConfigError(f"{given}: a file; expected a directory")
