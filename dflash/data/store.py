"""Directory of data sets, and its lock.

DATA_DIR/encoded/…    data sets as token ids; see `encoding`
DATA_DIR/prompts/…    held-out prompts of large data sets; see `training.train_job`
DATA_DIR/raw/…        files of published data sets; see `published.raw`
"""

import contextlib
import pathlib
from collections.abc import Iterator

from dflash import errors
from dflash.storage import files, paths


def data_directory(data_dir: str | None) -> pathlib.Path:
    """Returns the directory of data sets: `data_dir`, or one in the cache directory of the user."""
    if data_dir is not None:
        return pathlib.Path(data_dir).expanduser().absolute()
    return paths.cache_directory("datasets")


@contextlib.contextmanager
def locked(directory: pathlib.Path) -> Iterator[None]:
    """Locks a directory for this process; other processes wait."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with files.waiting_lock(directory / ".lock"):
            yield
    except OSError as error:
        reason = error.strerror or error
        raise errors.InputError(f"{directory}: cannot be written: {reason}") from error
