"""Corpora of encoded documents, in memory or on disk, with random access to documents.

    DIR/tokens.bin                             token ids of all documents, uint32
    DIR/offsets.npy, learned.npy, crc32.npy    index, 16 bytes per document
    DIR/facts.json                             written last; marks a complete corpus

Only the index is held in memory. The tokens of a document are read, and compared with their
checksum, when a row needs them, so opening a corpus takes as long as reading its index.
"""

import array
import dataclasses
import json
import os
import pathlib
import shutil
import tempfile
import zlib
from collections.abc import Iterable

import numpy as np

from dflash import errors
from dflash.storage import files

SUPERVISED = np.uint32(2**31)  # bit of supervised tokens, which a model learns to predict
_TOKENS, _FACTS = "tokens.bin", "facts.json"
_OFFSETS, _LEARNED, _CRC32 = _INDEX = "offsets.npy", "learned.npy", "crc32.npy"


class TokenFile:
    """File of uint32 values that is read slice by slice and is not mapped into memory."""

    def __init__(self, path: pathlib.Path):
        self._file = path.open("rb", buffering=0)

    def __getitem__(self, part: slice) -> np.ndarray:
        """Reads a slice: uint32 [stop - start], shorter if the file is truncated."""
        size = 4 * (int(part.stop) - int(part.start))
        content = os.pread(self._file.fileno(), size, 4 * int(part.start))
        return np.frombuffer(content[: len(content) // 4 * 4], "<u4")


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Encoded documents.

    Attributes:
      tokens: Tokens of all documents with supervision bits, uint32 [total], in memory or in a file.
      offsets: Start of each document, and the end of the last one, int64 [documents + 1].
      learned: Index of the first supervised token within each document, or the length of the
        document if it has none, int32 [documents].
      crc32: Checksums of the documents, uint32 [documents]; None for a corpus in memory.
      directory: Directory of the files; None for a corpus in memory.
    """

    name: str
    fingerprint: str
    tokens: np.ndarray | TokenFile
    offsets: np.ndarray
    learned: np.ndarray
    max_id: int
    crc32: np.ndarray | None = None
    directory: pathlib.Path | None = None

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def document(self, index: int) -> np.ndarray:
        """Returns a document with its supervision bits, uint32 [length]."""
        try:
            document = self.tokens[self.offsets[index] : self.offsets[index + 1]]
        except OSError as error:
            path = self.directory / _TOKENS
            raise errors.InputError(f"{path}: cannot be read: {error.strerror}") from error
        if self.crc32 is not None and zlib.crc32(document) != self.crc32[index]:
            raise _damaged(self.directory / _TOKENS)
        return document


def is_whole(path: pathlib.Path) -> bool:
    """Returns whether a directory holds a complete corpus."""
    return (path / _FACTS).exists()


def write(path: pathlib.Path, documents: Iterable[np.ndarray]) -> None:
    """Stores a corpus atomically: `path` holds all of it or does not change.

    Args:
      documents: Documents with supervision bits, each uint32 [length] with length < 2**31.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # The name is random, because another process may write the same corpus where locks do not work.
    partial = pathlib.Path(
        tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".partial", dir=path.parent)
    )
    try:
        _write_files(partial, documents)
        if not is_whole(path):
            files.publish(partial, path, _FACTS)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def open_stored(path: pathlib.Path, name: str, fingerprint: str) -> Corpus:
    """Opens a stored corpus and reads its index.

    Args:
      fingerprint: Hash of everything that the contents depend on.
    Raises:
      InputError: A file is missing or damaged. Damage within a document is only detected when the
        document is read.
    """
    file = path / _FACTS
    try:
        facts = json.loads(file.read_text())
        max_id, total, sums = int(facts["max_id"]), int(facts["tokens"]), facts["crc32"]
        file = path / _TOKENS
        if file.stat().st_size != 4 * total:
            raise ValueError("cut off")
        index = []
        for part in _INDEX:
            file = path / part
            index.append(np.load(file))
            if zlib.crc32(index[-1]) != sums[part]:
                raise ValueError("not as it was written")
        offsets, learned, crc32 = index
        tokens = TokenFile(path / _TOKENS)
    except (OSError, ValueError, TypeError, LookupError, EOFError) as error:
        raise _damaged(file) from error
    return Corpus(name, fingerprint, tokens, offsets, learned, max_id, crc32, path)


def _damaged(file: pathlib.Path) -> errors.InputError:
    return errors.InputError(f"{file}: damaged: delete {file.parent} to encode it again")


def _write_files(partial: pathlib.Path, documents: Iterable[np.ndarray]) -> None:
    # Lists would take five times as much memory as arrays of the standard library.
    offsets, learned, sums = array.array("q", [0]), array.array("i"), array.array("I")
    max_id = 0
    with (partial / _TOKENS).open("wb", buffering=2**20) as tokens:
        for document in documents:
            content = document.astype("<u4", copy=False)
            tokens.write(content)
            offsets.append(offsets[-1] + len(document))
            learned.append(_first_supervised(document))
            sums.append(zlib.crc32(content))
            max_id = max(max_id, _max_id(document))
        tokens.flush()
        os.fsync(tokens.fileno())
    index = dict(zip(_INDEX, map(np.asarray, (offsets, learned, sums)), strict=True))
    for name, values in index.items():
        np.save(partial / name, values)
        files.sync(partial / name)
    crc32 = {name: zlib.crc32(values) for name, values in index.items()}
    facts = {"max_id": max_id, "tokens": offsets[-1], "crc32": crc32}
    (partial / _FACTS).write_text(json.dumps(facts))


def _first_supervised(document: np.ndarray) -> int:
    marked = document >= SUPERVISED
    return int(marked.argmax()) if marked.any() else len(document)


def _max_id(tokens: np.ndarray) -> int:
    return int((tokens & ~SUPERVISED).max(initial=0))
