"""Crash-safe files: each is written completely or not at all, on a disk or in a bucket.

The differences between a file system and a bucket (`buckets.BucketPath`) are handled here, so that
other modules need not know them.
"""

import concurrent.futures
import contextlib
import errno
import fcntl
import hashlib
import json
import os
import pathlib
import secrets
import shutil
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from dflash import errors
from dflash.storage import paths

if TYPE_CHECKING:
    import numpy as np

_COPY_BYTES = 8 * 2**20  # size of the buffer that copies a file
_MAX_REQUESTS = 16  # concurrent requests to a bucket


def make_private(directory: pathlib.Path) -> None:
    """Creates a directory that only its owner may read, unless it exists; also its parents.

    Parents get the usual mode.
    """
    directory.mkdir(0o700, parents=True, exist_ok=True)


def read_regular(path: pathlib.Path, max_bytes: int = -1) -> bytes:
    """Returns a file, or its first `max_bytes`; raises OSError if it is unreadable or a device."""
    if paths.in_bucket(path):
        with path.open("rb") as file:
            return file.read(max_bytes)
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        mode = os.fstat(file.fileno()).st_mode
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        return file.read(max_bytes)


def write_whole(path: pathlib.Path, content: str | bytes | Iterable[bytes]) -> None:
    """Writes a file atomically: readers see either the old content or all of the new.

    Args:
      content: Text, which is written as UTF-8, bytes, or an iterable of bytes.
    Raises:
      OSError: The file cannot be written; the old one stays.
    """
    data = content.encode("utf-8") if isinstance(content, str) else content
    parts = [data] if isinstance(data, bytes) else data
    if paths.in_bucket(path):
        with path.open("wb") as file:
            file.writelines(parts)
        return
    # The name is random, because runs on several machines may write the same file.
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
    """Renames a directory to its final name, or copies it where directories cannot be renamed.

    An existing directory of this name is replaced. A directory counts as complete while it contains
    the file `marker`, so the marker is removed first and written last.

    Args:
      source: A complete directory beside `target`; it is gone afterwards.
    Raises:
      OSError: The directory cannot be written; then `source` stays.
    """
    (target / marker).unlink(missing_ok=True)
    remove_tree(target)
    try:
        source.rename(target)
    except OSError:
        copy_tree(source, target, marker)
        remove_tree(source)
    sync(target.parent)


def copy_tree(source: pathlib.Path, target: pathlib.Path, marker: str) -> None:
    """Copies a directory; the file `marker`, which shows that it is complete, is copied last."""
    if paths.in_bucket(source) or paths.in_bucket(target):
        names = [path.relative_to(source) for path in source.rglob("*") if path.is_file()]
        for name in sorted(names, key=lambda name: str(name) == marker):
            copy_file(source / name, target / name)
        return
    shutil.copytree(source, target, ignore=shutil.ignore_patterns(marker), dirs_exist_ok=True)
    for path in target.rglob("*"):
        sync(path)
    write_whole(target / marker, (source / marker).read_bytes())


def copy_file(source: pathlib.Path, target: pathlib.Path) -> None:
    """Copies the content of a file; between objects, the store itself copies it."""
    if paths.in_bucket(source) and paths.in_bucket(target):
        source.copy(target)
    else:
        with source.open("rb") as content, target.open("wb") as copy:
            shutil.copyfileobj(content, copy, _COPY_BYTES)


def remove_tree(directory: pathlib.Path) -> None:
    """Removes a directory and its content, if it exists."""
    if paths.in_bucket(directory):
        directory.rmtree(missing_ok=True)
    elif directory.exists():
        shutil.rmtree(directory)


def renames_directories(directory: pathlib.Path) -> bool:
    """Renames a temporary directory, and returns whether the file system supports that."""
    temporary = directory / f".{secrets.token_hex(4)}.tmp"
    renamed = temporary.with_name(f"{temporary.name}.renamed")
    temporary.mkdir()
    try:
        temporary.rename(renamed)
    except OSError:
        return False
    finally:
        for path in (temporary, renamed):
            with contextlib.suppress(FileNotFoundError):
                path.rmdir()
    return True


def move_tree(source: pathlib.Path, target: pathlib.Path) -> None:
    """Moves a directory to a name that does not exist yet; in a bucket, object by object."""
    if paths.in_bucket(source):
        copy_tree(source, target, marker="")
        remove_tree(source)
    else:
        shutil.move(source, target)


def view(path: pathlib.Path, begin: int, end: int) -> "np.ndarray":
    """Returns the bytes [begin, end) of a file: memory-mapped, or fetched from a bucket.

    Returns:
      uint8 [end - begin]; read-only.
    Raises:
      ValueError: The file is shorter.
    """
    import numpy as np  # imported here, so that --help stays fast

    if begin == end:
        return np.empty(0, np.uint8)
    if not paths.in_bucket(path):
        return np.memmap(path, np.uint8, "r", begin, (end - begin,))
    data = path.read_range(begin, end)
    if len(data) != end - begin:
        raise ValueError(f"{path}: ends before byte {end:,}")
    return np.frombuffer(data, np.uint8)


def call_all(path: pathlib.Path, calls: Iterable[Callable[[], None]]) -> None:
    """Makes calls that read parts of a file: one by one, or concurrently in a bucket."""
    if not paths.in_bucket(path):
        for call in calls:
            call()
        return
    with concurrent.futures.ThreadPoolExecutor(_MAX_REQUESTS) as pool:
        for future in [pool.submit(call) for call in calls]:
            future.result()


def checksum(path: pathlib.Path) -> str:
    """Returns a checksum of a file's content; for an object, the one that the store keeps."""
    if paths.in_bucket(path):
        return path.checksum()
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()


def same_checksum(first: str, second: str) -> bool:
    """Returns whether checksums are equal, or of different kinds, which cannot be compared."""
    kinds = (text.partition(":")[0] if ":" in text else "" for text in (first, second))
    return first == second or len({*kinds}) > 1


def sync(path: pathlib.Path) -> None:
    """Forces a file, or the names in a directory, to disk."""
    if paths.in_bucket(path):
        return  # an object that exists is already durable
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def to_json(values: Mapping[str, Any]) -> str:
    """Returns the text of a JSON file; raises ValueError if a number is not finite."""
    return json.dumps(values, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


@contextlib.contextmanager
def explained(path: pathlib.Path) -> Iterator[None]:
    """Turns an OSError of the block, of `path` unless it names one, into a WorkdirError."""
    try:
        yield
    except OSError as error:
        where = error.filename or path
        reason = "not a directory" if isinstance(error, FileExistsError) else error.strerror
        raise errors.WorkdirError(f"{where}: cannot be written: {reason or error}") from error


def create(path: pathlib.Path, content: str) -> None:
    """Writes a file unless it already exists."""
    with contextlib.suppress(FileExistsError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("xb") as file:
            file.write(content.encode())


@contextlib.contextmanager
def waiting_lock(path: pathlib.Path) -> Iterator[None]:
    """Holds a lock file while other processes wait for it; does nothing in a bucket."""
    if paths.in_bucket(path):
        yield
        return
    with path.open("w") as file:
        with contextlib.suppress(OSError):  # some network file systems have no locks
            fcntl.flock(file, fcntl.LOCK_EX)  # the kernel releases it when the file is closed
        yield


@contextlib.contextmanager
def ended_in_order(directory: pathlib.Path) -> Iterator[None]:
    """Makes SIGTERM raise SystemExit in the block, if the directory is in a bucket.

    Growing files are then closed, which writes their last lines. Files on a disk need no such care,
    and a handler that the program has already installed stays.
    """
    main = threading.current_thread() is threading.main_thread()
    if not (
        paths.in_bucket(directory) and main and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    ):
        yield
        return
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def lock(path: pathlib.Path, timeout_s: float) -> int | None:
    """Locks a file until its descriptor is closed.

    Args:
      path: Lock file; created if it is missing.
      timeout_s: Time to wait for another process that holds the lock.
    Returns:
      The file's descriptor, which the caller closes; None in a bucket, which has no locks.
    Raises:
      BlockingIOError: Another process holds the lock.
    """
    if paths.in_bucket(path):
        return None
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(descriptor)
                raise
        except OSError:
            return descriptor  # some network file systems have no locks; go on without one
        time.sleep(timeout_s / 20)
