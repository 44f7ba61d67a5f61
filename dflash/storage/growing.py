"""Files that grow: each line is there once it is appended, or, in a bucket, some seconds later.

An object store has no appending. What a file in a bucket holds is kept in memory, and the object is
written anew now and then by a thread of its own, and when the file is closed. A kill loses what was
appended since the last writing.
"""

import abc
import io
import os
import pathlib
import threading
import time
from collections.abc import Iterator

from dflash.storage import files, paths

INTERVAL_S = 10.0  # between two writings of an object
_SHARE = 10  # an object is written for at most one part in so many of the time
_PATIENCE_S = 300.0  # for which an object may fail to be written before its run ends


class GrowingFile(abc.ABC):
    """A file that is appended to."""

    @abc.abstractmethod
    def lines(self) -> Iterator[bytes]:
        """What is in the file, line by line, with the ends of lines."""

    @abc.abstractmethod
    def cut(self, num_bytes: int) -> None:
        """Keeps only the beginning of what earlier runs wrote."""

    @abc.abstractmethod
    def append(self, data: bytes) -> None:
        """Adds to the end.

        Raises:
          OSError: it cannot be written; or, in a bucket, what was appended minutes ago could not.
        """

    @abc.abstractmethod
    def sync(self) -> None:
        """Makes what was appended survive a power failure; nothing of the kind in a bucket."""

    @abc.abstractmethod
    def close(self) -> None:
        """Closes the file.

        Raises:
          OSError: an object cannot be written.
        """


def open_file(path: pathlib.Path) -> GrowingFile:
    """Opens a file to append to it, and makes it if it is missing.

    Raises:
      OSError: it cannot be read or written.
    """
    return _GrowingObject(path) if paths.in_bucket(path) else _LocalFile(path)


class _LocalFile(GrowingFile):
    def __init__(self, path: pathlib.Path):
        self._path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)

    def lines(self) -> Iterator[bytes]:
        with self._path.open("rb") as lines:
            yield from lines

    def cut(self, num_bytes: int) -> None:
        os.ftruncate(self._descriptor, num_bytes)
        files.sync(self._path.parent)  # the file's name is there after a crash

    def append(self, data: bytes) -> None:
        written = os.write(self._descriptor, data)
        if written < len(data):  # a full disk; the next run drops the incomplete line
            raise OSError(f"only {written} of {len(data)} bytes fitted")

    def sync(self) -> None:
        os.fsync(self._descriptor)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class _GrowingObject(GrowingFile):
    def __init__(self, path: pathlib.Path):
        self._path = path
        try:
            self._content = bytearray(path.read_bytes())
        except FileNotFoundError:
            self._content = bytearray()
            path.write_bytes(b"")  # other runs see that this one has begun
        self._changed = False  # since the object was written
        self._failure: tuple[float, OSError] | None = None  # since when, and the last one
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._writer = threading.Thread(target=self._write_at_intervals, daemon=True)
        self._writer.start()

    def lines(self) -> Iterator[bytes]:
        return io.BytesIO(self._content)

    def cut(self, num_bytes: int) -> None:
        with self._lock:
            self._changed |= num_bytes < len(self._content)
            del self._content[num_bytes:]

    def append(self, data: bytes) -> None:
        if self._failure is not None and time.monotonic() - self._failure[0] > _PATIENCE_S:
            raise self._failure[1]
        with self._lock:
            self._changed = True
            self._content += data

    def sync(self) -> None:
        pass

    def close(self) -> None:
        if not self._closing.is_set():
            self._closing.set()
            self._writer.join()
            self._write()

    def _write_at_intervals(self) -> None:
        pause_s = INTERVAL_S
        while not self._closing.wait(pause_s):
            begin = time.monotonic()
            try:
                self._write()
                self._failure = None
            except OSError as error:
                since = begin if self._failure is None else self._failure[0]
                self._failure = since, error
            pause_s = max(INTERVAL_S, _SHARE * (time.monotonic() - begin))

    def _write(self) -> None:
        with self._lock:
            if not self._changed:
                return
            content, self._changed = bytes(self._content), False
        try:
            self._path.write_bytes(content)
        except OSError:
            self._changed = True
            raise
