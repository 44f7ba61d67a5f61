"""Paths: of a file system, or in a bucket of an object store, by one function."""

import importlib.util
import os
import pathlib

from dflash import errors

_URL = "://"
# Scheme of a URL -> the library that reads and writes there, and how to get it.
_LIBRARIES = {
    "gs": ("gcsfs", "pip install 'dflash[gcs]'"),
    "s3": ("s3fs", "pip install s3fs"),
    "az": ("adlfs", "pip install adlfs"),
}


def to_path(given: str | os.PathLike) -> pathlib.Path:
    """The path that is given: `~` is the home directory, gs://bucket/x an object in a bucket.

    Of pathlib.Path, a path in a bucket has what `buckets.BucketPath` names.

    Raises:
      ConfigError: it is a URL of another kind, or a library for it is absent.
    """
    text = os.fspath(given)
    if not in_bucket(text):
        return pathlib.Path(given).expanduser()
    check_scheme(text)
    from dflash.storage import buckets  # libraries that most runs can do without

    return buckets.BucketPath(text)


def in_bucket(path: str | os.PathLike) -> bool:
    """Whether a path is a URL: of an object, or of what objects' names begin with."""
    return _URL in os.fspath(path)


def check_scheme(url: str) -> None:
    """Refuses URLs that nothing here can read.

    Raises:
      ConfigError: no such scheme, no bucket, or a library is absent; the message names the URL.
    """
    scheme, _, rest = url.partition(_URL)
    if scheme not in _LIBRARIES:
        known = ", ".join(f"{one}{_URL}" for one in _LIBRARIES)
        raise errors.ConfigError(f"{url}: no such kind of path; known are {known} and plain paths")
    if not rest.strip("/"):
        raise errors.ConfigError(f"{url}: no bucket; expected {scheme}{_URL}BUCKET/NAME")
    library, advice = _LIBRARIES[scheme]
    if not _is_installed(library):
        raise errors.ConfigError(f"{url}: needs {library}; {advice}")


def trouble(bucket: str) -> str | None:
    """Looks a bucket up, for a few seconds; returns what is wrong with it, None for nothing.

    Args:
      bucket: as `bucket_of` returns it.
    """
    try:
        to_path(bucket).check_bucket()
    except OSError as error:
        return f"cannot be reached: {error.strerror or error}"
    return None


def absolute(path: pathlib.Path) -> pathlib.Path:
    """The path from the root on, without . and .. in it; a path in a bucket as it is."""
    return path if in_bucket(path) else pathlib.Path(os.path.abspath(path))


def bucket_of(url: str) -> str:
    """The bucket that a URL names, such as gs://bucket."""
    scheme, _, rest = url.partition(_URL)
    return f"{scheme}{_URL}{rest.partition('/')[0]}"


def _is_installed(library: str) -> bool:
    try:
        return importlib.util.find_spec(library) is not None
    except ValueError:  # what a module that is set to None in sys.modules leads to
        return False
