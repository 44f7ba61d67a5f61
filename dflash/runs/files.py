"""Files that outlive a crash: written whole or not at all; failures of the disk as one line."""

import contextlib
import fcntl
import json
import os
import pathlib
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from dflash import errors


def write_whole(path: pathlib.Path, content: str | bytes | Iterable[bytes]) -> None:
    """Writes a file so that readers see the old content or the new, never a part.

    Args:
      path: the file; replaced if it exists.
      content: text, which is written as UTF-8, bytes, or parts of them, written as they come.
    Raises:
      OSError: it cannot be written; the old file stays.
    """
    data = content.encode("utf-8") if isinstance(content, str) else content
    parts = [data] if isinstance(data, bytes) else data
    # Its own, since runs on several machines may write the same file.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("wb") as file:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


def publish(source: pathlib.Path, target: pathlib.Path, marker: str) -> None:
    """Gives a directory its final name; where directories cannot be renamed, copies it there.

    A directory with this name is replaced. It counts as whole while it holds the file `marker`,
    which is the first thing to go and the last to come.

    Args:
      source: a whole directory beside `target`; it is gone afterwards.
      target: its final name.
      marker: a file of it.
    Raises:
      OSError: it cannot be written; then `source` stays.
    """
    (target / marker).unlink(missing_ok=True)
    if target.exists():
        shutil.rmtree(target)
    try:
        source.rename(target)
    except OSError:
        shutil.copytree(source, target, ignore=shutil.ignore_patterns(marker))
        for one in target.rglob("*"):
            sync(one)
        write_whole(target / marker, (source / marker).read_bytes())
        shutil.rmtree(source)
    sync(target.parent)


def renames_directories(directory: pathlib.Path) -> bool:
    """Whether the file system of a directory can rename directories, as tried with one."""
    tried = directory / f".{secrets.token_hex(4)}.tmp"
    renamed = tried.with_name(f"{tried.name}.renamed")
    tried.mkdir()
    try:
        tried.rename(renamed)
    except OSError:
        return False
    finally:
        for one in (tried, renamed):
            with contextlib.suppress(FileNotFoundError):
                one.rmdir()
    return True


def check_random_access(key: str, given: str) -> None:
    """Refuses a directory in a bucket, for files that are read at random places.

    Raises:
      InputError: it is a URL; the line names the key.
    """
    if "://" in given:
        raise errors.InputError(
            f"{key}: {given}: a bucket, but these files are read at random places: give a "
            "directory on a disk or a shared file system, or the one where the bucket is mounted"
        )


def sync(path: pathlib.Path) -> None:
    """Makes a file, or the names in a directory, survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def to_json(values: Mapping[str, Any]) -> str:
    """Returns the text of a JSON file.

    Raises:
      ValueError: a number is not finite.
    """
    return json.dumps(values, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


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


@contextlib.contextmanager
def waiting_lock(path: pathlib.Path) -> Iterator[None]:
    """Holds a lock file for a moment; other processes that want it wait.

    Raises:
      OSError: the file cannot be made.
    """
    with path.open("w") as file:
        with contextlib.suppress(OSError):  # some network file systems have no locks
            fcntl.flock(file, fcntl.LOCK_EX)  # released when the file is closed, also by a kill
        yield
