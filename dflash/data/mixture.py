"""The rows of a run's data sets: opened once, read one by one, in endless passes."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import numpy as np

from dflash import errors
from dflash.config.data_schema import DataConfig
from dflash.data import encoding, packing, store
from dflash.data.datasets import Dataset
from dflash.data.example import Split
from dflash.data.packing import Rows
from dflash.parallel import agreement
from dflash.text.tokenizer import Tokenizer

Place = tuple[int, int]  # number of a corpus, and of a row in it


@dataclasses.dataclass(frozen=True)
class Mixture:
    """Packed corpora with their shares.

    Attributes:
      corpora: rows of each corpus.
      shares: share of the rows, by corpus; they need not add up to 1.
      seed: seed of the orders.
    """

    corpora: tuple[Rows, ...]
    shares: tuple[float, ...]
    seed: int = 0

    @property
    def num_rows(self) -> int:
        """Rows of all corpora, one pass over each."""
        return sum(map(len, self.corpora))

    @property
    def length(self) -> int:
        """Tokens per row."""
        return self.corpora[0].length

    def order(self, corpus: int, epoch: int) -> np.ndarray:
        """int64 [rows of the corpus]: their numbers in the order of one pass over this corpus."""
        generator = np.random.default_rng((self.seed, corpus, epoch))
        return generator.permutation(len(self.corpora[corpus]))

    def most_drawn(self, corpus: int, total: int) -> int:
        """An upper bound of the rows of a corpus among the first `total` rows of the mixture.

        A corpus only gives a row while it is behind its share.
        """
        return int(np.ceil(total * self.shares[corpus] / sum(self.shares))) + 1

    def read(self, places: Sequence[Place]) -> dict[str, np.ndarray]:
        """Reads rows: arrays [places, length]; see `packing.Rows`."""
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
    """Opens, encodes and packs a run's data sets; every process of a run calls this.

    Results of earlier calls are read from `config.data_dir`. Of several processes the first one
    makes what is not there yet, and the others read it. One that does not see it, since the
    directory is on a disk of its own, makes its own.

    Args:
      config: shares and length of the rows, seed of their order, and where they are kept.
      sets: the data sets by name; see `datasets.find_all`.
      tokenizer: tokenizer of the model to train.
      split: split of every data set.
      vocab_size: the model's, to check ids against; None for no check.
    Raises:
      InputError: data are malformed (with file and line), empty, or too long to learn from.
      ConfigError: the tokenizer exceeds the vocabulary.
    """
    if vocab_size is not None:
        encoding.check_vocabulary(tokenizer, vocab_size)
    opened = []
    for name in config.shares:
        open_one = functools.partial(_open_rows, config, sets[name], tokenizer, split, vocab_size)
        opened.append(agreement.run_first_process_first(f"{name}/{split}", open_one))
    return Mixture(tuple(opened), tuple(config.shares.values()), config.seed)


def _open_rows(
    config: DataConfig, dataset: Dataset, tokenizer: Tokenizer, split: Split, vocab_size: int | None
) -> Rows:
    directory = store.data_directory(config.data_dir)
    corpus = encoding.open_corpus(dataset, split, tokenizer, directory)
    if vocab_size is not None and corpus.max_id >= vocab_size:
        raise errors.InputError(
            f"{corpus.name}: token id {corpus.max_id} is out of the model's vocabulary "
            f"(size {vocab_size})"
        )
    rows = Rows(corpus, packing.open_packing(corpus, config.length, config.seed))
    if not len(rows):
        raise errors.InputError(
            f"{corpus.name}: nothing to learn within {config.length} tokens of any of its "
            f"{len(corpus)} documents"
        )
    return rows
