"""Decides which requests a drafter observes, and for which it rests.

A drafter that observes a request computes its own rows for every token of it, whether drafts are
verified or not. Where plain decoding is the fastest, that is work for nothing but trials. So while
many requests wait, the drafter rests: it observes no running request any longer, and none that is
admitted, and all of them decode plainly to their end. It rests if drafting has saved less time of
late than observing takes: of a mix of requests, some may profit though most do not.

A trial is due when a rest ends; if it fails, another rest begins, which is twice as long. A run
begins with a rest if drafting could not pay for a full batch, by the times of cycles, even if
nearly all drafts were accepted.

Fewer sequences leave more to gain. So where fewer requests wait than half the batch, no rest
begins, and one ends if drafting pays for half a batch by what was accepted before it. When the
queue is empty and drafting saves much, or so few requests are left that it pays and none is
observed, these return to the queue, to be prefilled again, if they may have many tokens left.
"""

import dataclasses
from collections.abc import Sequence

PERIOD, LONGEST = 8, 64  # Batches from one trial to the next, at first and at most.
MEMORY = 256.0  # Observed cycles that count, times slots: more sequences tell more.
# Plain cycles that drafting saves per observed cycle:
UNKNOWN = 1 / 4  # Before any is known; also the bound of what is learnt, so that a change is soon.
LITTLE = 1 / 20  # Below this the drafter rests; about what observing takes.
MUCH = 1 / 8  # From this on another prefill may be worth it.
LEFT = 0.25  # Tokens left, over the tokens of the context, from which another prefill is worth it.


@dataclasses.dataclass
class Observation:
    """Counts admissions, and decides whether each request is observed.

    Attributes:
      slots: Number of slots of the batch.
      most: Largest number of requests at once for which drafting is expected to pay.
      saved: Plain cycles saved per observed cycle, a mean in which older ones count less.
      rested: Requests admitted since a rest began, up to the next one; 0 while drafting pays.
      period: Batches from the beginning of a rest to the end of the trial after it.
      resting: Whether the last request that was admitted is not observed.
    """

    slots: int
    most: int
    saved: float
    rested: int = 0
    period: int = PERIOD
    resting: bool = False

    @classmethod
    def at_first(cls, slots: int, most: int) -> "Observation":
        """Returns the state before the first request of a run; see the attributes."""
        return cls(slots, most, UNKNOWN if most >= slots else 0.0)

    def learn(self, saved: Sequence[float], *, plain: bool = True) -> None:
        """Updates the mean, and ends a trial that failed.

        Args:
          saved: Plain cycles that each of some observed cycles saved.
          plain: Whether the cycle after them drafts nothing.
        """
        if not len(saved):
            return
        total, fade = float(sum(saved)), (1 - 1 / MEMORY) ** (self.slots * len(saved))
        mean = fade * self.saved + (1 - fade) * total / len(saved)
        self.saved = min(max(mean, -UNKNOWN), UNKNOWN)
        if self.saved >= LITTLE:
            self.period = PERIOD
        elif self.rested and plain and total < 0:
            self.rested, self.period = 0, min(2 * self.period, LONGEST)

    def admit(self, *, waiting: int, running: int = 0) -> bool:
        """Returns whether the drafter observes the request that is being admitted.

        Args:
          waiting: Number of requests that wait behind it.
          running: Number of other requests that hold slots.
        """
        if self._should_rest(waiting, running + 1 + waiting):
            since = self.rested % (self.period * self.slots)
            self.resting = since < (self.period - 1) * self.slots
            self.rested += 1
        else:
            self.resting, self.rested = False, 0
        return not self.resting

    def rests(self, *, waiting: int, running: int = 0) -> bool:
        """Begins a rest without an admission, if one is due; returns whether it does.

        Args:
          waiting: Number of requests that wait.
          running: Number of requests that hold slots.
        """
        due = not (self.resting or self.rested) and self._should_rest(waiting, running + waiting)
        self.resting |= due
        return due

    @property
    def few(self) -> int:
        """Returns how many requests are so few that drafting may pay though it has not of late."""
        return min(self._half, self.most)

    @property
    def _half(self) -> int:
        return (self.slots + 1) // 2

    def _should_rest(self, waiting: int, total: int) -> bool:
        if self.saved >= LITTLE or total <= self.few:
            return False
        # The last ones go on resting if it does not pay for half a batch: no trial is made while
        # less than half of the sequences are observed.
        return waiting >= self._half or (self.resting and self.most < self._half)

    @property
    def pays(self) -> bool:
        """Returns whether drafting saves much."""
        return self.saved >= MUCH


def resumes(length: int, limit: int) -> bool:
    """Returns whether a request is worth another prefill, so that its drafter observes it.

    Args:
      length: Number of committed tokens of prompt and output.
      limit: Largest number that it may reach.
    """
    return limit - length >= LEFT * length
