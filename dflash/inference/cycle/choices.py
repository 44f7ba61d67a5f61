"""Choices of rows for a cycle: block sizes, and divisions of rows among sequences."""

import dataclasses

SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
MEAN_ROWS = (2, 4, 8, 16, 32)  # Mean numbers of rows per slot of cycles that divide their rows.
# Ratio of the most rows that a sequence may get in such a cycle to their mean number. Chains that
# are divided by confidence are drafted first, whatever gets a row, so more drafts cost more.
SHARE, CONFIDENT_SHARE = 4, 2


@dataclasses.dataclass(frozen=True)
class Division:
    """Cycles that divide their rows among sequences.

    Attributes:
      mean_rows: Mean numbers of rows per slot, ascending; empty if rows are never divided.
      num_replicas: Number of replicas, each of which divides rows among its own slots.
      by_confidence: Whether rows go by the drafter's confidence rather than by statistics.
      share: Ratio of the most rows that a sequence may get to their mean number.
    """

    mean_rows: tuple[int, ...] = ()
    num_replicas: int = 1
    by_confidence: bool = False
    share: int = SHARE

    def drafted(self, sizes: tuple[int, ...], mean_rows: int) -> int:
        """Returns the block size to draft in a cycle that divides `mean_rows` per slot.

        That is the most rows that a sequence may get, and one of the `sizes`.
        """
        return next((size for size in sizes if size >= self.share * mean_rows), sizes[-1])


WHOLE = Division()  # Every sequence verifies as many rows as the others.


def block_sizes(largest: int) -> tuple[int, ...]:
    """Returns the sizes to choose from, ascending, from 1 (plain decoding) to `largest`."""
    return (*(size for size in SIZES if size < largest), largest)


def division(
    largest: int,
    slots_per_replica: int,
    num_replicas: int,
    *,
    by_confidence: bool = False,
    trees: bool = False,
) -> Division:
    """Returns the divisions to choose from; a single slot has nothing to divide."""
    means = MEAN_ROWS if slots_per_replica > 1 else ()
    means = tuple(mean for mean in means if mean < largest)
    share = CONFIDENT_SHARE if by_confidence and not trees else SHARE
    return Division(means, num_replicas, by_confidence, share)
