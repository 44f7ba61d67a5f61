"""Shards of a run, which divide a list of work items and share a work directory.

Shard i of n processes items i, i + n, … independently of the others. Its files have its number in
their names, such as outputs.2-of-8.jsonl; the file that marks it as finished is written last.
"""

import dataclasses
import os
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import TypeVar

from dflash import errors
from dflash.storage import paths

AUTO = "auto"
_NAME = re.compile(r"\.(\d+)-of-(\d+)(?=\.)")

Item = TypeVar("Item")


@dataclasses.dataclass(frozen=True)
class Shard:
    """One of several runs that divide a list of items."""

    index: int
    count: int

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    def file(self, name: str) -> str:
        """Returns a file name with the shard's number, such as outputs.2-of-8.jsonl."""
        stem, dot, suffix = name.rpartition(".")
        return f"{stem}.{self.index}-of-{self.count}{dot}{suffix}"

    def of(self, items: Sequence[Item]) -> Sequence[Item]:
        """Returns the shard's items of a list."""
        return items[self.index :: self.count]

    def all(self) -> list["Shard"]:
        """Returns all shards of the list."""
        return [Shard(index, self.count) for index in range(self.count)]


WHOLE = Shard(0, 1)


def parse(text: str | None, environment: Mapping[str, str]) -> Shard | None:
    """Parses the flag --shard.

    Args:
      text: "i/n"; "auto" to read the index of a Kubernetes Job or Slurm array; None for no shard.
    Raises:
      ConfigError: The text is invalid or out of range, or the environment names no shard.
    """
    if text is None:
        return None
    if text == AUTO:
        return _from_environment(environment)
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if not match:
        raise errors.ConfigError(f"--shard: expected i/n, such as 0/8, or {AUTO}, got {text!r}")
    return _checked(int(match[1]), int(match[2]), text)


def shards_in(directory: pathlib.Path, name: str) -> list[Shard]:
    """Returns the shards that have a file of this name in a directory, in order."""
    stem, _, suffix = name.rpartition(".")
    shards = []
    for path in directory.glob(f"{stem}.*-of-*.{suffix}"):
        match = _NAME.search(path.name)
        if match:
            shards.append(Shard(int(match[1]), int(match[2])))
    return sorted(shards, key=lambda shard: (shard.count, shard.index))


def check_count(directory: pathlib.Path, name: str, shard: Shard) -> None:
    """Raises if a directory is divided into another number of shards."""
    other_counts = {other.count for other in shards_in(directory, name)} - {shard.count}
    if other_counts:
        raise errors.WorkdirError(
            f"{directory}: is divided into {min(other_counts)} shards, not {shard.count}: "
            f"continue with --shard=i/{min(other_counts)}, or use another --workdir"
        )


def is_divided(directory: str | os.PathLike | None, name: str) -> bool:
    """Returns whether a work directory holds files of this name that belong to shards."""
    return directory is not None and bool(shards_in(paths.to_path(directory), name))


def missing(directory: pathlib.Path, name: str, count: int) -> list[Shard]:
    """Returns the shards, of `count`, that have no file of this name yet."""
    present = set(shards_in(directory, name))
    return [shard for shard in Shard(0, count).all() if shard not in present]


def check_finished(directory: pathlib.Path, unfinished: Sequence[Shard]) -> None:
    """Raises if any shards of a directory are unfinished."""
    if unfinished:
        raise errors.WorkdirError(
            f"{directory}: not all shards have finished: {listed(unfinished)}: run each of these "
            "with --shard"
        )


def listed(shards: Sequence[Shard], limit: int = 8) -> str:
    """Returns the shards as text, such as "0/8, 3/8 and 4 more"."""
    shown = ", ".join(map(str, shards[:limit]))
    return shown if len(shards) <= limit else f"{shown} and {len(shards) - limit} more"


def _from_environment(environment: Mapping[str, str]) -> Shard:
    for index, count, first in (
        ("JOB_COMPLETION_INDEX", "JOB_COMPLETION_COUNT", None),
        ("SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_COUNT", "SLURM_ARRAY_TASK_MIN"),
    ):
        if index not in environment:
            continue
        try:
            number, total = int(environment[index]), int(environment[count])
            number -= int(environment.get(first, 0))
        except KeyError:
            raise errors.ConfigError(
                f"--shard={AUTO}: {index} is set, but {count}, the number of shards, is not: set it"
            ) from None
        except ValueError as error:
            raise errors.ConfigError(f"--shard={AUTO}: {index}, {count}: {error}") from None
        return _checked(number, total, AUTO)
    raise errors.ConfigError(
        f"--shard={AUTO}: neither JOB_COMPLETION_INDEX nor SLURM_ARRAY_TASK_ID is set: "
        "give --shard=i/n"
    )


def _checked(index: int, count: int, text: str) -> Shard:
    if count < 1 or not 0 <= index < count:
        raise errors.ConfigError(
            f"--shard={text}: shard {index} of {count} is out of range: the shards are 0 to n - 1"
        )
    return Shard(index, count)
