"""Handing out pages of the target's cache: plain host code, run between dispatches."""

import dataclasses
import math


class PagePool:
    """Free pages of each share of the pool.

    The pool is split over the data axes of the mesh; a slot takes pages from the share that its
    own device holds. Page 0 of a share is scratch and never handed out.
    """

    def __init__(self, num_shares: int, pages_per_share: int):
        self._free = [list(range(pages_per_share - 1, 0, -1)) for _ in range(num_shares)]

    def take(self, share: int, count: int) -> tuple[int, ...] | None:
        """Takes `count` pages of a share, or None if it has not that many left."""
        free = self._free[share]
        if len(free) < count:
            return None
        return tuple(free.pop() for _ in range(count))

    def give_back(self, share: int, pages: tuple[int, ...]) -> None:
        """Returns pages that were taken from `share`."""
        self._free[share].extend(reversed(pages))

    def num_free(self, share: int) -> int:
        """Pages of a share that nobody holds."""
        return len(self._free[share])


@dataclasses.dataclass(frozen=True)
class Layout:
    """Static sizes of the decode loop, all derived from the configuration.

    Attributes:
      batch_size: B, slots.
      max_length: longest sequence in tokens, prompt and output together.
      block_size: R, rows that the target verifies.
      page_size: S, slots per page.
      prefill_chunk: longest piece of a prompt that runs at once, in tokens.
      num_shares: pieces that the page pool is split into, one per data replica.
    """

    batch_size: int
    max_length: int
    block_size: int
    page_size: int
    prefill_chunk: int
    num_shares: int

    @property
    def capacity(self) -> int:
        """The largest prompt bucket in tokens: max_length, rounded up to what a chunk divides."""
        step = self.prefill_chunk if self.max_length > self.prefill_chunk else MIN_BUCKET
        return math.ceil(self.max_length / step) * step

    @property
    def pages_per_sequence(self) -> int:
        """Pages of the longest sequence, with room for a block written past its end."""
        return self.pages_for(self.max_length)

    @property
    def pages_per_share(self) -> int:
        """Pages of one share: enough for every slot of it to be full, and the scratch page."""
        return self.batch_size // self.num_shares * self.pages_per_sequence + 1

    def pages_for(self, length: int) -> int:
        """Pages of a sequence of `length` tokens, with room for a block written past its end."""
        return math.ceil((length + self.block_size) / self.page_size)

    def share_of(self, slot: int) -> int:
        """The share of the pool that slot `slot` lives in."""
        return slot // (self.batch_size // self.num_shares)

    def bucket(self, length: int) -> int:
        """Padded length of a prompt: a power of two, or the capacity."""
        power = max(MIN_BUCKET, 1 << (length - 1).bit_length())
        return min(power, self.capacity)

    def chunk(self, bucket: int) -> int:
        """Tokens that one prefill call of a bucket runs."""
        return min(bucket, self.prefill_chunk)

    def prefix_pages(self, bucket: int) -> int:
        """Pages that a prompt of a bucket fills, padding included."""
        return math.ceil(bucket / self.page_size)


MIN_BUCKET = 16
