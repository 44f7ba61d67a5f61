"""Packs documents into rows of one length.

Attention does not cross documents, so it does not matter which ones share a row. They are placed
once, by best fit; each epoch has the same rows in a new order. Packing needs lengths alone, and the
rows of a stored corpus are stored beside it.
"""

import contextlib
import dataclasses
import io
import zipfile

import numpy as np

from dflash.data.corpus import SUPERVISED, Corpus
from dflash.storage import files


@dataclasses.dataclass(frozen=True)
class Packing:
    """Which documents each row holds.

    Attributes:
      length: tokens per row.
      documents: int32 or int64 [placed]; document numbers, row after row.
      offsets: int64 [rows + 1]; where each row begins in `documents`, and the end.
    """

    length: int
    documents: np.ndarray
    offsets: np.ndarray

    def __len__(self) -> int:
        return len(self.offsets) - 1


def open_packing(corpus: Corpus, length: int, seed: int = 0) -> Packing:
    """Reads the packing of a stored corpus; packs and stores it on the first call.

    Args:
      corpus: documents to place; a corpus in memory is packed on every call.
      length: tokens per row.
      seed: see `pack`.
    """
    if corpus.directory is None:
        return pack(corpus, length, seed)
    path = corpus.directory / f"rows-{length}-{seed}.npz"
    # The archive has checksums. What is damaged is made again.
    damage = OSError, ValueError, LookupError, EOFError, zipfile.BadZipFile
    with contextlib.suppress(*damage), np.load(path) as stored:
        return Packing(length, stored["documents"], stored["offsets"])
    packed = pack(corpus, length, seed)
    content = io.BytesIO()
    np.savez(content, documents=packed.documents, offsets=packed.offsets)
    with contextlib.suppress(OSError):  # others have prepared the data, and we may only read them
        files.write_whole(path, content.getvalue())
    return packed


def pack(corpus: Corpus, length: int, seed: int = 0) -> Packing:
    """Places each document with a supervised token in exactly one row.

    Args:
      corpus: documents to place.
      length: tokens per row; longer documents are cut.
      seed: seed of the order among documents of equal length.
    """
    sizes = np.minimum(np.diff(corpus.offsets), length).astype(np.int32)
    useful = np.flatnonzero(corpus.learned < sizes)
    order = np.random.default_rng(seed).permutation(useful)
    # Few bits, which sort in linear time.
    missing = (length - sizes[order]).astype(np.min_scalar_type(length))
    order = order[np.argsort(missing, kind="stable")]
    row_of = _best_fit(np.bincount(sizes[order], minlength=length + 1))
    small = np.int32 if len(sizes) < 2**31 else np.int64
    documents = order[np.argsort(row_of, kind="stable")].astype(small)
    offsets = np.concatenate([[0], np.cumsum(np.bincount(row_of))])
    return Packing(length, documents, offsets.astype(np.int64))


def _best_fit(counts: np.ndarray) -> np.ndarray:
    """Places documents, the longest first; each goes where it leaves the least room.

    Equal documents are placed together: into the rows of one room, as many as fit into each. So
    the time depends on the number of different lengths rather than of documents.

    Args:
      counts: int [length + 1]; number of documents of each size.
    Returns:
      int32 [documents]; the row of each document, in descending order of sizes.
    """
    length = len(counts) - 1
    placed = np.empty(counts.sum(), np.int32)
    with_room: list[list[np.ndarray]] = [[] for _ in counts]  # rows by their room
    rooms = 0  # bit r is set where some row has the room r

    def put(rows: np.ndarray, room: int) -> None:
        nonlocal rooms
        if room and len(rows):
            with_room[room].append(rows)
            rooms |= 1 << room

    def take(most: int, room: int) -> np.ndarray:
        nonlocal rooms
        rows = with_room[room].pop()
        if len(rows) > most:
            with_room[room].append(rows[:-most])
        elif not with_room[room]:
            rooms &= ~(1 << room)
        return rows[-most:][::-1]

    done = num_rows = 0
    for size in np.flatnonzero(counts)[::-1].tolist():
        left = int(counts[size])
        while left:
            fitting = rooms >> size
            room = size + (fitting & -fitting).bit_length() - 1 if fitting else length
            per_row = room // size
            wanted = -(-left // per_row)
            if fitting:
                rows = take(wanted, room)
            else:
                rows = np.arange(num_rows, num_rows + wanted, dtype=np.int32)
                num_rows += wanted
            count = min(left, len(rows) * per_row)
            placed[done : done + count] = np.repeat(rows, per_row)[:count]
            full, rest = divmod(count, per_row)
            put(rows[:full], room - per_row * size)
            put(rows[full:], room - rest * size)
            done, left = done + count, left - count
    return placed


class Rows:
    """A corpus as rows, with random access.

    A row is a dict of arrays of shape [length]:
      tokens: int32; 0 where there is no document.
      positions: int32; from 0 in each document.
      segment_ids: int32; 1, 2, … by document, 0 where there is none.
      loss_mask: float32; 1 on supervised tokens, which are to be predicted from those before.

    Attributes:
      corpus: where its documents are.
    """

    def __init__(self, corpus: Corpus, packing: Packing):
        self.corpus, self._packing = corpus, packing

    @property
    def length(self) -> int:
        """Tokens per row."""
        return self._packing.length

    def __len__(self) -> int:
        return len(self._packing)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        packing = self._packing
        length = packing.length
        row = {
            name: np.zeros(length, np.float32 if name == "loss_mask" else np.int32)
            for name in ("tokens", "positions", "segment_ids", "loss_mask")
        }
        start = 0
        place = slice(packing.offsets[index], packing.offsets[index + 1])
        for segment, number in enumerate(packing.documents[place], start=1):
            document = self.corpus.document(number)[:length]
            here = slice(start, start + len(document))
            row["tokens"][here] = document & ~SUPERVISED
            row["positions"][here] = np.arange(len(document))
            row["segment_ids"][here] = segment
            row["loss_mask"][here] = document >= SUPERVISED
            start += len(document)
        return row
