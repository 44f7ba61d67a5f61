"""Endless, resumable batches of packed rows: mixed by share, shuffled, divided among processes.

The position is the number of rows drawn from each corpus. Together with the seed it determines all
further rows, so resuming costs nothing, and the batches do not depend on the number of processes.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dflash import errors
from dflash.data.mixture import Mixture, Place


class Batches:
    """Endless iterator over the rows of each batch that one process reads.

    A batch is a dict of arrays [rows of this process, length]; see `packing.PackedRows`. Each
    corpus has its own passes; every pass visits all of its rows in a new order.
    """

    def __init__(
        self,
        mixture: Mixture,
        *,
        batch_size: int,
        mine: Sequence[int] | None = None,
        state: Mapping[str, Any] | None = None,
    ):
        """Starts at the position `state`, or at the first batch.

        Args:
          batch_size: Rows per batch, over all processes.
          mine: Indices of the rows of each batch that this process reads; None for all.
        """
        _check_size(mixture, batch_size)
        fingerprints = [rows.corpus.fingerprint for rows in mixture.corpora]
        facts = fingerprints, list(mixture.shares), mixture.length, batch_size, mixture.seed
        self._data = hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
        self._mixture = mixture
        self._passes = [_Passes(mixture, corpus) for corpus in range(len(mixture.corpora))]
        self._shares = np.array(mixture.shares, np.float64) / sum(mixture.shares)
        self._counts = [0] * len(self._passes)  # rows drawn from each corpus
        self._batch_size = batch_size
        self._mine = tuple(range(batch_size) if mine is None else mine)
        if state is not None:
            self._resume(state)

    def __iter__(self) -> "Batches":
        return self

    def __next__(self) -> dict[str, np.ndarray]:
        return self._mixture.read(self.draw())

    def draw(self) -> list[Place]:
        """Returns the places of this process's rows of the next batch, without reading them."""
        drawn = [self._next() for _ in range(self._batch_size)]
        places = (drawn[row] for row in self._mine)
        return [(corpus, self._passes[corpus][number]) for corpus, number in places]

    def state(self) -> dict[str, Any]:
        """Returns the position of the next batch as JSON data: {"rows": [12, 4], "data": "…"}."""
        return {"rows": list(self._counts), "data": self._data}

    def _next(self) -> tuple[int, int]:
        """Returns (corpus, rows drawn from it before) for the corpus furthest behind its share."""
        due = self._shares * (sum(self._counts) + 1) - self._counts
        corpus = int(np.argmax(due))
        self._counts[corpus] += 1
        return corpus, self._counts[corpus] - 1

    def _resume(self, state: Mapping[str, Any]) -> None:
        if state.get("data") != self._data:
            raise errors.InputError(
                "the data or their shares, length, batch size or seed differ from those of the "
                "checkpoint, so it cannot be resumed"
            )
        self._counts = list(state["rows"])


class _Passes:
    """Endless sequence of the row numbers of a corpus; each pass has all of them in a new order."""

    def __init__(self, mixture: Mixture, corpus: int):
        self._mixture, self._corpus = mixture, corpus
        self._epoch, self._order = -1, np.zeros(0, np.int64)

    def __getitem__(self, number: int) -> int:
        epoch, place = divmod(number, len(self._mixture.corpora[self._corpus]))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, self._mixture.order(self._corpus, epoch)
        return int(self._order[place])


def _check_size(mixture: Mixture, batch_size: int) -> None:
    total = mixture.num_rows
    if total < batch_size:
        names = ", ".join(rows.corpus.name for rows in mixture.corpora)
        rows = f"{total} {'row' if total == 1 else 'rows'}"
        raise errors.InputError(
            f"{names}: {rows} of {mixture.length} tokens in all, but a batch has {batch_size}: "
            "give more data, a smaller batch, or a smaller data.length"
        )
