"""Advice on the block size, from the acceptance lengths and times of a run."""

import dataclasses
from collections.abc import Mapping

from dflash.config.schema import AUTO

LEAST_TAU = 0.95  # Fraction of the mean acceptance length that a shorter block must keep.


@dataclasses.dataclass(frozen=True)
class BlockAcceptance:
    """Acceptance lengths of cycles with blocks of a fixed size.

    Attributes:
      cycles: Number of cycles by acceptance length.
      block_size: Rows that a cycle verified.
    """

    cycles: Mapping[int, int]
    block_size: int

    def tau(self, block_size: int) -> float:
        """Returns the mean acceptance length (τ) that shorter blocks would have had."""
        committed = sum(min(length, block_size) * n for length, n in self.cycles.items())
        return committed / max(1, sum(self.cycles.values()))

    def speed_up(self, block_size: int, cost: float) -> float:
        """Estimates the speed-up over plain decoding of shorter blocks.

        Args:
          cost: Measured time of a cycle, in plain tokens. That of shorter blocks is interpolated.
        """
        part = (block_size - 1) / max(1, self.block_size - 1)
        return self.tau(block_size) / (1 + (cost - 1) * part)

    def enough(self) -> int:
        """Returns the smallest block size that keeps most of the mean acceptance length."""
        sizes = range(1, self.block_size + 1)
        least = LEAST_TAU * self.tau(self.block_size)
        return next(size for size in sizes if self.tau(size) >= least)


def slower_than_plain(
    drafter: object, acceptance: BlockAcceptance, speed_up: float | None
) -> list[str]:
    """Returns a warning if plain decoding was faster, with the block size that would pay.

    Args:
      speed_up: Measured speed-up over plain decoding; None if it is unknown.
    """
    if speed_up is None or speed_up >= 1 or not acceptance.cycles or acceptance.block_size < 2:
        return []
    tau = acceptance.tau(acceptance.block_size)
    cost = tau / speed_up
    finding = (
        f"warning: drafting is slower than plain decoding ({speed_up:.2f} ×): a cycle of "
        f"{acceptance.block_size} rows takes as long as {cost:.1f} plain tokens and commits "
        f"{tau:.2f}"
    )
    sizes = range(2, acceptance.block_size + 1)
    best = max(sizes, key=lambda size: acceptance.speed_up(size, cost))
    estimate = acceptance.speed_up(best, cost)
    key = _setting(drafter, best)
    if key is None or estimate <= 1 or best == acceptance.block_size:
        return [f"{finding}; no shorter block would pay, so use drafter.name=none"]
    return [f"{finding}; {key} would run at about {estimate:.2f} ×, by interpolation"]


def longer_than_needed(drafter: object, acceptance: BlockAcceptance) -> list[str]:
    """Returns a warning if blocks of at most half the size would commit nearly as many tokens."""
    enough, size = max(2, acceptance.enough()), acceptance.block_size
    key = _setting(drafter, enough)
    if key is None or 2 * enough > size:
        return []
    return [
        f"warning: cycles of {size} rows commit {acceptance.tau(size):.2f} tokens, and blocks of "
        f"{enough} would commit {acceptance.tau(enough):.2f}; {key}"
    ]


def _setting(drafter: object, block_size: int) -> str | None:
    """Returns the key that sets the block size; None for trees and sizes chosen in every cycle."""
    configured = getattr(drafter, "block_size", None)
    if getattr(drafter, "tree", None) is not None or configured == AUTO:
        return None
    if hasattr(drafter, "num_draft_tokens"):
        return f"drafter.num_draft_tokens={block_size - 1}"
    if not hasattr(drafter, "block_size"):
        return None
    return f"drafter.block_size={block_size} (or auto, which measures)"
