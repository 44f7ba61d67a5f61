"""Allocation of the target's cache pages, as host code that runs between dispatches."""

import dataclasses
import itertools
import math
from collections.abc import Iterable

from dflash import errors
from dflash.inference import batch_buckets
from dflash.layers.cache import SLOT_TILE, Ring

# Fewest rows of a prefill chunk, padding included. On a TPU or GPU a pass over 16 rows takes as
# long as one over 128, since reading the weights dominates; on a CPU fewer rows take less time.
MIN_CHUNK = 32
_STEP = 16  # The capacity of short sequences is a multiple of this number of rows.


class PagePool:
    """Pages of every data replica: which are free, held by sequences, or cached.

    The pool is sharded over the data axes of the mesh; a slot takes pages of its own replica. Page
    0 of a replica is scratch and never allocated.

    A page may be *published* under a key that identifies its content, so that other sequences with
    the same content hold the same page. A published page without holders stays *idle* until it is
    reused; the page that has been idle longest is reused first.
    """

    def __init__(self, num_replicas: int, pages_per_replica: int):
        self._replicas = [_ReplicaPages(pages_per_replica) for _ in range(num_replicas)]

    def take(self, replica: int, count: int) -> tuple[int, ...] | None:
        """Takes `count` pages of a replica, idle ones last; None if there are fewer."""
        if self.num_free(replica) < count:
            return None
        return tuple(self._replicas[replica].take() for _ in range(count))

    def give_back(self, replica: int, pages: tuple[int, ...]) -> None:
        """Releases the pages of a sequence, the last one first."""
        for page in reversed(pages):
            self._replicas[replica].let_go(page)

    def find(self, replica: int, keys: Iterable[bytes]) -> tuple[int, ...]:
        """Returns the pages published under these keys, up to the first key without a page."""
        pages = map(self._replicas[replica].page_of.get, keys)
        return tuple(itertools.takewhile(lambda page: page is not None, pages))

    def hold(self, replica: int, pages: tuple[int, ...]) -> None:
        """Adds a holder to published pages."""
        for page in pages:
            self._replicas[replica].hold(page)

    def publish(self, replica: int, page: int, key: bytes) -> bool:
        """Publishes a held page; False if another page is published under this key."""
        pages = self._replicas[replica]
        if key in pages.page_of:
            return False
        pages.page_of[key], pages.key_of[page] = page, key
        return True

    def forget(self) -> None:
        """Unpublishes all pages; idle ones become free."""
        for pages in self._replicas:
            pages.free.extend(reversed(pages.idle))
            for table in (pages.idle, pages.page_of, pages.key_of):
                table.clear()

    def num_free(self, replica: int) -> int:
        """Returns the number of pages of a replica that can be taken, idle ones included."""
        return len(self._replicas[replica].free) + self.num_idle(replica)

    def num_idle(self, replica: int) -> int:
        """Returns the number of published pages of a replica without holders."""
        return len(self._replicas[replica].idle)


class _ReplicaPages:
    """Pages of one data replica: each is free, idle, or has a count of holders."""

    def __init__(self, num_pages: int):
        self.free = list(range(num_pages - 1, 0, -1))
        self.holders: dict[int, int] = {}
        self.idle: dict[int, None] = {}  # In the order of reuse.
        self.page_of: dict[bytes, int] = {}
        self.key_of: dict[int, bytes] = {}

    def take(self) -> int:
        if self.free:
            page = self.free.pop()
        else:
            page = next(iter(self.idle))
            del self.idle[page]
            del self.page_of[self.key_of.pop(page)]
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
        if page in self.key_of:
            self.idle[page] = None
        else:
            self.free.append(page)


@dataclasses.dataclass(frozen=True)
class Slot:
    """Slot of the batch, and the pages that its sequence owns so far."""

    index: int
    pages: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Layout:
    """Static sizes of the decode loop, derived from the config.

    Attributes:
      batch_size: Number B of slots.
      max_length: Length of the longest sequence in tokens, prompt and output together.
      block_size: Number R of rows that the target computes per sequence.
      page_size: Number S of rows per page.
      prefill_chunk: Longest chunk of a prompt that runs at once, in tokens.
      num_replicas: Number of data replicas, which split the page pool.
      growth: Most tokens that one dispatch adds to a sequence.
      num_pages: Pages of all replicas together; None for enough to fill every slot.
      prefix_cache: Whether sequences may start with cached pages.
      partial: Whether dispatches may cover fewer than all slots; see `batch_buckets`.
      window: Largest window of the target's layers; None if all see all positions.
      exact: Whether all prefill chunks have the same size; see `DecodeConfig.exact`.
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
    window: int | None = None
    exact: bool = False

    def __post_init__(self):
        """Raises ConfigError if the pool of a replica cannot hold the longest sequence."""
        if self.pages_per_replica <= self.pages_per_sequence:
            raise errors.ConfigError(
                f"decode.num_pages: {self.num_pages} is {self.pages_per_replica - 1} for each of "
                f"{self.num_replicas} data replicas, but one sequence of {self.max_length} tokens "
                f"takes {self.pages_per_sequence} pages of {self.page_size}; expected at least "
                f"{self.num_replicas * self.pages_per_sequence}"
            )

    @property
    def ring(self) -> Ring | None:
        """Pages of layers with a window, which keep only the rows that a call reads or writes.

        None if no layer has a window, if rings would save nothing, or with a prefix cache: a later
        prompt may need the window at the end of any page.
        """
        if self.window is None or self.prefix_cache:
            return None
        # Writing may overwrite stale rows up to the end of a tile.
        rows = self.window + max(self.longest_chunk, self.block_size) + SLOT_TILE
        pages = math.ceil(rows / self.page_size)
        if pages >= self.pages_per_sequence:
            return None
        return Ring(pages, (self.slots_per_replica * pages + 1) * self.num_replicas)

    @property
    def longest_chunk(self) -> int:
        """Rows of the longest prefill chunk."""
        return min(self.prefill_chunk, _round_up(self.max_length, _STEP))

    @property
    def capacity(self) -> int:
        """Number of positions that the chunks of a sequence may write, padding included.

        Chunks begin at multiples of the longest one, unless pages came from the prefix cache.
        """
        if not self.prefix_cache:
            return _round_up(self.max_length, self.longest_chunk)
        padding = max(min(MIN_CHUNK, self.longest_chunk), self.longest_chunk // 2)
        return _round_up(self.max_length + padding, _STEP)

    @property
    def pages_per_sequence(self) -> int:
        """Pages of the longest sequence, with room for a block past its end."""
        return self.pages_for(self.max_length)

    @property
    def slots_per_replica(self) -> int:
        """Number of slots of each data replica."""
        return self.batch_size // self.num_replicas

    @property
    def bucket_sizes(self) -> tuple[int, ...]:
        """Batch buckets: numbers of slots per replica that a dispatch may cover, ascending."""
        slots = self.slots_per_replica
        return batch_buckets.bucket_sizes(slots) if self.partial else (slots,)

    def bucket_for(self, slots: Iterable[int]) -> int:
        """Returns the smallest batch bucket that covers the given slots."""
        needed = max((slot % self.slots_per_replica + 1 for slot in slots), default=1)
        return next(bucket for bucket in self.bucket_sizes if bucket >= needed)

    @property
    def pages_per_replica(self) -> int:
        """Pages of one replica, the scratch page included."""
        enough = self.slots_per_replica * self.pages_per_sequence
        if self.num_pages is not None:
            configured = self.num_pages // self.num_replicas
            # Only the prefix cache can use more pages than all slots together.
            enough = configured if self.prefix_cache else min(enough, configured)
        return enough + 1

    @property
    def overcommits(self) -> bool:
        """Returns whether the pool is too small to fill every slot at once."""
        return self.pages_per_replica <= self.slots_per_replica * self.pages_per_sequence

    def pages_for(self, length: int) -> int:
        """Returns the number of pages of `length` tokens, with room for a block past the end."""
        return math.ceil((length + self.block_size) / self.page_size)

    def pages_ahead(self, length: int, limit: int) -> int:
        """Returns the number of pages that a sequence must own before the next dispatch.

        In a pool that overcommits, these are the pages that one dispatch may fill. Otherwise they
        are all pages that the sequence will need, so that its row of the table never changes.

        Args:
          length: Number of committed tokens.
          limit: Length at which the sequence ends, in tokens.
        """
        return self.pages_for(min(length + self.growth, limit) if self.overcommits else limit)

    def standing_pages(self, slot: int) -> tuple[int, ...]:
        """Returns pages for a full sequence in a slot, for timing with every slot full.

        In a pool that overcommits, several slots share pages; the work is the same.
        """
        first = slot % self.slots_per_replica * self.pages_per_sequence
        usable = self.pages_per_replica - 1
        return tuple(1 + (first + i) % usable for i in range(self.pages_per_sequence))

    def replica_of(self, slot: int) -> int:
        """Returns the data replica of a slot, which holds its pages."""
        return slot // self.slots_per_replica

    def chunk(self, tokens: int) -> int:
        """Returns the rows of the next chunk of a prompt with `tokens` tokens left.

        The number includes padding: it is a power of two or the longest chunk, so that few programs
        serve all prompts.
        """
        if self.exact:  # Else it would depend on the other replicas' prompts.
            return self.longest_chunk
        power = max(MIN_CHUNK, 1 << (tokens - 1).bit_length())
        return min(power, self.longest_chunk)

    def chunks(self, lengths: Iterable[int]) -> list[int]:
        """Returns the rows of all chunks that prompts of these lengths may need, ascending.

        If the pool overcommits, preempted sequences return as longer prompts; with a prefix cache,
        any part of a prompt may be left. In these cases all sizes up to the longest are needed.
        """
        lengths, longest = set(lengths), self.longest_chunk
        if lengths and (self.overcommits or self.prefix_cache):
            most = self.max_length if self.overcommits else max(lengths)
            return sorted({self.chunk(min(1 << i, most)) for i in range(most.bit_length() + 1)})
        full = {longest for length in lengths if length >= longest}
        return sorted(full | {self.chunk(rest) for n in lengths if (rest := n % longest)})

    @property
    def prefill_pages(self) -> int:
        """Entries of the page table of a sequence in prefill, padding rows included."""
        return max(self.pages_per_sequence, math.ceil(self.capacity / self.page_size))


def _round_up(number: int, step: int) -> int:
    return math.ceil(number / step) * step
