"""The date of a run: chosen at its first start, the same at every later one and in every process.

Chat templates may print the date, so it decides prompts: a run that is resumed the next day, or
whose hosts start around midnight, must not see another one.
"""

import datetime
import os
import pathlib

import jax
import numpy as np
from jax.experimental import multihost_utils

from dflash import errors
from dflash.storage import files, paths

FILE = "date.txt"


def find(directory: str | os.PathLike | None, *, shared: bool = False) -> datetime.date:
    """The date kept in a work directory, else today; all processes of a run call this.

    Args:
      directory: of the run; may not exist yet; None for a run that leaves nothing.
      shared: whether other runs have the directory too: the first one to ask decides for all.
    Raises:
      WorkdirError: what is kept is not a date.
    """
    date = datetime.date.today()
    if directory is not None and jax.process_index() == 0:
        path = paths.to_path(directory) / FILE
        if shared:
            with files.explained(path):
                files.create(path, f"{date}\n")
        date = _read(path) or date
    if jax.process_count() > 1:
        ordinal = multihost_utils.broadcast_one_to_all(np.int32(date.toordinal()))
        date = datetime.date.fromordinal(int(ordinal))
    return date


def _read(path: pathlib.Path) -> datetime.date | None:
    try:
        return datetime.date.fromisoformat(path.read_text(encoding="utf-8").strip())
    except (FileNotFoundError, NotADirectoryError):
        return None  # taking the directory says what is wrong with it
    except (OSError, ValueError) as error:
        raise errors.WorkdirError(
            f"{path}: not a date such as 2026-01-31: mend it, or delete it for today's"
        ) from error
