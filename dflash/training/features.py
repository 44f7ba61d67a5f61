"""The target's features of the rows of a corpus: computed once, then read whenever a row comes.

    DIR/part-00000/process-0.features.bfloat16.npy, …     some rows, each in one process's file
    DIR/part-00000/part.json                              which rows these are; written last

The rows are in the order of the corpus's first pass, so that a run caches no more of them than it
reads, and a longer run adds the next ones. part.json says that a part is whole: a killed build
continues after the last whole part, also on another number of processes. Every process reads the
files of all.
"""

import bisect
import dataclasses
import functools
import hashlib
import io
import itertools
import json
import math
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import ml_dtypes
import numpy as np

from dflash import errors
from dflash.data.batches import Batches
from dflash.data.mixture import Mixture
from dflash.parallel import agreement
from dflash.storage import files

Arrays = dict[str, np.ndarray]

_PART_BYTES = 256 * 2**20  # of each process
_OPEN_FILES = 256
_HEAD_BYTES = 4096  # of a file, within which its rows begin
_FACTS = "part.json"


@dataclasses.dataclass(frozen=True)
class _Part:
    """Rows `begin` to `end` of a cache, in batches that were computed together.

    Attributes:
      directory: where its files are.
      begin: number of its first row.
      end: number after its last row.
      batch_size: rows per batch; the last batch may go on beyond `end`.
      rows: rows of a batch that each process has written, by process.
      sizes: bytes of the files, by name.
    """

    directory: pathlib.Path
    begin: int
    end: int
    batch_size: int
    rows: Mapping[int, Sequence[int]]
    sizes: Mapping[str, int]

    def find(self, number: int) -> tuple[int, int]:
        """(process, row of its files) of a row."""
        batch, place = divmod(number - self.begin, self.batch_size)
        process = next(one for one, rows in self.rows.items() if place in rows)
        rows = self.rows[process]
        return process, batch * len(rows) + rows.index(place)


@dataclasses.dataclass(frozen=True)
class _StoredArray:
    """Rows in a file.

    Attributes:
      file: where.
      begin: place of the first row in the file, in bytes.
      shape: of a row.
      dtype: of its values.
    """

    file: pathlib.Path
    begin: int
    shape: tuple[int, ...]
    dtype: np.dtype

    def row(self, number: int) -> np.ndarray:
        """A row; from a file system, it is mapped into memory and read as it is used."""
        size = math.prod(self.shape) * self.dtype.itemsize
        begin = self.begin + number * size
        try:
            data = files.view(self.file, begin, begin + size)
        except (OSError, ValueError) as error:
            raise _damaged(self.file) from error
        return data.view(self.dtype).reshape(self.shape)


class FeatureCache:
    """Features of a corpus's rows, by their number in the order of its first pass.

    Attributes:
      directory: where they are.
    """

    def __init__(self, directory: pathlib.Path, parts: Sequence[_Part]):
        self.directory = directory
        self._parts = parts
        self._ends = [part.end for part in parts]
        self._files = functools.lru_cache(maxsize=_OPEN_FILES)(self._open)

    @property
    def num_rows(self) -> int:
        """Number of the rows, which are the first ones of the order."""
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, number: int) -> Arrays:
        """The arrays of a row, without an axis of rows.

        Raises:
          InputError: a file is damaged.
        """
        part = bisect.bisect_right(self._ends, number)
        process, row = self._parts[part].find(number)
        return {name: stored.row(row) for name, stored in self._files(part, process).items()}

    def _open(self, part: int, process: int) -> dict[str, _StoredArray]:
        found = self._parts[part]
        names = [name for name in found.sizes if _writer(name) == process]
        return dict(_load(found.directory / name, found.sizes[name]) for name in names)


class CachedBatches:
    """The batches of a mixture, with cached features."""

    def __init__(self, batches: Batches, mixture: Mixture, caches: Sequence[FeatureCache]):
        """Begins where `batches` stands.

        Args:
          batches: batches of the mixture.
          mixture: where rows are read.
          caches: features of every corpus; see `open_cache`.
        """
        self._batches, self._mixture, self._caches = batches, mixture, caches
        self._numbers = [_inverse(mixture.order(corpus, 0)) for corpus in range(len(caches))]

    def __next__(self) -> Arrays:
        places = self._batches.draw()
        rows: dict[int, Arrays] = {}

        def read(place: int) -> None:
            corpus, row = places[place]
            rows[place] = self._caches[corpus][self._numbers[corpus][row]]

        calls = [functools.partial(read, place) for place in range(len(places))]
        files.call_all(self._caches[0].directory, calls)
        features = {name: np.stack([rows[i][name] for i in range(len(rows))]) for name in rows[0]}
        return self._mixture.read(places) | features

    def state(self) -> dict[str, Any]:
        """Where the next batch begins."""
        return self._batches.state()


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
    order: np.ndarray,
    num_rows: int,
    rows: Mapping[int, Sequence[int]],
    compute: Callable[[Sequence[int]], Arrays],
    progress: Callable[[int], None],
) -> FeatureCache:
    """Opens the cache of a corpus and computes the missing part of it; every process calls this.

    Args:
      directory: directory of this cache alone, which every process sees.
      order: int64; all rows of the corpus, in the order of its first pass.
      num_rows: number of rows that are needed, the first ones of this order.
      rows: numbers of the rows of a batch that each process computes, by process.
      compute: (numbers of this process's rows of a batch) -> arrays [rows, …] to store; the
        processes compute a batch together.
      progress: called with the number of rows that are there.
    Raises:
      WorkdirError: the cache cannot be written.
      InputError: it is damaged, or not the same to all processes.
    """
    with files.explained(directory):
        directory.mkdir(parents=True, exist_ok=True)
        parts = _whole_parts(directory)
        _check_files(parts)
        _check_shared(directory, len(parts))
        _build(directory, parts, order, min(num_rows, len(order)), rows, compute, progress)
        agreement.barrier("feature cache")
    return FeatureCache(directory, parts)


def _whole_parts(directory: pathlib.Path) -> list[_Part]:
    """All parts from the first one on that are whole."""
    parts: list[_Part] = []
    while (facts := _part_path(directory, len(parts)) / _FACTS).exists():
        try:
            read = json.loads(facts.read_text())
            by_process = {int(process): rows for process, rows in read.pop("rows").items()}
            parts.append(_Part(facts.parent, rows=by_process, **read))
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            raise _damaged(facts) from error
    return parts


def _check_files(parts: Sequence[_Part]) -> None:
    """Compares files with the sizes that they were written with; each process looks at some."""
    for part in parts[jax.process_index() :: jax.process_count()]:
        for name, size in part.sizes.items():
            file = part.directory / name
            if not file.exists() or file.stat().st_size != size:
                raise _damaged(file)


def _check_shared(directory: pathlib.Path, seen: Any) -> None:
    """Refuses a directory in which another process sees something else."""
    if any(other != seen for other in agreement.gather("feature cache", seen)):
        raise errors.InputError(
            f"{directory}: not the same directory for all processes: set train.feature_cache to "
            "one that all of them see"
        )


def _build(
    directory: pathlib.Path,
    parts: list[_Part],
    order: np.ndarray,
    num_rows: int,
    rows: Mapping[int, Sequence[int]],
    compute: Callable[[Sequence[int]], Arrays],
    progress: Callable[[int], None],
) -> None:
    """Computes rows up to `num_rows`, and adds their parts to `parts`."""
    begin = parts[-1].end if parts else 0
    mine = rows[jax.process_index()]
    writers = _writers(rows)
    batch_size = len(set().union(*rows.values()))
    for group in _groups(order, begin, num_rows, batch_size, mine, compute):
        path = _part_path(directory, len(parts))
        _clear(path)
        own = [mine.index(row) for row in writers.get(jax.process_index(), ())]
        written = _write_files(path, [{k: x[own] for k, x in one.items()} for one in group])
        sizes = agreement.gather("files of the feature cache", written)
        end = min(begin + len(group) * batch_size, len(order))
        every_size = dict(itertools.chain.from_iterable(one.items() for one in sizes))
        part = _Part(path, begin, end, batch_size, writers, every_size)
        if jax.process_index() == 0:
            facts = {k: v for k, v in dataclasses.asdict(part).items() if k != "directory"}
            files.write_whole(path / _FACTS, json.dumps(facts))
        parts.append(part)
        begin = end
        progress(end)


def _groups(
    order: np.ndarray,
    begin: int,
    end: int,
    batch_size: int,
    mine: Sequence[int],
    compute: Callable[[Sequence[int]], Arrays],
) -> Iterator[list[Arrays]]:
    """Yields computed batches in groups that fill a part, as large on every process.

    The batch that holds the corpus's last row goes on with its first ones.
    """
    group: list[Arrays] = []
    size = None
    for first in range(begin, end, batch_size):
        group.append(compute([int(order[(first + row) % len(order)]) for row in mine]))
        if size is None:
            num_bytes = max(1, sum(array.nbytes for array in group[0].values()))
            wanted = agreement.gather("batches of a part", math.ceil(_PART_BYTES / num_bytes))
            size = max(wanted)
        if len(group) == size:
            yield group
            group = []
    if group:
        yield group


def _writers(rows: Mapping[int, Sequence[int]]) -> dict[int, list[int]]:
    """Rows of a batch that each process writes: of several that compute a row, the first."""
    owner = {row: process for process in sorted(rows, reverse=True) for row in rows[process]}
    return {
        process: [row for row in mine if owner[row] == process]
        for process, mine in sorted(rows.items())
        if process in owner.values()
    }


def _clear(path: pathlib.Path) -> None:
    """Makes a part's directory, without what a kill has left in it."""
    if jax.process_index() == 0:
        files.remove_tree(path)
        path.mkdir()
    agreement.barrier("part of the feature cache")
    _check_shared(path.parent, path.is_dir())


def _write_files(path: pathlib.Path, group: list[Arrays]) -> dict[str, int]:
    """Writes this process's rows of a part; returns the files' sizes by name."""
    sizes = {}
    for name in group[0]:
        array = np.concatenate([batch[name] for batch in group])
        if not len(array):  # others write all of its rows
            continue
        if array.dtype == ml_dtypes.bfloat16:  # which numpy's file format does not have
            name, array = f"{name}.bfloat16", array.view(np.uint16)
        path_of = path / f"process-{jax.process_index()}.{name}.npy"
        with path_of.open("wb") as file:
            np.lib.format.write_array(file, np.ascontiguousarray(array), allow_pickle=False)
            sizes[path_of.name] = file.tell()
        files.sync(path_of)
    return sizes


def _writer(name: str) -> int:
    """The process that has written a file of this name."""
    return int(name.partition(".")[0].removeprefix("process-"))


def _load(file: pathlib.Path, size: int) -> tuple[str, _StoredArray]:
    """The name of an array, and where its rows are.

    Args:
      file: in numpy's format.
      size: of the file, in bytes.
    """
    try:
        head = io.BytesIO(files.view(file, 0, min(size, _HEAD_BYTES)).tobytes())
        version = np.lib.format.read_magic(head)
        old = version == (1, 0)
        read = np.lib.format.read_array_header_1_0 if old else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(head)
    except (OSError, ValueError) as error:
        raise _damaged(file) from error
    _, name, *stored = file.name.removesuffix(".npy").split(".")
    dtype = np.dtype(ml_dtypes.bfloat16) if stored else dtype
    return name, _StoredArray(file, head.tell(), tuple(shape[1:]), dtype)


def _damaged(file: pathlib.Path) -> errors.InputError:
    cache = file.parent.parent
    return errors.InputError(f"{file}: damaged; delete {cache} to compute it again")


def _inverse(order: np.ndarray) -> np.ndarray:
    """Where each number stands in a permutation."""
    found = np.empty_like(order)
    found[order] = np.arange(len(order))
    return found


def _part_path(directory: pathlib.Path, number: int) -> pathlib.Path:
    return directory / f"part-{number:05d}"
