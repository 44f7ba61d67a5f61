"""The target's features, computed once over the data and streamed from disk ever after.

    DIR/share-0-of-1/part-00000/tokens.npy, features.bfloat16.npy, …    some batches of rows
    DIR/share-0-of-1/part-00000/next.json                               where the data goes on
    DIR/share-0-of-1/done.json                                          how many rows, once all are

A part appears whole or not at all, so a killed build goes on after the last of them.
"""

import dataclasses
import hashlib
import json
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from dflash import errors
from dflash.runs import files
from dflash.training.trainer import Batches

Arrays = dict[str, np.ndarray]

_PART_BYTES = 64 * 2**20
_DONE, _NEXT = "done.json", "next.json"


@dataclasses.dataclass(frozen=True)
class FeatureCache:
    """Rows of one process's share of the data, with features, in files that are mapped."""

    directory: pathlib.Path
    parts: tuple[Mapping[str, np.ndarray], ...]

    @property
    def num_rows(self) -> int:
        """Of all parts together."""
        return sum(len(next(iter(part.values()))) for part in self.parts)

    def rows(self, numbers: Sequence[int]) -> Arrays:
        """Reads the rows of these numbers."""
        ends = np.cumsum([len(next(iter(part.values()))) for part in self.parts])
        places = []
        for number in numbers:
            part = int(np.searchsorted(ends, number, side="right"))
            places.append((self.parts[part], number - (ends[part - 1] if part else 0)))
        return {name: np.stack([part[name][row] for part, row in places]) for name in self.parts[0]}


class CachedBatches:
    """Endless batches from a cache, each epoch in an order of its own."""

    def __init__(self, cache: FeatureCache, rows: int, seed: int, state: Any = None):
        """Args:

        cache: to read.
        rows: per batch, of this process.
        seed: of the orders.
        state: of an earlier iterator over the same cache, to go on after it.
        """
        self._cache, self._rows, self._seed = cache, rows, seed
        self._per_epoch = cache.num_rows // rows
        if not self._per_epoch:
            raise errors.InputError(
                f"{cache.directory}: {cache.num_rows} rows do not fill a batch of {rows}"
            )
        self._number = 0 if state is None else int(state["batch"])

    def __next__(self) -> Arrays:
        epoch, place = divmod(self._number, self._per_epoch)
        order = np.random.default_rng((self._seed, epoch)).permutation(self._cache.num_rows)
        self._number += 1
        return self._cache.rows(order[place * self._rows : (place + 1) * self._rows].tolist())

    def state(self) -> dict[str, int]:
        """Where the next batch begins."""
        return {"batch": self._number}


def cache_key(*content: Any) -> str:
    """Twelve hex digits over everything that cached features hang on, as JSON has it."""
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(canonical.encode()).hexdigest()[:12]


def fingerprint(directory: pathlib.Path) -> list[tuple[str, int, int]]:
    """Names, sizes and times of a checkpoint's weight files: other weights, other features."""
    paths = sorted(path for path in directory.rglob("*") if path.is_file())
    stats = [(path, path.stat()) for path in paths if path.suffix not in (".md", ".txt")]
    return [(str(path.relative_to(directory)), s.st_size, s.st_mtime_ns) for path, s in stats]


def open_cache(
    directory: pathlib.Path,
    *,
    share: int,
    shares: int,
    num_batches: int,
    batches: Callable[[Any], Batches],
    compute: Callable[[Arrays], Arrays],
    progress: Callable[[int], None],
) -> FeatureCache:
    """Opens a cache, after computing what it lacks; every process calls this.

    Args:
      directory: of this cache alone.
      share: which rows of every batch this process has.
      shares: how many such shares there are.
      num_batches: to compute: one pass over the data.
      batches: (state or None) -> batches of this process's rows from there on.
      compute: a batch -> what to keep beside it.
      progress: told the number of finished batches.
    Raises:
      WorkdirError: the cache cannot be written.
      InputError: it is damaged.
    """
    mine = directory / f"share-{share}-of-{shares}"
    with files.explained(mine):
        mine.mkdir(parents=True, exist_ok=True)
        if not (mine / _DONE).exists():
            _build(mine, num_batches, batches, compute, progress)
        done = json.loads((mine / _DONE).read_text())
    parts = tuple(_open_part(mine / _part_name(i)) for i in range(done["parts"]))
    return FeatureCache(mine, parts)


def _build(mine, num_batches, batches, compute, progress) -> None:
    for leftover in mine.glob("*.partial"):
        shutil.rmtree(leftover)
    part, finished, state = 0, 0, None
    while (mine / _part_name(part)).is_dir():
        facts = json.loads((mine / _part_name(part) / _NEXT).read_text())
        part, finished, state = part + 1, facts["batches"], facts["state"]
    source = batches(state)
    for group in _groups(source, compute, num_batches - finished):
        finished += len(group)
        _write_part(mine / _part_name(part), group, {"batches": finished, "state": source.state()})
        part += 1
        progress(finished)
    files.write_whole(mine / _DONE, json.dumps({"parts": part, "batches": finished}))


def _groups(source, compute, count: int) -> Iterator[list[Arrays]]:
    """Computed batches, as many together as make a part."""
    group: list[Arrays] = []
    for _ in range(count):
        batch = next(source)
        group.append({**batch, **compute(batch)})
        size = sum(array.nbytes for one in group for array in one.values())
        if size >= _PART_BYTES:
            yield group
            group = []
    if group:
        yield group


def _write_part(path: pathlib.Path, group: list[Arrays], facts: Mapping[str, Any]) -> None:
    partial = path.with_name(f"{path.name}.partial")
    partial.mkdir()
    for name in group[0]:
        array = np.concatenate([batch[name] for batch in group])
        if array.dtype == ml_dtypes.bfloat16:  # numpy's files have no word for it
            name, array = f"{name}.bfloat16", array.view(np.uint16)
        with (partial / f"{name}.npy").open("wb") as file:
            np.save(file, array)
            file.flush()
            os.fsync(file.fileno())
    files.write_whole(partial / _NEXT, json.dumps(facts))
    partial.rename(path)


def _open_part(path: pathlib.Path) -> dict[str, np.ndarray]:
    arrays = {}
    for file in sorted(path.glob("*.npy")):
        try:
            array = np.load(file, mmap_mode="r")
        except (OSError, ValueError) as error:
            raise errors.InputError(
                f"{file}: damaged; delete {path.parent.parent} to compute it again"
            ) from error
        name, _, stored = file.name.removesuffix(".npy").partition(".")
        arrays[name] = array.view(ml_dtypes.bfloat16) if stored else array
    if not arrays:
        raise errors.InputError(f"{path}: missing; delete {path.parent.parent} to start again")
    return arrays


def _part_name(number: int) -> str:
    return f"part-{number:05d}"
