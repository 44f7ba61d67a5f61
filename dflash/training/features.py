"""The target's features: computed in one pass over the data, then streamed from disk.

    DIR/process-0-of-1/part-00000/tokens.npy, features.bfloat16.npy, …    rows of some batches
    DIR/process-0-of-1/part-00000/next.json                               position in the data

next.json is written last and says that a part is whole, so a killed build continues after the last
part that all processes have. Each process keeps the rows that its own devices need.
"""

import dataclasses
import functools
import hashlib
import itertools
import json
import math
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import ml_dtypes
import numpy as np

from dflash import errors
from dflash.parallel import agreement
from dflash.runs import files
from dflash.training.trainer import Batches

Arrays = dict[str, np.ndarray]

_PART_BYTES = 64 * 2**20
_NEXT = "next.json"


@dataclasses.dataclass(frozen=True)
class FeatureCache:
    """Rows with features of one process's share of the data, in memory-mapped files.

    Attributes:
      directory: where the parts are.
      parts: arrays [rows of the part, …] by name.
    """

    directory: pathlib.Path
    parts: tuple[Mapping[str, np.ndarray], ...]

    @property
    def num_rows(self) -> int:
        """Rows of all parts."""
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
    """Endless batches from a cache, each epoch in an order of its own.

    A row keeps its place in the batch, and each place has an order of its own. So all processes
    together read the same batches, whatever their number.
    """

    def __init__(self, cache: FeatureCache, rows: Sequence[int], seed: int, state: Any = None):
        """Begins where `state` says, else at the first batch.

        Args:
          cache: where rows are read.
          rows: numbers of the rows of a batch that this process reads.
          seed: seed of the orders.
          state: `state()` of an earlier iterator over the same data, to continue there.
        Raises:
          InputError: the cache holds less than a batch.
        """
        self._cache, self._size = cache, len(rows)
        self._per_epoch = cache.num_rows // len(rows)
        if not self._per_epoch:
            raise errors.InputError(
                f"{cache.directory}: {cache.num_rows} rows do not fill a batch of {len(rows)}"
            )
        self._number = 0 if state is None else int(state["batch"])

        @functools.lru_cache(maxsize=1)  # it takes time in proportion to the rows
        def order(epoch: int) -> np.ndarray:  # [rows, batches of an epoch]
            generators = (np.random.default_rng((seed, epoch, row)) for row in rows)
            return np.stack([one.permutation(self._per_epoch) for one in generators])

        self._order = order

    def __next__(self) -> Arrays:
        epoch, place = divmod(self._number, self._per_epoch)
        self._number += 1
        found = self._order(epoch)[:, place] * self._size + np.arange(self._size)
        return self._cache.rows(found.tolist())

    def state(self) -> dict[str, int]:
        """Where the next batch begins."""
        return {"batch": self._number}


def cache_key(*content: Any) -> str:
    """Twelve hex digits of a hash of everything that cached features depend on, as JSON values."""
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(canonical.encode()).hexdigest()[:12]


def fingerprint(directory: pathlib.Path) -> list[tuple[str, int, int]]:
    """Names, sizes in bytes and modification times of a checkpoint's files."""
    paths = sorted(path for path in directory.rglob("*") if path.is_file())
    stats = [(path, path.stat()) for path in paths if path.suffix not in (".md", ".txt")]
    return [(str(path.relative_to(directory)), s.st_size, s.st_mtime_ns) for path, s in stats]


def open_cache(
    directory: pathlib.Path,
    *,
    num_batches: int,
    batches: Callable[[Any], Batches],
    compute: Callable[[Arrays], Arrays],
    progress: Callable[[int], None],
) -> FeatureCache:
    """Opens a cache and computes the missing part of it; every process calls this.

    Args:
      directory: directory of this cache alone.
      num_batches: batches of one pass over the data.
      batches: (state or None) -> batches of this process's rows from there on.
      compute: batch -> arrays to store beside it; the processes compute a batch together.
      progress: called with the number of finished batches.
    Raises:
      WorkdirError: the cache cannot be written.
      InputError: it is damaged.
    """
    mine = directory / f"process-{jax.process_index()}-of-{jax.process_count()}"
    with files.explained(mine):
        mine.mkdir(parents=True, exist_ok=True)
        # A kill may leave one process further than another, and all must compute the same batches.
        parts = min(agreement.from_all("parts of the feature cache", _count_whole(mine)))
        parts = _build(mine, parts, num_batches, batches, compute, progress)
    opened = tuple(_open_part(mine / _part_name(number)) for number in range(parts))
    return FeatureCache(mine, opened)


def _count_whole(mine: pathlib.Path) -> int:
    """Number of parts from the first one on that are whole."""
    return next(n for n in itertools.count() if not (mine / _part_name(n) / _NEXT).exists())


def _build(mine, part: int, num_batches: int, batches, compute, progress) -> int:
    """Computes the parts from number `part` on; returns the number of all parts."""
    finished, state = 0, None
    if part:
        facts = json.loads((mine / _part_name(part - 1) / _NEXT).read_text())
        finished, state = facts["batches"], facts["state"]
    if finished >= num_batches:
        return part
    source = batches(state)
    for group in _groups(source, compute, num_batches - finished):
        finished += len(group)
        _write_part(mine / _part_name(part), group, {"batches": finished, "state": source.state()})
        part += 1
        progress(finished)
    return part


def _groups(source, compute, count: int) -> Iterator[list[Arrays]]:
    """Yields computed batches in groups that fill a part, as large on every process."""
    group: list[Arrays] = []
    size = None
    for _ in range(count):
        batch = next(source)
        group.append({**batch, **compute(batch)})
        if size is None:
            num_bytes = sum(array.nbytes for array in group[0].values())
            wanted = agreement.from_all("batches of a part", math.ceil(_PART_BYTES / num_bytes))
            size = max(wanted)
        if len(group) == size:
            yield group
            group = []
    if group:
        yield group


def _write_part(path: pathlib.Path, group: list[Arrays], facts: Mapping[str, Any]) -> None:
    shutil.rmtree(path, ignore_errors=True)  # what a kill has left
    path.mkdir()
    for name in group[0]:
        array = np.concatenate([batch[name] for batch in group])
        if array.dtype == ml_dtypes.bfloat16:  # which numpy's file format does not have
            name, array = f"{name}.bfloat16", array.view(np.uint16)
        with (path / f"{name}.npy").open("wb") as file:
            np.save(file, array)
            file.flush()
            os.fsync(file.fileno())
    files.write_whole(path / _NEXT, json.dumps(facts))


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
