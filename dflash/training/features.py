"""Cache of the target's features for the rows of a corpus.

    DIR/part-00000/process-0.features.bfloat16.npy, …     rows of the part, by writing process
    DIR/part-00000/part.json                              range of the rows; written last

The rows are in the order of the corpus's first pass, so that a run caches only the rows that it
reads, and a longer run appends more. A part is complete once it has its part.json. A killed build
resumes after the last complete part, also with another number of processes. Every process reads
the files of all processes.
"""

import bisect
import dataclasses
import functools
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

_PART_BYTES = 256 * 2**20  # Size of a part per process.
_OPEN_FILES = 256
_HEAD_BYTES = 4096  # Bytes to read of a file, enough for the header of any array.
_FACTS = "part.json"


@dataclasses.dataclass(frozen=True)
class _Part:
    """Rows `begin` to `end` of a cache, stored in the batches that computed them.

    Attributes:
      batch_size: Rows per batch; the last batch may extend beyond `end`.
      rows: Rows of a batch that each process has written, by process.
      sizes: Sizes of the files in bytes, by name.
    """

    directory: pathlib.Path
    begin: int
    end: int
    batch_size: int
    rows: Mapping[int, Sequence[int]]
    sizes: Mapping[str, int]

    def find(self, number: int) -> tuple[int, int]:
        """Returns the process that has written a row, and the row's index in its files."""
        batch, place = divmod(number - self.begin, self.batch_size)
        process = next(index for index, rows in self.rows.items() if place in rows)
        rows = self.rows[process]
        return process, batch * len(rows) + rows.index(place)


@dataclasses.dataclass(frozen=True)
class _StoredArray:
    """Array of rows in a file.

    Attributes:
      begin: Offset of the first row in the file, in bytes.
    """

    file: pathlib.Path
    begin: int
    shape: tuple[int, ...]
    dtype: np.dtype

    def row(self, number: int) -> np.ndarray:
        """Returns a row; on a file system it is memory-mapped and read lazily."""
        size = math.prod(self.shape) * self.dtype.itemsize
        begin = self.begin + number * size
        try:
            data = files.view(self.file, begin, begin + size)
        except (OSError, ValueError) as error:
            raise _damaged(self.file) from error
        return data.view(self.dtype).reshape(self.shape)


class FeatureCache:
    """Features of a corpus's rows, indexed by their position in the first pass."""

    def __init__(self, directory: pathlib.Path, parts: Sequence[_Part]):
        self.directory = directory
        self._parts = parts
        self._ends = [part.end for part in parts]
        self._files = functools.lru_cache(maxsize=_OPEN_FILES)(self._open)

    def __getitem__(self, number: int) -> Arrays:
        """Returns the arrays of a row, without a row axis."""
        part = bisect.bisect_right(self._ends, number)
        process, row = self._parts[part].find(number)
        return {name: stored.row(row) for name, stored in self._files(part, process).items()}

    def _open(self, index: int, process: int) -> dict[str, _StoredArray]:
        part = self._parts[index]
        names = [name for name in part.sizes if _writer(name) == process]
        return dict(_load(part.directory / name, part.sizes[name]) for name in names)


class CachedBatches:
    """Batches of a mixture, with cached features."""

    def __init__(self, batches: Batches, mixture: Mixture, caches: Sequence[FeatureCache]):
        """Starts at the current position of `batches`."""
        self._batches, self._mixture, self._caches = batches, mixture, caches
        # The inverse of each corpus's order: the position of a row in the first pass.
        self._numbers = [np.argsort(mixture.order(corpus, 0)) for corpus in range(len(caches))]

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
        """Returns the position of the next batch, as JSON values."""
        return self._batches.state()


def fingerprint(directory: pathlib.Path) -> list[tuple[str, int, int]]:
    """Returns names, sizes in bytes and modification times of a checkpoint's files."""
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
    """Opens the cache of a corpus and computes missing rows; all processes must call it.

    Args:
      directory: Directory of this cache alone, visible to every process.
      order: All rows of the corpus in the order of its first pass, int64.
      num_rows: Number of rows to have in the cache, from the beginning of `order`.
      rows: Indices of the rows of a batch that each process computes, by process.
      compute: Maps the corpus rows of this process in a batch to arrays [rows, …] to store. All
        processes compute a batch together.
      progress: Called with the number of rows in the cache.
    Raises:
      WorkdirError: The cache cannot be written.
      InputError: The cache is damaged, or processes see different directories.
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
    """Returns the complete parts, up to the first incomplete one."""
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
    """Raises if a file does not have its recorded size; each process checks some of the parts."""
    for part in parts[jax.process_index() :: jax.process_count()]:
        for name, size in part.sizes.items():
            file = part.directory / name
            if not file.exists() or file.stat().st_size != size:
                raise _damaged(file)


def _check_shared(directory: pathlib.Path, seen: Any) -> None:
    if any(other != seen for other in agreement.gather("feature cache", seen)):
        raise errors.InputError(
            f"{directory}: is not shared by all processes: set train.feature_cache to a directory "
            "that all of them see"
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
    """Computes rows up to `num_rows` and appends their parts to `parts`."""
    begin = parts[-1].end if parts else 0
    own_rows = rows[jax.process_index()]
    writers = _writers(rows)
    batch_size = len(set().union(*rows.values()))
    for group in _groups(order, begin, num_rows, batch_size, own_rows, compute):
        path = _part_path(directory, len(parts))
        _clear(path)
        written_rows = [own_rows.index(row) for row in writers.get(jax.process_index(), ())]
        written = _write_files(
            path, [{k: x[written_rows] for k, x in arrays.items()} for arrays in group]
        )
        sizes = agreement.gather("files of the feature cache", written)
        end = min(begin + len(group) * batch_size, len(order))
        every_size = dict(itertools.chain.from_iterable(by_name.items() for by_name in sizes))
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
    own_rows: Sequence[int],
    compute: Callable[[Sequence[int]], Arrays],
) -> Iterator[list[Arrays]]:
    """Yields computed batches in groups that fill a part; sizes are equal on all processes.

    The last batch of the corpus is filled up with the corpus's first rows.
    """
    group: list[Arrays] = []
    size = None
    for first in range(begin, end, batch_size):
        group.append(compute([int(order[(first + row) % len(order)]) for row in own_rows]))
        if size is None:
            num_bytes = max(1, sum(array.nbytes for array in group[0].values()))
            sizes = agreement.gather("batches of a part", math.ceil(_PART_BYTES / num_bytes))
            size = max(sizes)
        if len(group) == size:
            yield group
            group = []
    if group:
        yield group


def _writers(rows: Mapping[int, Sequence[int]]) -> dict[int, list[int]]:
    """Returns the rows of a batch that each process writes.

    If several processes compute a row, the first of them writes it.
    """
    owner = {row: process for process in sorted(rows, reverse=True) for row in rows[process]}
    return {
        process: [row for row in process_rows if owner[row] == process]
        for process, process_rows in sorted(rows.items())
        if process in owner.values()
    }


def _clear(path: pathlib.Path) -> None:
    """Creates an empty directory for a part, and removes what a killed run left in it."""
    if jax.process_index() == 0:
        files.remove_tree(path)
        path.mkdir()
    agreement.barrier("part of the feature cache")
    _check_shared(path.parent, path.is_dir())


def _write_files(path: pathlib.Path, group: list[Arrays]) -> dict[str, int]:
    """Writes this process's rows of a part and returns the files' sizes in bytes, by name."""
    sizes = {}
    for name in group[0]:
        array = np.concatenate([batch[name] for batch in group])
        if not len(array):  # Other processes write all rows.
            continue
        if array.dtype == ml_dtypes.bfloat16:  # NumPy's file format has no bfloat16.
            name, array = f"{name}.bfloat16", array.view(np.uint16)
        path_of = path / f"process-{jax.process_index()}.{name}.npy"
        with path_of.open("wb") as file:
            np.lib.format.write_array(file, np.ascontiguousarray(array), allow_pickle=False)
            sizes[path_of.name] = file.tell()
        files.sync(path_of)
    return sizes


def _writer(name: str) -> int:
    return int(name.partition(".")[0].removeprefix("process-"))


def _load(file: pathlib.Path, size: int) -> tuple[str, _StoredArray]:
    """Returns the name of the array in a file and the location of its rows."""
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


def _part_path(directory: pathlib.Path, number: int) -> pathlib.Path:
    return directory / f"part-{number:05d}"
