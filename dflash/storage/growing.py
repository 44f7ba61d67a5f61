"""Files that are appended to: each line is stored at once, or, in a bucket, within seconds.

Object stores cannot append. The content of a file in a bucket is therefore kept in memory, and a
background thread rewrites the object periodically, and once more when the file is closed. A kill
loses what was appended since the last write.
"""

import io
import os
import pathlib
import threading
import time
from collections.abc import Iterator

from dflash.storage import files, paths

INTERVAL_S = 10.0  # least time between two writes of an object
_PAUSE_RATIO = 10  # each pause is at least this many times as long as the write before it
_FAILURE_TIMEOUT_S = 300.0  # time for which writes of an object may fail before the run ends


def open_file(path: pathlib.Path) -> "GrowingFile":
    """Opens a file for appending, and creates it if it is missing."""
    return _GrowingObject(path) if paths.in_bucket(path) else GrowingFile(path)


class GrowingFile:
    """A file that is appended to."""

    def __init__(self, path: pathlib.Path):
        self._path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)

    def lines(self) -> Iterator[bytes]:
        """Yields the lines of the file, with their line ends."""
        with self._path.open("rb") as lines:
            yield from lines

    def cut(self, num_bytes: int) -> None:
        """Truncates the content of earlier runs to its first `num_bytes`."""
        os.ftruncate(self._descriptor, num_bytes)
        files.sync(self._path.parent)  # so that the name of a new file survives a crash

    def append(self, data: bytes) -> None:
        """Appends data; in a bucket, raises OSError only after writes have failed for minutes."""
        written = os.write(self._descriptor, data)
        if written < len(data):  # the disk is full; the next run drops the incomplete line
            raise OSError(f"only {written} of {len(data)} bytes were written")

    def sync(self) -> None:
        """Makes appended data survive a power failure; does nothing in a bucket."""
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Closes the file."""
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
            path.write_bytes(b"")  # shows other runs that this one has begun
        self._changed = False  # whether the content differs from the stored object
        self._failure: tuple[float, OSError] | None = None  # time of the first, and the last error
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._writer = threading.Thread(target=self._write_periodically, daemon=True)
        self._writer.start()

    def lines(self) -> Iterator[bytes]:
        return io.BytesIO(self._content)

    def cut(self, num_bytes: int) -> None:
        with self._lock:
            self._changed |= num_bytes < len(self._content)
            del self._content[num_bytes:]

    def append(self, data: bytes) -> None:
        failure = self._failure
        if failure is not None and time.monotonic() - failure[0] > _FAILURE_TIMEOUT_S:
            raise failure[1]
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

    def _write_periodically(self) -> None:
        pause_s = INTERVAL_S
        while not self._closing.wait(pause_s):
            begin = time.monotonic()
            try:
                self._write()
                self._failure = None
            except OSError as error:
                since = begin if self._failure is None else self._failure[0]
                self._failure = since, error
            pause_s = max(INTERVAL_S, _PAUSE_RATIO * (time.monotonic() - begin))

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
