"""Paths in buckets: what the rest of the program uses of pathlib.Path, for an object store.

An object appears whole, under its name, when its writing ends. It cannot be appended to or renamed.
A directory is what the names of several objects begin with: it is there while one of them is.
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

CHECK_SECONDS = 8.0  # for the first answer of a bucket

_PIECE_BYTES = 8 * 2**20
_SUMS = ("crc32c", "md5Hash", "ETag", "etag")  # the first that a store has of an object

_DENIED = ("401", "403")


class Status(NamedTuple):
    """Size and time of an object, by the names of os.stat_result and by those of epath.

    Attributes:
      st_size: bytes.
      st_mtime_ns: time of the last writing, in nanoseconds since 1970.
    """

    st_size: int
    st_mtime_ns: int

    @property
    def length(self) -> int:
        """Bytes."""
        return self.st_size

    @property
    def mtime(self) -> int:
        """Seconds since 1970."""
        return self.st_mtime_ns // 10**9


class BucketPath(gpath.PosixGPath):
    """A path such as gs://bucket/runs/7; failures are OSErrors with one line of a reason."""

    def check_bucket(self) -> None:
        """Raises OSError unless the bucket is there and answers within `CHECK_SECONDS`."""
        files, bucket = self._files, str(self).partition("://")[2].partition("/")[0]

        async def look() -> None:
            try:
                await files._info(str(self))
            except FileNotFoundError:
                await files._ls(bucket)

        with _explained(self):
            try:
                fsspec.asyn.sync(files.loop, look, timeout=CHECK_SECONDS)
            except FileNotFoundError as error:
                raise OSError(errno.ENOENT, f"no bucket {bucket!r}", str(self)) from error
            except fsspec.asyn.FSTimeoutError as error:
                reason = f"no answer within {CHECK_SECONDS:.0f} s"
                raise OSError(errno.ETIMEDOUT, reason, str(self)) from error

    def exists(self) -> bool:
        return self._info() is not None

    def is_dir(self) -> bool:
        return (self._info() or {}).get("type") == "directory"

    def is_file(self) -> bool:
        return (self._info() or {}).get("type") == "file"

    def is_symlink(self) -> bool:
        return False

    def stat(self) -> Status:
        with _explained(self):
            info = self._files.info(str(self))
            changed = info.get("mtime") or info.get("LastModified") or info.get("last_modified")
        moment = changed.timestamp() if isinstance(changed, datetime.datetime) else 0
        return Status(info["size"], int(moment * 1e9))

    def checksum(self) -> str:
        """A checksum of the content, by the store's own account, with its kind in front."""
        with _explained(self):
            info = self._files.info(str(self))
        return next((f"{kind}:{info[kind]}" for kind in _SUMS if info.get(kind)), "")

    def iterdir(self) -> Iterator["BucketPath"]:
        entries = self._entries()
        if not entries and not self.exists():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self))
        return iter(entries)

    def glob(self, pattern: str) -> Iterator["BucketPath"]:
        first, _, rest = pattern.partition("/")
        for one in self._entries():
            if fnmatch.fnmatchcase(one.name, first):
                yield from one.glob(rest) if rest else (one,)

    def rglob(self, pattern: str) -> Iterator["BucketPath"]:
        """Objects below this path, however deep, by their own names; no directories."""
        with _explained(self):
            names = self._files.find(str(self))
        for one in map(self._named, sorted(names)):
            if fnmatch.fnmatchcase(one.name, pattern) and one != self:
                yield one

    def mkdir(self, mode: int | None = None, parents: bool = False, exist_ok: bool = False) -> None:
        """Does nothing: directories are there once something is in them."""

    def rmdir(self) -> None:
        """Does nothing: directories are gone once nothing is in them."""

    def unlink(self, missing_ok: bool = False) -> None:
        try:
            with _explained(self):
                self._files.rm_file(str(self))
        except FileNotFoundError:
            if not missing_ok:
                raise

    def rmtree(self, missing_ok: bool = False) -> None:
        try:
            with _explained(self):
                self._files.rm(str(self), recursive=True)
        except FileNotFoundError:
            if not missing_ok:
                raise

    def rename(self, target: Any) -> "BucketPath":
        raise OSError(errno.EOPNOTSUPP, "a bucket cannot rename", str(self))

    replace = rename

    def copy(self, dst: Any, overwrite: bool = True) -> "BucketPath":
        """Copies an object within the store, where its bytes do not leave it."""
        with _explained(self):
            self._files.cp_file(str(self), os.fspath(dst))
        return self._new(dst)

    def touch(self, mode: int = 0o666, exist_ok: bool = True) -> None:
        self.write_bytes(b"")

    def open(self, mode: str = "r", encoding: str | None = None, **text: Any) -> IO:
        """Opens an object; what is written is there when it closes, and never if it fails.

        Args:
          mode: r or w, and b for bytes; xb writes nothing where something is.
          encoding: of a text; UTF-8 by default.
          **text: see io.TextIOWrapper.
        """
        if mode.strip("bt") not in ("r", "w", "x"):
            raise OSError(errno.EOPNOTSUPP, "a bucket cannot append to objects", str(self))
        with _explained(self):
            file = self._files.open(str(self), mode.strip("t").removesuffix("b") + "b")
        file = _Object(self, file)
        text.pop("buffering", None)
        return file if "b" in mode else io.TextIOWrapper(file, encoding or "utf-8", **text)

    def read_bytes(self) -> bytes:
        return self.read_range(None, None)

    def read_text(self, encoding: str | None = None, errors: str = "strict") -> str:
        return self.read_bytes().decode(encoding or "utf-8", errors)

    def read_range(self, begin: int | None, end: int | None) -> bytes:
        """Bytes `begin` to `end` - 1."""
        with _explained(self):
            return self._files.cat_file(str(self), begin, end)

    def write_bytes(self, data: bytes) -> int:
        with _explained(self):
            self._files.pipe_file(str(self), bytes(data))
        return len(data)

    def write_text(self, data: str, encoding: str | None = None, errors: str = "strict") -> int:
        return self.write_bytes(data.encode(encoding or "utf-8", errors))

    def absolute(self) -> "BucketPath":
        return self

    def expanduser(self) -> "BucketPath":
        return self

    def resolve(self, strict: bool = False) -> "BucketPath":
        return self

    @property
    def _files(self) -> fsspec.AbstractFileSystem:
        return _file_system(str(self).partition("://")[0])

    def _info(self) -> dict[str, Any] | None:
        try:
            with _explained(self):
                return self._files.info(str(self))
        except FileNotFoundError:
            return None

    def _entries(self) -> list["BucketPath"]:
        """What is right below this path; nothing where nothing is."""
        try:
            with _explained(self):
                names = self._files.ls(str(self), detail=False)
        except FileNotFoundError:
            return []
        return [one for one in map(self._named, sorted(names)) if one != self]

    def _named(self, name: str) -> "BucketPath":
        """The path of a name as the libraries write it: without the scheme."""
        return self._new(f"{str(self).partition('://')[0]}://{name.rstrip('/')}")


class _Object(io.RawIOBase):
    """An open object; a `with` block that fails leaves the object as it was."""

    def __init__(self, path: BucketPath, file: Any):
        self._path, self._file = path, file
        self.mode = file.mode

    def readable(self) -> bool:
        return self._file.readable()

    def writable(self) -> bool:
        return self._file.writable()

    def seekable(self) -> bool:
        return self._file.seekable()

    def read(self, size: int = -1) -> bytes:
        with _explained(self._path):
            return self._file.read(size)

    def readinto(self, buffer: Any) -> int:
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def readline(self, size: int = -1) -> bytes:
        with _explained(self._path):
            line = self._file.readline()
        if 0 <= size < len(line):
            self._file.seek(size - len(line), io.SEEK_CUR)
            line = line[:size]
        return line

    def __next__(self) -> bytes:
        line = self.readline()
        if not line:
            raise StopIteration
        return line

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def write(self, data: Any) -> int:
        with _explained(self._path):
            content = memoryview(data).cast("B")
            for begin in range(0, len(content), _PIECE_BYTES):  # the library copies what it gets
                self._file.write(content[begin : begin + _PIECE_BYTES])
        return len(content)

    def close(self) -> None:
        if not self.closed:
            super().close()
            with _explained(self._path):
                self._file.close()

    def __exit__(self, kind: Any, *unused: Any) -> None:
        if kind is not None and self.writable():
            self._discard()
        self.close()

    def _discard(self) -> None:
        with contextlib.suppress(Exception):  # of an upload that has not begun
            self._file.discard()
        self._file.closed = True


@functools.cache
def _file_system(scheme: str) -> fsspec.AbstractFileSystem:
    """The library's access to a kind of store, one for the process.

    Raises:
      OSError: it cannot be set up.
    """
    # It logs pages about failures, which would hide the one line of ours.
    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)
    # Of what is in a bucket, others write too: no listing is kept.
    return fsspec.filesystem(scheme, use_listings_cache=False, skip_instance_cache=True)


@contextlib.contextmanager
def _explained(path: BucketPath) -> Iterator[None]:
    """Turns whatever the libraries raise into an OSError with its path and one line of a reason."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        raise _as_os_error(error, path) from error
    except Exception as error:  # of google-auth, aiohttp, botocore, …
        raise _as_os_error(error, path) from error


def _as_os_error(error: Exception, path: BucketPath) -> OSError:
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
