"""Ways in which drafting overlaps verification."""

import dataclasses
from typing import Any

from dflash.drafters.base import Drafter


@dataclasses.dataclass(frozen=True)
class Overlap:
    """Way in which drafting overlaps verification.

    Attributes:
      groups: Number of equal groups of slots, which the target verifies in turn.
      fan_out: Number of bonus tokens to foresee for each number of accepted drafts; 0 to draft
        once the outcome is known.
    """

    groups: int
    fan_out: int

    @classmethod
    def of(cls, drafter_config: Any) -> "Overlap | None":
        """Returns the overlap that the config group `drafter` asks for; None for none."""
        if not drafter_config.overlaps:
            return None
        return cls(1, drafter_config.fan_out)

    def num_verified(self, drafter: Drafter) -> int:
        """Returns the number of drafts to verify: with speculation, all but the last.

        The distribution of the last one is that of the bonus token after all others.
        """
        return drafter.num_draft_tokens - (1 if self.fan_out else 0)

    def num_forks(self, drafter: Drafter) -> int:
        """Returns the number of outcomes to foresee per sequence."""
        return drafter.num_draft_tokens * self.fan_out
