"""Endless batches of packed rows: mixed by share, shuffled, divided among processes, resumable.

The seed and the number of rows taken from each corpus determine the next row. Resuming is therefore
free, and all processes together read the same batches whatever their number.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dflash import errors
from dflash.config.data_schema import DataConfig
from dflash.data import datasets, encoding, packing, store
from dflash.data.encoding import Corpus
from dflash.data.example import Split
from dflash.text.tokenizer import Tokenizer


class Batches:
    """An endless iterator over one process's rows of each batch.

    A batch is a dict of arrays [rows of this process, length]; see `packing.Rows`. Each corpus has
    its own epochs: all of its rows, in a new order each time.

    Attributes:
      num_rows: rows of all corpora, one epoch of each.
    """

    def __init__(
        self,
        corpora: Sequence[Corpus],
        shares: Sequence[float],
        *,
        length: int,
        batch_size: int,
        seed: int = 0,
        mine: Sequence[int] | None = None,
        state: Mapping[str, Any] | None = None,
    ):
        """Packs the corpora; `batches` opens them first.

        Args:
          corpora: at least one.
          shares: each corpus's share of the rows; they need not add up to 1.
          length: tokens per row.
          batch_size: rows per batch, over all processes.
          seed: seed of the order of rows.
          mine: numbers of the rows of each batch that this process reads; None for all.
          state: position to resume from, as `state()` returns it; None for the beginning.
        Raises:
          InputError: there is less than one batch, or `state` belongs to other data.
        """
        packings = [packing.pack(corpus, length, seed) for corpus in corpora]
        _check_sizes(corpora, packings, length, batch_size)
        self.num_rows = sum(map(len, packings))
        facts = [corpus.fingerprint for corpus in corpora], list(shares), length, batch_size, seed
        self._data = hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
        self._sources = [
            _Shuffled(packing.Rows(corpus, packed), (seed, place))
            for place, (corpus, packed) in enumerate(zip(corpora, packings, strict=True))
        ]
        self._shares = np.array(shares, np.float64) / sum(shares)
        self._counts = [0] * len(self._sources)  # rows that each source has given
        self._batch_size = batch_size
        self._mine = tuple(range(batch_size) if mine is None else mine)
        if state is not None:
            self._resume(state)

    def __iter__(self) -> "Batches":
        return self

    def __next__(self) -> dict[str, np.ndarray]:
        places = [self._next_place() for _ in range(self._batch_size)]
        mine = [places[row] for row in self._mine]
        rows = [self._sources[source][number] for source, number in mine]
        return {name: np.stack([row[name] for row in rows]) for name in rows[0]}

    def state(self) -> dict[str, Any]:
        """Position of the next batch, in JSON's types: {"rows": [12, 4], "data": "…"}."""
        return {"rows": list(self._counts), "data": self._data}

    def _next_place(self) -> tuple[int, int]:
        """(source, number) of the next row, from the source furthest behind its share."""
        due = self._shares * (sum(self._counts) + 1) - self._counts
        source = int(np.argmax(due))
        self._counts[source] += 1
        return source, self._counts[source] - 1

    def _resume(self, state: Mapping[str, Any]) -> None:
        if state.get("data") != self._data:
            raise errors.InputError(
                "the data, their shares, length, batch size or seed are not those of the "
                "checkpoint, so it cannot be resumed"
            )
        self._counts = list(state["rows"])


class _Shuffled:
    """Endless rows: each epoch has all of them, in a new order."""

    def __init__(self, rows: packing.Rows, seed: tuple[int, ...]):
        self._rows, self._seed = rows, seed
        self._epoch, self._order = -1, np.zeros(0, np.int64)

    def __getitem__(self, number: int) -> dict[str, np.ndarray]:
        epoch, place = divmod(number, len(self._rows))
        if epoch != self._epoch:
            generator = np.random.default_rng((*self._seed, epoch))
            self._epoch, self._order = epoch, generator.permutation(len(self._rows))
        return self._rows[self._order[place]]


def batches(
    config: DataConfig,
    tokenizer: Tokenizer,
    *,
    batch_size: int,
    split: Split = "train",
    vocab_size: int | None = None,
    mine: Sequence[int] | None = None,
    state: Mapping[str, Any] | None = None,
) -> Batches:
    """Opens, encodes and packs a run's data sets; see `Batches`.

    Results of earlier calls are read from `config.data_dir`.

    Args:
      config: data sets and their shares.
      tokenizer: tokenizer of the model to train.
      batch_size: rows per batch, over all processes.
      split: split of every data set.
      vocab_size: the model's, to check ids against; None for no check.
      mine: numbers of the rows of each batch that this process reads; None for all.
      state: position to resume from, as `Batches.state` returns it; None for the beginning.
    Raises:
      InputError: data are malformed (with file and line), empty, or less than one batch; or
        `state` belongs to other data.
      ConfigError: there is no such data set, or the tokenizer exceeds the vocabulary.
    """
    if vocab_size is not None:
        encoding.check_vocabulary(tokenizer, vocab_size)
    directory = store.data_directory(config.data_dir)
    corpora = [
        encoding.open_corpus(datasets.find(name, config), split, tokenizer, directory)
        for name in config.shares
    ]
    for corpus in corpora:
        if vocab_size is not None and corpus.max_id >= vocab_size:
            raise errors.InputError(
                f"{corpus.name}: token id {corpus.max_id} is out of the model's vocabulary "
                f"(size {vocab_size})"
            )
    return Batches(
        corpora,
        list(config.shares.values()),
        length=config.length,
        batch_size=batch_size,
        seed=config.seed,
        mine=mine,
        state=state,
    )


def _check_sizes(corpora, packings, length: int, batch_size: int) -> None:
    for corpus, packed in zip(corpora, packings, strict=True):
        if not len(packed):
            raise errors.InputError(
                f"{corpus.name}: nothing to learn within {length} tokens of any of its "
                f"{len(corpus)} documents"
            )
    total = sum(map(len, packings))
    if total < batch_size:
        names = ", ".join(corpus.name for corpus in corpora)
        rows = f"{total} {'row' if total == 1 else 'rows'}"
        raise errors.InputError(
            f"{names}: {rows} of {length} tokens in all, but a batch has {batch_size}: give more "
            "data, a smaller batch, or a smaller data.length"
        )
