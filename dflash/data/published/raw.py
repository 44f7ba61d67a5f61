"""Raw files of published data sets: locations, downloads and rows.

RAW_DIR/gsm8k/test.jsonl
RAW_DIR/humaneval/HumanEval.jsonl.gz

Missing files are downloaded; existing ones are used unchanged, so a machine without a network only
needs copies. RAW_DIR corresponds to `manual_dir` of tensorflow-datasets.
"""

import dataclasses
import gzip
import http.client
import json
import os
import pathlib
import shutil
import sys
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from typing import Any, BinaryIO

from dflash import errors
from dflash.data import store
from dflash.text import jsonl

TIMEOUT_S = 60.0  # maximum time without receiving a byte


@dataclasses.dataclass(frozen=True)
class RawFile:
    """Published file of rows."""

    folder: str
    url: str

    @property
    def name(self) -> str:
        """File name; its suffix determines the format."""
        return self.url.rpartition("/")[2]


def raw_directory(raw_dir: str | None, data_dir: str | None = None) -> pathlib.Path:
    """Returns the directory of raw files, by default raw/ in the directory of data sets."""
    if raw_dir is not None:
        return pathlib.Path(raw_dir).expanduser().absolute()
    return store.data_directory(data_dir) / "raw"


def fetch(file: RawFile, directory: pathlib.Path) -> pathlib.Path:
    """Returns the path of a raw file; downloads the file if it is missing."""
    path = directory / file.folder / file.name
    if path.is_file():
        return path
    try:
        with store.locked(path.parent):
            if not path.is_file():  # another process may have been faster
                print(f"data: downloading {file.url}", file=sys.stderr)
                _download(file.url, path)
    except errors.InputError as error:
        raise errors.InputError(
            f"{path}: missing: put a copy of {file.url} there ({error})"
        ) from error
    return path


def rows(path: pathlib.Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields (place, row) pairs of a raw file, where a place is a text such as "test.jsonl:7"."""
    readers = [read for ending, read in _READERS.items() if path.name.endswith(ending)]
    if not readers:
        raise errors.InputError(f"{path}: unknown format; expected {', '.join(_READERS)}")
    empty = True
    try:
        for place, row in readers[0](path):
            empty = False
            if not isinstance(row, Mapping):
                raise errors.InputError(f"{place}: expected an object, not {jsonl.quote(row)}")
            yield place, row
    except OSError as error:
        raise errors.InputError(f"{path}: cannot be read: {error.strerror or error}") from error
    if empty:
        raise errors.InputError(f"{path}: contains no rows; delete it to download it again")


def _download(url: str, path: pathlib.Path) -> None:
    """Downloads a URL to a file, completely or not at all; raises InputError on failure."""
    part = path.with_name(f".{path.name}.part")
    request = urllib.request.Request(url, headers={"User-Agent": "dflash"})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response, part.open("wb") as out:
            shutil.copyfileobj(response, out)
            out.flush()
            os.fsync(out.fileno())
        part.replace(path)
    except (OSError, http.client.HTTPException) as error:
        part.unlink(missing_ok=True)
        reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
        raise errors.InputError(f"downloading failed: {reason}") from error


def _lines(path: pathlib.Path, lines: BinaryIO) -> Iterator[tuple[str, Any]]:
    for place, line in jsonl.placed_lines(lines, str(path)):
        try:
            yield place, jsonl.parse_json(jsonl.decode(line))
        except errors.InputError as error:
            raise errors.InputError(f"{place}: {error}") from error


def _jsonl(path: pathlib.Path) -> Iterator[tuple[str, Any]]:
    with path.open("rb") as lines:
        yield from _lines(path, lines)


def _jsonl_gz(path: pathlib.Path) -> Iterator[tuple[str, Any]]:
    try:
        with gzip.open(path, "rb") as lines:
            yield from _lines(path, lines)
    except (EOFError, gzip.BadGzipFile) as error:
        raise errors.InputError(
            f"{path}: damaged: {error}; delete it to download it again"
        ) from error


def _json(path: pathlib.Path) -> Iterator[tuple[str, Any]]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise errors.InputError(f"{path}: not JSON in UTF-8: {error}") from error
    if not isinstance(content, list):
        raise errors.InputError(f"{path}: expected a list, not {jsonl.quote(content)}")
    for index, row in enumerate(content):
        yield f"{path}[{index}]", row


def _parquet(path: pathlib.Path) -> Iterator[tuple[str, Any]]:
    import pyarrow
    from pyarrow import parquet

    try:
        table = parquet.read_table(path)
    except pyarrow.ArrowException as error:
        reason = str(error).partition("\n")[0]
        raise errors.InputError(f"{path}: not a parquet file: {reason}") from error
    for index, row in enumerate(table.to_pylist()):
        yield f"{path}[{index}]", row


_READERS: Mapping[str, Callable[[pathlib.Path], Iterator[tuple[str, Any]]]] = {
    ".jsonl": _jsonl,
    ".jsonl.gz": _jsonl_gz,
    ".json": _json,
    ".parquet": _parquet,
}
