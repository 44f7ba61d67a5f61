"""Handing out pages of the target's cache: plain host code, run between dispatches."""

import dataclasses
import math

from dflash import errors

# Prompts up to so many tokens share their programs. On a TPU or GPU a pass over 128 rows takes as
# long as one over 16: as long as reading the weights.
MIN_BUCKET = 128
_STEP = 16  # rows that the capacity of short sequences is a multiple of


class PagePool:
    """Free pages of each share of the pool.

    The pool is split over the data axes of the mesh; a slot takes pages from the share that its
    own device holds. Page 0 of a share is scratch and never handed out.
    """

    def __init__(self, num_shares: int, pages_per_share: int):
        self._free = [list(range(pages_per_share - 1, 0, -1)) for _ in range(num_shares)]

    def take(self, share: int, count: int) -> tuple[int, ...] | None:
        """Takes `count` pages of a share, or None if fewer are free."""
        free = self._free[share]
        if len(free) < count:
            return None
        return tuple(free.pop() for _ in range(count))

    def give_back(self, share: int, pages: tuple[int, ...]) -> None:
        """Returns pages that were taken from `share`."""
        self._free[share].extend(reversed(pages))

    def num_free(self, share: int) -> int:
        """Free pages of a share."""
        return len(self._free[share])


@dataclasses.dataclass(frozen=True)
class Slot:
    """A place in the batch, and the pages that its sequence owns so far."""

    index: int
    pages: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Layout:
    """Static sizes of the decode loop, all derived from the configuration.

    Attributes:
      batch_size: B, slots.
      max_length: longest sequence in tokens, prompt and output together.
      block_size: R, rows that the target verifies.
      page_size: S, rows of a page.
      prefill_chunk: longest piece of a prompt that runs at once, in tokens.
      num_shares: pieces that the page pool is split into, one per data replica.
      growth: tokens that one dispatch may add to a sequence.
      num_pages: pages of all shares together; None for enough to fill every slot.
    """

    batch_size: int
    max_length: int
    block_size: int
    page_size: int
    prefill_chunk: int
    num_shares: int
    growth: int = 1
    num_pages: int | None = None

    def __post_init__(self):
        """Raises ConfigError if the pool cannot hold the longest sequence in every share."""
        if self.pages_per_share <= self.pages_per_sequence:
            raise errors.ConfigError(
                f"decode.num_pages: {self.num_pages} is {self.pages_per_share - 1} for each of "
                f"{self.num_shares} data replicas, but one sequence of {self.max_length} tokens "
                f"takes {self.pages_per_sequence} pages of {self.page_size}; expected at least "
                f"{self.num_shares * self.pages_per_sequence}"
            )

    @property
    def capacity(self) -> int:
        """The largest prompt bucket in tokens: max_length, rounded up to what a chunk divides."""
        step = self.prefill_chunk if self.max_length > self.prefill_chunk else _STEP
        return math.ceil(self.max_length / step) * step

    @property
    def pages_per_sequence(self) -> int:
        """Pages of the longest sequence, with room for a block written past its end."""
        return self.pages_for(self.max_length)

    @property
    def slots_per_share(self) -> int:
        """Slots that take their pages from the same share."""
        return self.batch_size // self.num_shares

    @property
    def pages_per_share(self) -> int:
        """Pages of one share, the scratch page included."""
        enough = self.slots_per_share * self.pages_per_sequence
        if self.num_pages is not None:
            enough = min(enough, self.num_pages // self.num_shares)
        return enough + 1

    @property
    def overcommits(self) -> bool:
        """Whether the pool is too small for every slot to be full at once."""
        return self.pages_per_share <= self.slots_per_share * self.pages_per_sequence

    def pages_for(self, length: int) -> int:
        """Pages of a sequence of `length` tokens, with room for a block written past its end."""
        return math.ceil((length + self.block_size) / self.page_size)

    def pages_ahead(self, length: int, limit: int) -> int:
        """Pages that a sequence must own before the next dispatch.

        Args:
          length: committed tokens.
          limit: tokens at which the sequence ends.
        Returns:
          As many as one dispatch may fill; where the pool has room for all, as many as it will ever
          need, so that no table changes while it runs.
        """
        return self.pages_for(min(length + self.growth, limit) if self.overcommits else limit)

    def standing_pages(self, slot: int) -> tuple[int, ...]:
        """Pages of a slot when every slot is as full as can be, for timing.

        In a pool that overcommits several slots share pages: the work is the same.
        """
        first, usable = slot % self.slots_per_share * self.pages_per_sequence, self.pages_per_share
        return tuple(1 + (first + i) % (usable - 1) for i in range(self.pages_per_sequence))

    def share_of(self, slot: int) -> int:
        """The share of the pool that slot `slot` takes its pages from."""
        return slot // self.slots_per_share

    def bucket(self, length: int) -> int:
        """Padded length of a prompt: a power of two, or the capacity."""
        smallest = min(MIN_BUCKET, self.prefill_chunk)
        power = max(smallest, 1 << (length - 1).bit_length())
        return min(power, self.capacity)

    def buckets(self, lengths) -> list[int]:
        """Buckets that prompts of these lengths (in tokens) may need, ascending.

        Where the pool overcommits, a preempted sequence comes back as a longer prompt, so all that
        are not smaller than the smallest are needed.
        """
        lengths = set(lengths)
        if self.overcommits and lengths:
            lengths |= {min(lengths) << i for i in range(self.max_length.bit_length())}
            lengths = {min(length, self.max_length) for length in lengths}
        return sorted({self.bucket(length) for length in lengths})

    def chunk(self, bucket: int) -> int:
        """Tokens that one prefill call of a bucket runs."""
        return min(bucket, self.prefill_chunk)

    def prefix_pages(self, bucket: int) -> int:
        """Pages that a prompt of a bucket fills, padding included."""
        return math.ceil(bucket / self.page_size)
