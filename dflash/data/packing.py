"""Packs documents into rows of one length.

Attention does not cross documents, so it does not matter which ones share a row. They are placed
once, by best fit; each epoch has the same rows in a new order.
"""

import dataclasses
from collections.abc import Iterator

import numpy as np

from dflash.data.encoding import SUPERVISED, Corpus


@dataclasses.dataclass(frozen=True)
class Packing:
    """Which documents each row holds.

    Attributes:
      length: tokens per row.
      documents: int64 [placed]; document numbers, row after row.
      offsets: int64 [rows + 1]; where each row begins in `documents`, and the end.
    """

    length: int
    documents: np.ndarray
    offsets: np.ndarray

    def __len__(self) -> int:
        return len(self.offsets) - 1


def pack(corpus: Corpus, length: int, seed: int = 0) -> Packing:
    """Places each document with a supervised token in exactly one row.

    Args:
      corpus: documents to place.
      length: tokens per row; longer documents are cut.
      seed: seed of the order among documents of equal length.
    """
    sizes = np.minimum(np.diff(corpus.offsets), length)
    supervised = np.concatenate([[0], np.cumsum(corpus.tokens >= SUPERVISED, dtype=np.int64)])
    begins = corpus.offsets[:-1]
    useful = np.flatnonzero(supervised[begins + sizes] > supervised[begins])
    order = np.random.default_rng(seed).permutation(useful)
    order = order[np.argsort(-sizes[order], kind="stable")]
    rows = list(_best_fit(order.tolist(), sizes.tolist(), length))
    return Packing(
        length=length,
        documents=np.array([document for row in rows for document in row], np.int64),
        offsets=np.cumsum([0, *map(len, rows)], dtype=np.int64),
    )


def _best_fit(order: list[int], sizes: list[int], length: int) -> Iterator[list[int]]:
    """Yields rows: each document, the longest first, goes where it leaves the least room."""
    rows: list[list[int]] = []
    with_room: list[list[int]] = [[] for _ in range(length + 1)]  # rows by their room
    rooms = 0  # bit r is set where some row has the room r
    for document in order:
        size = sizes[document]
        fitting = rooms >> size
        if fitting:
            room = size + (fitting & -fitting).bit_length() - 1
            row = with_room[room].pop()
            if not with_room[room]:
                rooms &= ~(1 << room)
        else:
            room, row = length, len(rows)
            rows.append([])
        rows[row].append(document)
        if room > size:
            with_room[room - size].append(row)
            rooms |= 1 << (room - size)
    yield from rows


class Rows:
    """A corpus as rows, with random access.

    A row is a dict of arrays of shape [length]:
      tokens: int32; 0 where there is no document.
      positions: int32; from 0 in each document.
      segment_ids: int32; 1, 2, … by document, 0 where there is none.
      loss_mask: float32; 1 on supervised tokens, which are to be predicted from those before.
    """

    def __init__(self, corpus: Corpus, packing: Packing):
        self._corpus, self._packing = corpus, packing

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
            document = self._corpus.document(number)[:length]
            here = slice(start, start + len(document))
            row["tokens"][here] = document & ~SUPERVISED
            row["positions"][here] = np.arange(len(document))
            row["segment_ids"][here] = segment
            row["loss_mask"][here] = document >= SUPERVISED
            start += len(document)
        return row
