"""Paths in buckets: the methods of pathlib.Path that this program uses, for an object store.

`etils.epath` has the same idea, and Orbax demands its class, so `BucketPath` extends it. Its own
file access is replaced, because it caches listings that other processes change, renames directories
by copying objects in any order, cannot create an object only if it is absent, publishes objects
whose writing failed, and raises dozens of the libraries' exceptions.

An object appears as a whole under its name when its writing ends. It cannot be appended to or
renamed. A directory is a common prefix of object names, and exists while such an object does.
"""

import contextlib
import datetime
import errno
import fnmatch
import functools
import io
import logging
import os
from collections.abc import Iterator
from typing import IO, Any, NamedTuple

import fsspec
import fsspec.asyn
from etils.epath import gpath

from dflash import errors

CHECK_SECONDS = 8.0  # time limit for the first answer of a bucket

_READ_BYTES = 2**20
_WRITE_BYTES = 8 * 2**20
_CHECKSUMS = ("crc32c", "md5Hash", "ETag", "etag")  # in order of preference
_DENIED = ("401", "403")


class ObjectStat(NamedTuple):
    """Size and modification time of an object, by the names of os.stat_result and of epath."""

    st_size: int
    st_mtime_ns: int

    @property
    def length(self) -> int:
        """Size in bytes."""
        return self.st_size

    @property
    def mtime(self) -> int:
        """Time of the last write, in seconds since 1970."""
        return self.st_mtime_ns // 10**9


class BucketPath(gpath.PosixGPath):
    """A path such as gs://bucket/runs/7; every failure is an OSError with a one-line reason."""

    def check_bucket(self) -> None:
        """Raises OSError unless the bucket exists and answers within `CHECK_SECONDS`."""
        store, bucket = self._store, str(self).partition("://")[2].partition("/")[0]

        async def look_up() -> None:
            try:
                await store._info(str(self))
            except FileNotFoundError:
                await store._ls(bucket)

        with _as_os_errors(self):
            try:
                fsspec.asyn.sync(store.loop, look_up, timeout=CHECK_SECONDS)
            except FileNotFoundError as error:
                raise OSError(errno.ENOENT, f"no bucket {bucket!r}", str(self)) from error
            except fsspec.asyn.FSTimeoutError as error:
                reason = f"no answer within {CHECK_SECONDS:.0f} s"
                raise OSError(errno.ETIMEDOUT, reason, str(self)) from error

    def exists(self) -> bool:
        return self._kind() is not None

    def is_dir(self) -> bool:
        return self._kind() == "directory"

    def is_file(self) -> bool:
        return self._kind() == "file"

    def is_symlink(self) -> bool:
        return False

    def stat(self) -> ObjectStat:
        info = self._info()
        changed = info.get("mtime") or info.get("LastModified") or info.get("last_modified")
        seconds = changed.timestamp() if isinstance(changed, datetime.datetime) else 0
        return ObjectStat(info["size"], int(seconds * 1e9))

    def checksum(self) -> str:
        """Returns the checksum that the store keeps of the content, such as "crc32c:…"."""
        info = self._info()
        return next((f"{kind}:{info[kind]}" for kind in _CHECKSUMS if info.get(kind)), "")

    def iterdir(self) -> Iterator["BucketPath"]:
        entries = self._entries()
        if not entries and not self.exists():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self))
        return iter(entries)

    def glob(self, pattern: str) -> Iterator["BucketPath"]:
        first, _, rest = pattern.partition("/")
        for entry in self._entries():
            if fnmatch.fnmatchcase(entry.name, first):
                yield from entry.glob(rest) if rest else (entry,)

    def rglob(self, pattern: str) -> Iterator["BucketPath"]:
        """Yields the objects at any depth whose last name matches; yields no directories."""
        with _as_os_errors(self):
            names = self._store.find(str(self))
        for path in map(self._with_scheme, sorted(names)):
            if fnmatch.fnmatchcase(path.name, pattern) and path != self:
                yield path

    def mkdir(self, mode: int | None = None, parents: bool = False, exist_ok: bool = False) -> None:
        """Does nothing: a directory exists once it contains an object."""

    def rmdir(self) -> None:
        """Does nothing: a directory is gone once it contains no object."""

    def unlink(self, missing_ok: bool = False) -> None:
        with _as_os_errors(self, missing_ok=missing_ok):
            self._store.rm_file(str(self))

    def rmtree(self, missing_ok: bool = False) -> None:
        with _as_os_errors(self, missing_ok=missing_ok):
            self._store.rm(str(self), recursive=True)

    def rename(self, target: Any) -> "BucketPath":
        raise OSError(errno.EOPNOTSUPP, "a bucket cannot rename", str(self))

    replace = rename

    def copy(self, dst: Any, overwrite: bool = True) -> "BucketPath":
        """Copies an object within the store, which transfers nothing to this machine."""
        with _as_os_errors(self):
            self._store.cp_file(str(self), os.fspath(dst))
        return self._new(dst)

    def touch(self, mode: int = 0o666, exist_ok: bool = True) -> None:
        self.write_bytes(b"")

    def open(self, mode: str = "r", encoding: str | None = None, **text: Any) -> IO:
        """Opens an object; written content appears on close, and never if the block fails.

        Args:
          mode: "r" or "w", with "b" for bytes; "xb" creates the object only if it is absent.
          encoding: Encoding of text; UTF-8 by default.
          **text: Options of io.TextIOWrapper.
        """
        kind = mode.strip("bt")
        if kind not in ("r", "w", "x"):
            raise OSError(errno.EOPNOTSUPP, "a bucket cannot append to objects", str(self))
        with _as_os_errors(self):
            file = _Object(self, self._store.open(str(self), f"{kind}b"))
        if kind == "r":
            file = io.BufferedReader(file, _READ_BYTES)
        text.pop("buffering", None)
        return file if "b" in mode else io.TextIOWrapper(file, encoding or "utf-8", **text)

    def read_bytes(self) -> bytes:
        return self.read_range(None, None)

    def read_text(self, encoding: str | None = None, errors: str = "strict") -> str:
        return self.read_bytes().decode(encoding or "utf-8", errors)

    def read_range(self, begin: int | None, end: int | None) -> bytes:
        """Returns the bytes from `begin` up to but not including `end`."""
        with _as_os_errors(self):
            return self._store.cat_file(str(self), begin, end)

    def write_bytes(self, data: bytes) -> int:
        with _as_os_errors(self):
            self._store.pipe_file(str(self), bytes(data))
        return len(data)

    def write_text(self, data: str, encoding: str | None = None, errors: str = "strict") -> int:
        return self.write_bytes(data.encode(encoding or "utf-8", errors))

    def absolute(self) -> "BucketPath":
        return self

    expanduser = absolute

    def resolve(self, strict: bool = False) -> "BucketPath":
        return self

    @property
    def _store(self) -> fsspec.AbstractFileSystem:
        return _file_system(str(self).partition("://")[0])

    def _info(self) -> dict[str, Any]:
        with _as_os_errors(self):
            return self._store.info(str(self))

    def _kind(self) -> str | None:
        """Returns "file" or "directory", or None if nothing has this name."""
        try:
            return self._info()["type"]
        except FileNotFoundError:
            return None

    def _entries(self) -> list["BucketPath"]:
        names = []
        with _as_os_errors(self, missing_ok=True):
            names = self._store.ls(str(self), detail=False)
        return [path for path in map(self._with_scheme, sorted(names)) if path != self]

    def _with_scheme(self, name: str) -> "BucketPath":
        """Returns the path of a name that a library reports, which lacks the scheme."""
        return self._new(f"{str(self).partition('://')[0]}://{name.rstrip('/')}")


class _Object(io.RawIOBase):
    """Open object of a bucket.

    A `with` block that fails leaves the stored object unchanged.
    """

    def __init__(self, path: BucketPath, file: Any):
        self._path, self._file = path, file
        self.mode = file.mode

    def readable(self) -> bool:
        return self._file.readable()

    def writable(self) -> bool:
        return self._file.writable()

    def seekable(self) -> bool:
        return self._file.seekable()

    def readinto(self, buffer: Any) -> int:
        with _as_os_errors(self._path):
            data = self._file.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def write(self, data: Any) -> int:
        content = memoryview(data).cast("B")
        with _as_os_errors(self._path):
            # The library copies its argument, so pass large data in pieces.
            for begin in range(0, len(content), _WRITE_BYTES):
                self._file.write(content[begin : begin + _WRITE_BYTES])
        return len(content)

    def close(self) -> None:
        if not self.closed:
            super().close()
            with _as_os_errors(self._path):
                self._file.close()

    def __exit__(self, kind: Any, *unused: Any) -> None:
        if kind is not None and self.writable():
            with contextlib.suppress(Exception):  # the upload has not begun yet
                self._file.discard()
            self._file.closed = True
        self.close()


@functools.cache
def _file_system(scheme: str) -> fsspec.AbstractFileSystem:
    """Returns the process's one fsspec file system for a scheme."""
    # gcsfs logs pages about a failure, which would hide our one line.
    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)
    # Other processes write to the bucket too, so do not cache listings.
    return fsspec.filesystem(scheme, use_listings_cache=False, skip_instance_cache=True)


@contextlib.contextmanager
def _as_os_errors(path: BucketPath, *, missing_ok: bool = False) -> Iterator[None]:
    """Turns the libraries' exceptions into an OSError with the path and a one-line reason."""
    try:
        yield
    except Exception as error:  # of fsspec, google-auth, aiohttp, botocore, …
        if missing_ok and isinstance(error, FileNotFoundError):
            return
        if isinstance(error, OSError) and error.filename is not None:
            raise
        raise _to_os_error(error, path) from error


def _to_os_error(error: Exception, path: BucketPath) -> OSError:
    text = " ".join(str(error).split()) or type(error).__name__
    number, reason = errno.EIO, errors.shorten(text, 160)
    if isinstance(error, FileNotFoundError):
        number, reason = errno.ENOENT, os.strerror(errno.ENOENT)
    elif isinstance(error, FileExistsError):
        number, reason = errno.EEXIST, os.strerror(errno.EEXIST)
    elif (
        isinstance(error, PermissionError)
        or text.startswith("Forbidden")
        or str(getattr(error, "code", "")) in _DENIED
    ):
        number = errno.EACCES
        reason = f"{os.strerror(number)}: check the account and its rights to the bucket"
    elif isinstance(error, TimeoutError):
        number, reason = errno.ETIMEDOUT, "no answer"
    return OSError(number, reason, str(path))
