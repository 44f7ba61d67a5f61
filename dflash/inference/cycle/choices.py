"""Choices of rows for a cycle: block sizes, and divisions of rows among sequences."""

import dataclasses
import math

import numpy as np

from dflash.drafters.base import Drafter
from dflash.inference.pages import Layout

SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
MEAN_ROWS = (2, 4, 8, 16, 32)  # Mean numbers of rows per slot of cycles that divide their rows.
# Ratio of the most rows that a sequence may get in such a cycle to their mean number. A chain is
# drafted as long as the most that it may get, so more of them cost more.
TREE_SHARE, CHAIN_SHARE = 4, 2
EXACT_ROWS = 16  # A memory tile of bfloat16 rows on a TPU.
DIVIDED = "~"  # Begins the names of choices that divide rows among sequences.


@dataclasses.dataclass(frozen=True)
class Choices:
    """Numbers of rows that a cycle may draft and verify; a fixed block is a single choice.

    Attributes:
      block_sizes: Rows of every sequence, ascending; the last number is the drafter's block size.
      mean_rows: Mean rows per slot of cycles that divide their rows among the sequences by the
        drafter's confidence, ascending.
      num_replicas: Number of replicas, each of which divides rows among its own slots.
      trees: Whether drafts form trees.
      exact: Whether the target computes the same number of rows in every cycle, whatever is
        drafted; see `DecodeConfig.exact`.
    """

    block_sizes: tuple[int, ...]
    mean_rows: tuple[int, ...] = ()
    num_replicas: int = 1
    trees: bool = False
    exact: bool = False

    @classmethod
    def of(
        cls,
        drafter: Drafter,
        layout: Layout,
        *,
        adaptive: bool,
        divides: bool,
        exact: bool = False,
    ) -> "Choices":
        """Returns the choices for a drafter.

        Args:
          layout: Layout of the batch. A single slot has nothing to divide.
          adaptive: Choose between plain decoding, the drafter's block size, and sizes between them,
            rather than always take its block size.
          divides: Let cycles divide rows, if the drafter states its confidence.
          exact: Choose between plain decoding and the drafter's block size alone.
        """
        largest = drafter.block_size
        if exact:
            return cls(tuple(sorted({1, largest})), exact=True)
        if not adaptive:
            return cls((largest,), trees=drafter.drafts_trees)
        divides = divides and drafter.has_confidence and layout.slots_per_replica > 1
        return cls(
            (*(size for size in SIZES if size < largest), largest),
            tuple(mean for mean in MEAN_ROWS if divides and mean < largest),
            layout.num_replicas,
            drafter.drafts_trees,
        )

    def __len__(self) -> int:
        """Returns the number of choices."""
        return len(self.block_sizes) + len(self.mean_rows)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the choices: block sizes, then mean rows of divisions, such as "~4"."""
        return *map(str, self.block_sizes), *(f"{DIVIDED}{mean}" for mean in self.mean_rows)

    @property
    def rows(self) -> tuple[int, ...]:
        """Mean rows per sequence that a cycle of each choice verifies."""
        return (*self.block_sizes, *self.mean_rows)

    def rows_of(self, index: int) -> tuple[int, int | None]:
        """Returns the rows to draft in a cycle of a choice, and the mean rows to divide, if any."""
        if index < len(self.block_sizes):
            return self.block_sizes[index], None
        mean_rows = self.rows[index]
        return self.drafted(mean_rows), mean_rows

    @property
    def computed(self) -> int | None:
        """Rows of each sequence that the target computes in an exact cycle; None in others."""
        return exact_rows(self.block_sizes[-1]) if self.exact else None

    def drafted(self, mean_rows: int) -> int:
        """Returns the block size to draft in a cycle that divides `mean_rows` per slot.

        That is the most rows that a sequence may get, and one of the block sizes.
        """
        most = mean_rows * (TREE_SHARE if self.trees else CHAIN_SHARE)
        return next((size for size in self.block_sizes if size >= most), self.block_sizes[-1])

    def larger(self) -> np.ndarray:
        """Returns which choices a trial may take instead of each one, bool [S, S].

        These are the larger ones of its kind, and after the largest division the largest size.
        """
        count, index = len(self.block_sizes), np.arange(len(self))
        is_size = index < count
        larger = (index > index[:, None]) & (is_size == is_size[:, None])
        if self.mean_rows:
            larger[-1, count - 1] = True
        return larger


def exact_rows(block_size: int) -> int:
    """Returns the rows that exact cycles compute, whole memory tiles.

    So drafters of similar block sizes, and plain decoding, compute the same number.
    """
    return math.ceil(block_size / EXACT_ROWS) * EXACT_ROWS
