"""Packs documents into rows of equal length.

Attention does not cross documents, so any documents may share a row. Documents are placed once, by
best fit, and each epoch visits the same rows in a new order. Packing only needs the lengths of
documents; that of a billion tokens takes two seconds.
"""

import dataclasses

import numpy as np

from dflash.data.corpus import SUPERVISED, Corpus


@dataclasses.dataclass(frozen=True)
class DocumentPacking:
    """Assignment of documents to rows.

    Attributes:
      length: Tokens per row.
      documents: Document numbers, ordered by row, int32 or int64 [placed documents].
      offsets: Start of each row in `documents`, and the end of the last one, int64 [rows + 1].
    """

    length: int
    documents: np.ndarray
    offsets: np.ndarray

    def __len__(self) -> int:
        return len(self.offsets) - 1


def pack(corpus: Corpus, length: int, seed: int = 0) -> DocumentPacking:
    """Places each document with a supervised token in exactly one row.

    Args:
      length: Tokens per row; longer documents are truncated.
      seed: Seed of the order among documents of equal length.
    """
    sizes = np.minimum(np.diff(corpus.offsets), length).astype(np.int32)
    useful = np.flatnonzero(corpus.learned < sizes)
    order = np.random.default_rng(seed).permutation(useful)
    # NumPy sorts small integer types in linear time.
    missing = (length - sizes[order]).astype(np.min_scalar_type(length))
    order = order[np.argsort(missing, kind="stable")]
    row_of = _best_fit(np.bincount(sizes[order], minlength=length + 1))
    small = np.int32 if len(sizes) < 2**31 else np.int64
    documents = order[np.argsort(row_of, kind="stable")].astype(small)
    offsets = np.concatenate([[0], np.cumsum(np.bincount(row_of))])
    return DocumentPacking(length, documents, offsets.astype(np.int64))


def truncated(corpus: Corpus, length: int) -> tuple[int, int]:
    """Returns how many documents are longer than a row, and how many of these teach nothing."""
    is_long = np.diff(corpus.offsets) > length
    return int(is_long.sum()), int((is_long & (corpus.learned >= length)).sum())


def _best_fit(counts: np.ndarray) -> np.ndarray:
    """Places documents by best fit, the longest first.

    Documents of equal length are placed together into rows with equal free space, so the time
    depends on the number of distinct lengths instead of the number of documents.

    Args:
      counts: Number of documents of each length, int [length + 1].
    Returns:
      The row of each document, in descending order of lengths, int32 [documents].
    """
    length = len(counts) - 1
    placed = np.empty(counts.sum(), np.int32)
    with_room: list[list[np.ndarray]] = [[] for _ in counts]  # rows by their free space
    rooms = 0  # bit r is set if a row has free space r

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
        unplaced = int(counts[size])
        while unplaced:
            fitting = rooms >> size
            room = size + (fitting & -fitting).bit_length() - 1 if fitting else length
            per_row = room // size
            needed = -(-unplaced // per_row)
            if fitting:
                rows = take(needed, room)
            else:
                rows = np.arange(num_rows, num_rows + needed, dtype=np.int32)
                num_rows += needed
            count = min(unplaced, len(rows) * per_row)
            placed[done : done + count] = np.repeat(rows, per_row)[:count]
            full, remaining = divmod(count, per_row)
            put(rows[:full], room - per_row * size)
            put(rows[full:], room - remaining * size)
            done, unplaced = done + count, unplaced - count
    return placed


class PackedRows:
    """Packed rows of a corpus, with random access.

    A row is a dict of arrays [length]:
      tokens: Token ids, 0 for padding, int32.
      positions: Position within the document, from 0, int32.
      segment_ids: Number of the document within the row, from 1, 0 for padding, int32.
      loss_mask: 1 for supervised tokens, which are predicted from the tokens before, float32.
    """

    def __init__(self, corpus: Corpus, packing: DocumentPacking):
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
