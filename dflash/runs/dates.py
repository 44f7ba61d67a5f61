"""Date of a run, fixed at its first start and shared by all of its processes.

Chat templates may print the date, so prompts depend on it. It must not change when a run is
resumed the next day, or when its hosts start around midnight.
"""

import datetime
import os
import pathlib

import jax

from dflash import errors
from dflash.parallel import distributed
from dflash.storage import files, paths

FILE = "date.txt"


def find(directory: str | os.PathLike | None, *, shared: bool = False) -> datetime.date:
    """Returns the date stored in a work directory, else today.

    All processes of a run must call this.

    Args:
      directory: Work directory, which may not exist yet; None for a run without one.
      shared: Store the date for other runs that share the directory; the first run decides.
    Raises:
      WorkdirError: The stored text is not a date.
    """
    date = datetime.date.today()
    if directory is not None and jax.process_index() == 0:
        path = paths.to_path(directory) / FILE
        if shared:
            with files.explained(path):
                files.create(path, f"{date}\n")
        date = _read(path) or date
    return datetime.date.fromordinal(distributed.broadcast(date.toordinal()))


def _read(path: pathlib.Path) -> datetime.date | None:
    try:
        return datetime.date.fromisoformat(path.read_text(encoding="utf-8").strip())
    except (FileNotFoundError, NotADirectoryError):
        return None  # `RunDirectory` reports any problem with the directory itself.
    except (OSError, ValueError) as error:
        raise errors.WorkdirError(
            f"{path}: not a date such as 2026-01-31: correct it, or delete it to use today's"
        ) from error
