"""Handing out pages of the target's cache: plain host code, run between dispatches."""

import dataclasses
import itertools
import math
from collections.abc import Iterable

from dflash import errors
from dflash.inference import batch_buckets

# Chunks of a prompt have at least so many rows, padding included. On a TPU or GPU a pass over 128
# rows takes as long as one over 16, as long as reading the weights; on a CPU fewer take less.
MIN_CHUNK = 32
_STEP = 16  # rows that the capacity of short sequences is a multiple of


class PagePool:
    """The pages of each share of the pool: their holders, and what unused ones still contain.

    The pool is split over the data axes of the mesh; a slot takes pages from the share that its
    own device holds. Page 0 of a share is scratch and never handed out.

    A page may be *published* under a key that names its content. Other sequences that need the same
    content then hold the same page. A published page that nobody holds stays *idle* until it is
    taken for something else, the one that was given back first before all others.
    """

    def __init__(self, num_replicas: int, pages_per_replica: int):
        """Every page is free."""
        self._shares = [_Share(pages_per_replica) for _ in range(num_replicas)]

    def take(self, share: int, count: int) -> tuple[int, ...] | None:
        """Takes `count` pages of a share, idle ones last; None if there are fewer."""
        return self._shares[share].take(count)

    def give_back(self, share: int, pages: tuple[int, ...]) -> None:
        """Lets go of pages that were taken or held; of a sequence's, its last one goes first."""
        for page in reversed(pages):
            self._shares[share].let_go(page)

    def find(self, share: int, keys: Iterable[bytes]) -> tuple[int, ...]:
        """Pages published under these keys, up to the first key that there is none for."""
        pages = map(self._shares[share].page_of.get, keys)
        return tuple(itertools.takewhile(lambda page: page is not None, pages))

    def hold(self, share: int, pages: tuple[int, ...]) -> None:
        """Holds pages that were found, beside those who hold them already."""
        for page in pages:
            self._shares[share].hold(page)

    def publish(self, share: int, page: int, key: bytes) -> bool:
        """Publishes a page that is held; False if another one is published under this key."""
        return self._shares[share].publish(page, key)

    def forget(self) -> None:
        """Makes all published pages ordinary ones."""
        for share in self._shares:
            share.forget()

    def num_free(self, share: int) -> int:
        """Pages of a share that can be taken, idle ones included."""
        return len(self._shares[share].free) + self.num_idle(share)

    def num_idle(self, share: int) -> int:
        """Published pages of a share that nobody holds."""
        return len(self._shares[share].idle)


class _Share:
    """One share of a `PagePool`. A page is free, idle, or has a count of holders."""

    def __init__(self, num_pages: int):
        self.free = list(range(num_pages - 1, 0, -1))
        self.holders: dict[int, int] = {}
        self.idle: dict[int, None] = {}  # in the order in which they will be taken
        self.page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}

    def take(self, count: int) -> tuple[int, ...] | None:
        if len(self.free) + len(self.idle) < count:
            return None
        return tuple(self._take_one() for _ in range(count))

    def _take_one(self) -> int:
        if self.free:
            page = self.free.pop()
        else:
            page = next(iter(self.idle))
            del self.idle[page]
            del self.page_of[self._key_of.pop(page)]
        self.holders[page] = 1
        return page

    def hold(self, page: int) -> None:
        self.idle.pop(page, None)
        self.holders[page] = self.holders.get(page, 0) + 1

    def let_go(self, page: int) -> None:
        self.holders[page] -= 1
        if self.holders[page]:
            return
        del self.holders[page]
        if page in self._key_of:
            self.idle[page] = None
        else:
            self.free.append(page)

    def publish(self, page: int, key: bytes) -> bool:
        if key in self.page_of:
            return False
        self.page_of[key], self._key_of[page] = page, key
        return True

    def forget(self) -> None:
        self.free.extend(reversed(self.idle))
        self.idle.clear()
        self.page_of.clear()
        self._key_of.clear()


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
      num_replicas: pieces that the page pool is split into, one per data replica.
      growth: tokens that one dispatch may add to a sequence.
      num_pages: pages of all shares together; None for enough to fill every slot.
      prefix_cache: sequences may begin with pages that others have filled.
      partial: dispatches may cover fewer slots than there are.
    """

    batch_size: int
    max_length: int
    block_size: int
    page_size: int
    prefill_chunk: int
    num_replicas: int
    growth: int = 1
    num_pages: int | None = None
    prefix_cache: bool = False
    partial: bool = False

    def __post_init__(self):
        """Raises ConfigError if the pool cannot hold the longest sequence in every share."""
        if self.pages_per_replica <= self.pages_per_sequence:
            raise errors.ConfigError(
                f"decode.num_pages: {self.num_pages} is {self.pages_per_replica - 1} for each of "
                f"{self.num_replicas} data replicas, but one sequence of {self.max_length} tokens "
                f"takes {self.pages_per_sequence} pages of {self.page_size}; expected at least "
                f"{self.num_replicas * self.pages_per_sequence}"
            )

    @property
    def longest_chunk(self) -> int:
        """Rows of the longest piece of a prompt that runs at once."""
        return min(self.prefill_chunk, _round_up(self.max_length, _STEP))

    @property
    def capacity(self) -> int:
        """Positions of a sequence that a chunk may write, its padding included.

        Chunks begin at multiples of the longest one, unless pages came from the prefix cache.
        """
        if not self.prefix_cache:
            return _round_up(self.max_length, self.longest_chunk)
        padding = max(min(MIN_CHUNK, self.longest_chunk), self.longest_chunk // 2)
        return _round_up(self.max_length + padding, _STEP)

    @property
    def pages_per_sequence(self) -> int:
        """Pages of the longest sequence, with room for a block written past its end."""
        return self.pages_for(self.max_length)

    @property
    def slots_per_replica(self) -> int:
        """Slots that take their pages from the same share."""
        return self.batch_size // self.num_replicas

    @property
    def bucket_sizes(self) -> tuple[int, ...]:
        """Batch buckets: numbers of slots per replica that a dispatch may cover, ascending."""
        whole = self.slots_per_replica
        return batch_buckets.bucket_sizes(whole) if self.partial else (whole,)

    def bucket_for(self, slots: Iterable[int]) -> int:
        """Returns the smallest batch bucket that covers these slots."""
        needed = max((slot % self.slots_per_replica + 1 for slot in slots), default=1)
        return next(size for size in self.bucket_sizes if size >= needed)

    @property
    def pages_per_replica(self) -> int:
        """Pages of one share, the scratch page included."""
        enough = self.slots_per_replica * self.pages_per_sequence
        if self.num_pages is not None:
            given = self.num_pages // self.num_replicas
            # Pages that no sequence can use are of use to the prefix cache alone.
            enough = given if self.prefix_cache else min(enough, given)
        return enough + 1

    @property
    def overcommits(self) -> bool:
        """Whether the pool is too small for every slot to be full at once."""
        return self.pages_per_replica <= self.slots_per_replica * self.pages_per_sequence

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
        first, usable = (
            slot % self.slots_per_replica * self.pages_per_sequence,
            self.pages_per_replica,
        )
        return tuple(1 + (first + i) % (usable - 1) for i in range(self.pages_per_sequence))

    def replica_of(self, slot: int) -> int:
        """The share of the pool that slot `slot` takes its pages from."""
        return slot // self.slots_per_replica

    def chunk(self, tokens: int) -> int:
        """Rows of the next chunk of a prompt of which so many tokens are left, padding included.

        A power of two, or the longest chunk: few programs serve all prompts.
        """
        power = max(MIN_CHUNK, 1 << (tokens - 1).bit_length())
        return min(power, self.longest_chunk)

    def chunks(self, lengths: Iterable[int]) -> list[int]:
        """Rows of all chunks that prompts of these lengths (in tokens) may need, ascending.

        Where the pool overcommits, a preempted sequence comes back as a longer prompt, and where
        prompts are cached any part of one may be left: then all sizes up to the longest are needed.
        """
        lengths, longest = set(lengths), self.longest_chunk
        if lengths and (self.overcommits or self.prefix_cache):
            most = self.max_length if self.overcommits else max(lengths)
            return sorted({self.chunk(min(1 << i, most)) for i in range(most.bit_length() + 1)})
        whole = {longest for length in lengths if length >= longest}
        return sorted(whole | {self.chunk(rest) for n in lengths if (rest := n % longest)})

    @property
    def prefill_pages(self) -> int:
        """Entries of the page table of a sequence in prefill, whose padding goes to scratch."""
        return max(self.pages_per_sequence, math.ceil(self.capacity / self.page_size))


def _round_up(number: int, step: int) -> int:
    return math.ceil(number / step) * step
