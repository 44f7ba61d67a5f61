"""Packed rows of the data sets of a run, with random access."""

import dataclasses
import functools
import sys
from collections.abc import Mapping, Sequence

import jax
import numpy as np

from dflash import errors
from dflash.config.train_schema import DataConfig
from dflash.data import encoding, packing, store
from dflash.data.dataset import Dataset
from dflash.data.example import Split
from dflash.data.packing import PackedRows
from dflash.parallel import agreement
from dflash.text.tokenizer import Tokenizer

Place = tuple[int, int]  # number of a corpus, and number of a row in it


@dataclasses.dataclass(frozen=True)
class Mixture:
    """Packed corpora with their shares.

    Attributes:
      shares: Share of each corpus in the rows; they need not add up to 1.
    """

    corpora: tuple[PackedRows, ...]
    shares: tuple[float, ...]
    seed: int = 0

    @property
    def num_rows(self) -> int:
        """Number of rows of all corpora together, in one pass."""
        return sum(map(len, self.corpora))

    @property
    def length(self) -> int:
        """Tokens per row."""
        return self.corpora[0].length

    def order(self, corpus: int, epoch: int) -> np.ndarray:
        """Returns the row numbers of a corpus in the order of one pass, int64 [rows]."""
        generator = np.random.default_rng((self.seed, corpus, epoch))
        return generator.permutation(len(self.corpora[corpus]))

    def read(self, places: Sequence[Place]) -> dict[str, np.ndarray]:
        """Reads rows as arrays [places, length]; see `packing.PackedRows`."""
        rows = [self.corpora[corpus][number] for corpus, number in places]
        return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def open_mixture(
    config: DataConfig,
    sets: Mapping[str, Dataset],
    tokenizer: Tokenizer,
    *,
    split: Split = "train",
    vocab_size: int | None = None,
) -> Mixture:
    """Opens, encodes and packs the data sets of a run; every process of the run calls this.

    Results of earlier calls are read from `config.data_dir`. Of several processes, the first one
    creates missing files and the others read them. A process that cannot see these files, because
    the directory is on its local disk, creates its own.

    Args:
      config: Shares and length of the rows, seed of their order, and directory of the data.
      sets: Data sets by name; see `datasets.find_all`.
      vocab_size: Vocabulary size of the model, to check the token ids; None for no check.
    Raises:
      InputError: The data are malformed (the message has file and line) or empty, or no document
        has a supervised token within the length of a row.
    """
    if vocab_size is not None:
        encoding.check_vocabulary(tokenizer, vocab_size)
    opened = []
    for name in config.shares:
        open_one = functools.partial(_open_rows, config, sets[name], tokenizer, split, vocab_size)
        opened.append(agreement.run_first_process_first(f"{name}/{split}", open_one))
    if jax.process_index() == 0:
        for rows in opened:
            _warn_of_truncation(rows)
    return Mixture(tuple(opened), tuple(config.shares.values()), config.seed)


def _warn_of_truncation(rows: PackedRows) -> None:
    corpus, length = rows.corpus, rows.length
    cut, lost = packing.truncated(corpus, length)
    if cut:
        print(
            f"data: {corpus.name}: data.length={length} cuts {cut} of {len(corpus)} documents, "
            f"{lost} of them before their first answer, so that they teach nothing",
            file=sys.stderr,
        )


def _open_rows(
    config: DataConfig, dataset: Dataset, tokenizer: Tokenizer, split: Split, vocab_size: int | None
) -> PackedRows:
    directory = store.data_directory(config.data_dir)
    corpus = encoding.open_corpus(dataset, split, tokenizer, directory)
    if vocab_size is not None and corpus.max_id >= vocab_size:
        raise errors.InputError(
            f"{corpus.name}: token id {corpus.max_id} is out of the model's vocabulary "
            f"(size {vocab_size})"
        )
    rows = PackedRows(corpus, packing.pack(corpus, config.length, config.seed))
    if not len(rows):
        raise errors.InputError(
            f"{corpus.name}: none of its {len(corpus)} documents has a supervised token within "
            f"data.length={config.length} tokens: raise data.length"
        )
    return rows
