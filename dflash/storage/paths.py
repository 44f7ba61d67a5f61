"""Paths on a disk or in a bucket of an object store, behind one function."""

import importlib.util
import os
import pathlib

from dflash import errors
from dflash.version import install_command

_URL = "://"
# URL scheme -> the library that accesses the store, and how to install it.
_LIBRARIES = {
    "gs": ("gcsfs", install_command("gcs")),
    "s3": ("s3fs", "pip install s3fs"),
    "az": ("adlfs", "pip install adlfs"),
}


def in_package(path: str) -> pathlib.Path:
    """Returns where a path relative to this package is, such as assets/tiny_target."""
    return pathlib.Path(__file__).resolve().parents[1] / path


def to_path(path: str | os.PathLike) -> pathlib.Path:
    """Returns a path object: a `BucketPath` for a URL such as gs://bucket/x, else a `pathlib.Path`.

    A leading `~` is expanded to the home directory. A `BucketPath` has the methods of
    `pathlib.Path` that this program uses.

    Raises:
      ConfigError: The URL has an unknown scheme, or the library for it is not installed.
    """
    text = os.fspath(path)
    if not in_bucket(text):
        return pathlib.Path(path).expanduser()
    check_scheme(text)
    from dflash.storage import buckets  # imports fsspec and etils, which most runs do not need

    return buckets.BucketPath(text)


def cache_directory(name: str) -> pathlib.Path:
    """Returns the directory `name` in the user's cache of this program."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return pathlib.Path(cache).expanduser() / "dflash" / name


def in_bucket(path: str | os.PathLike) -> bool:
    """Returns whether a path is a URL, that is, names an object or a prefix of objects."""
    return _URL in os.fspath(path)


def check_scheme(url: str) -> None:
    """Raises ConfigError for an unknown scheme, a missing bucket, or a missing library."""
    scheme, _, name = url.partition(_URL)
    if scheme not in _LIBRARIES:
        known = ", ".join(f"{scheme}{_URL}" for scheme in _LIBRARIES)
        raise errors.ConfigError(f"{url}: unknown kind of path; expected {known} or a plain path")
    if not name.strip("/"):
        raise errors.ConfigError(f"{url}: no bucket; expected {scheme}{_URL}BUCKET/NAME")
    library, advice = _LIBRARIES[scheme]
    if not _is_installed(library):
        raise errors.ConfigError(f"{url}: needs {library}; {advice}")


def find_problem(bucket: str) -> str | None:
    """Contacts a bucket for a few seconds; returns what is wrong with it, or None."""
    try:
        to_path(bucket).check_bucket()
    except OSError as error:
        return f"cannot be reached: {error.strerror or error}"
    return None


def absolute(path: pathlib.Path) -> pathlib.Path:
    """Returns the absolute path without `.` and `..`; a path in a bucket is returned unchanged."""
    return path if in_bucket(path) else pathlib.Path(os.path.abspath(path))


def bucket_of(url: str) -> str:
    """Returns the bucket of a URL, such as gs://bucket."""
    scheme, _, name = url.partition(_URL)
    return f"{scheme}{_URL}{name.partition('/')[0]}"


def _is_installed(library: str) -> bool:
    try:
        return importlib.util.find_spec(library) is not None
    except ValueError:  # sys.modules maps the name to None
        return False
