"""Decides which requests a drafter observes, and for which it rests.

A drafter that observes a request computes its own rows for every token of it, whether drafts are
verified or not. Where plain decoding is the fastest, that is work for nothing but trials. So while
many requests wait, the drafter rests, and those that are admitted decode plainly to their end. It
rests only if hardly any cycle has drafted of late: of a mix of requests, some may profit though
most do not.

A trial is due when a rest ends. The drafter goes on with the last requests, because fewer sequences
leave more to gain: all are observed from when fewer requests wait than half the batch. When the
queue is empty and most cycles draft, or only requests are left that are not observed, these return
to the queue, to be prefilled again, if they may have many tokens left.
"""

import dataclasses

PERIOD = 8  # While the drafter rests, one batch in so many is observed, for trials.
MEMORY = 256.0  # Observed cycles that count, times slots: more sequences tell more.
UNKNOWN = 1 / 4  # Fraction of cycles that draft, before any is known.
LITTLE = 1 / 16  # Fraction of cycles that draft, below which the drafter rests.
MUCH = 1 / 2  # Fraction of cycles that draft, from which another prefill may be worth it.
LEFT = 0.25  # Tokens left, over the tokens of the context, from which another prefill is worth it.


@dataclasses.dataclass
class Observation:
    """Counts admissions, and decides whether each request is observed.

    Attributes:
      slots: Number of slots of the batch.
      drafted: Fraction of the observed cycles that drafted; older ones count less.
      rested: Requests admitted since the drafter began to rest; 0 while drafting pays.
      resting: Whether the last request that was admitted is not observed.
    """

    slots: int
    drafted: float = UNKNOWN
    rested: int = 0
    resting: bool = False

    def learn(self, cycles: int, drafted: int) -> None:
        """Updates the fraction with a number of observed cycles, some of which drafted."""
        if cycles:
            fade = (1 - 1 / MEMORY) ** (self.slots * cycles)
            self.drafted = fade * self.drafted + (1 - fade) * drafted / cycles

    def admit(self, *, waiting: int) -> bool:
        """Returns whether the drafter observes the request that is being admitted.

        Args:
          waiting: Number of requests that wait behind it.
        """
        if self.drafted < LITTLE and 2 * waiting >= self.slots:
            self.resting = self.rested % (PERIOD * self.slots) < (PERIOD - 1) * self.slots
            self.rested += 1
        else:
            self.resting, self.rested = False, 0
        return not self.resting

    @property
    def pays(self) -> bool:
        """Returns whether most cycles draft."""
        return self.drafted >= MUCH


def resumes(length: int, limit: int) -> bool:
    """Returns whether a request is worth another prefill, so that its drafter observes it.

    Args:
      length: Number of committed tokens of prompt and output.
      limit: Largest number that it may reach.
    """
    return limit - length >= LEFT * length
