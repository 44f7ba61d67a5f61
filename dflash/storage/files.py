"""Files that outlive a crash: written whole or not at all; failures of the disk as one line.

What is done otherwise in a bucket (`buckets.BucketPath`) than in a file system, is done here.
"""

import concurrent.futures
import contextlib
import fcntl
import hashlib
import json
import os
import pathlib
import secrets
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from dflash import errors
from dflash.storage import paths

if TYPE_CHECKING:
    import numpy as np

_COPIED_BYTES = 8 * 2**20  # at a time
_AT_ONCE = 16  # requests to a bucket that wait for their answers


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
    if paths.in_bucket(path):
        with path.open("wb") as file:
            file.writelines(parts)
        return
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
    remove_tree(target)
    try:
        source.rename(target)
    except OSError:
        copy_tree(source, target, marker)
        remove_tree(source)
    sync(target.parent)


def copy_tree(source: pathlib.Path, target: pathlib.Path, marker: str) -> None:
    """Copies a directory; its file `marker`, which says that it is whole, comes last.

    Raises:
      OSError: it cannot be read or written.
    """
    if paths.in_bucket(source) or paths.in_bucket(target):
        found = [one.relative_to(source) for one in source.rglob("*") if one.is_file()]
        for name in sorted(found, key=lambda name: str(name) == marker):
            copy_file(source / name, target / name)
        return
    shutil.copytree(source, target, ignore=shutil.ignore_patterns(marker), dirs_exist_ok=True)
    for one in target.rglob("*"):
        sync(one)
    write_whole(target / marker, (source / marker).read_bytes())


def copy_file(source: pathlib.Path, target: pathlib.Path) -> None:
    """Copies the content of a file, piece by piece; within a bucket, the store does it.

    Raises:
      OSError: it cannot be read or written.
    """
    if paths.in_bucket(source) and paths.in_bucket(target):
        source.copy(target)
    else:
        with source.open("rb") as content, target.open("wb") as copy:
            shutil.copyfileobj(content, copy, _COPIED_BYTES)


def remove_tree(directory: pathlib.Path) -> None:
    """Removes a directory with all that is in it, if it is there.

    Raises:
      OSError: something cannot be removed.
    """
    if paths.in_bucket(directory):
        directory.rmtree(missing_ok=True)
    elif directory.exists():
        shutil.rmtree(directory)


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


def move_tree(source: pathlib.Path, target: pathlib.Path) -> None:
    """Moves a directory to where nothing is; in a bucket each of its objects.

    Raises:
      OSError: it cannot be read or written.
    """
    if paths.in_bucket(source):
        copy_tree(source, target, marker="")
        remove_tree(source)
    else:
        shutil.move(source, target)


def view(path: pathlib.Path, begin: int, end: int) -> "np.ndarray":
    """Bytes `begin` to `end` - 1 of a file: mapped into memory, or fetched from a bucket.

    Returns:
      uint8 [end - begin]; read-only.
    Raises:
      OSError: it cannot be read.
      ValueError: the file is shorter.
    """
    import numpy as np  # which --help can do without

    if begin == end:
        return np.empty(0, np.uint8)
    if not paths.in_bucket(path):
        return np.memmap(path, np.uint8, "r", begin, (end - begin,))
    data = path.read_range(begin, end)
    if len(data) != end - begin:
        raise ValueError(f"{path}: ends before byte {end:,}")
    return np.frombuffer(data, np.uint8)


def call_all(path: pathlib.Path, calls: Iterable[Callable[[], None]]) -> None:
    """Makes calls that each read something of a file: in a bucket several at once, which wait."""
    if not paths.in_bucket(path):
        for call in calls:
            call()
        return
    with concurrent.futures.ThreadPoolExecutor(_AT_ONCE) as pool:
        for done in [pool.submit(call) for call in calls]:
            done.result()


def checksum(path: pathlib.Path) -> str:
    """A checksum of a file's content; of an object the one that the store keeps, with its kind."""
    if paths.in_bucket(path):
        return path.checksum()
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()


def same_checksum(one: str, other: str) -> bool:
    """Whether two checksums are equal; those of different kinds cannot be compared, and pass."""
    kinds = (text.partition(":")[0] if ":" in text else "" for text in (one, other))
    return one == other or len({*kinds}) > 1


def sync(path: pathlib.Path) -> None:
    """Makes a file, or the names in a directory, survive a power failure."""
    if paths.in_bucket(path):
        return  # an object that is there is safe
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


def create(path: pathlib.Path, content: str) -> None:
    """Writes a file unless it is there.

    Raises:
      OSError: it cannot be written.
    """
    with contextlib.suppress(FileExistsError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("xb") as file:
            file.write(content.encode())


@contextlib.contextmanager
def waiting_lock(path: pathlib.Path) -> Iterator[None]:
    """Holds a lock file for a moment; other processes that want it wait. A bucket has no locks.

    Raises:
      OSError: the file cannot be made.
    """
    if paths.in_bucket(path):
        yield
        return
    with path.open("w") as file:
        with contextlib.suppress(OSError):  # some network file systems have no locks
            fcntl.flock(file, fcntl.LOCK_EX)  # released when the file is closed, also by a kill
        yield


@contextlib.contextmanager
def ended_in_order(directory: pathlib.Path) -> Iterator[None]:
    """In a bucket, makes SIGTERM end the block as an exception does, if it would only kill.

    Whatever is not written yet is then written as the block is left. On a disk nothing waits.
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


def lock(path: pathlib.Path, patience_s: float) -> int | None:
    """Keeps other processes out while a lock file is open.

    Args:
      path: the file; made if it is missing.
      patience_s: how long to wait for another process that has it.
    Returns:
      the file's descriptor, to be closed; None in a bucket, which has no locks.
    Raises:
      BlockingIOError: another process has it.
      OSError: the file cannot be made.
    """
    if paths.in_bucket(path):
        return None
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    deadline = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(descriptor)
                raise
        except OSError:
            return descriptor  # some network file systems have no locks; the run can do without
        time.sleep(patience_s / 20)
