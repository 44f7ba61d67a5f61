"""The prefix cache: full pages of what was computed, for later prompts that begin alike.

A page is published under a key that names all tokens up to its end, and whatever its rows depend on
beside them. It counts only when the rows of target and drafter are both there. The target's rows
stay where they are: sequences share pages. The drafter's rows are copied out of the slot, into
pages of their own with the same numbers, and from there into the lane of a prompt that has a hit.
"""

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from dflash.inference import program_table
from dflash.inference.engine import Engine
from dflash.inference.pages import PagePool, Slot
from dflash.inference.pieces import GREEDY, PrefillChunk, pack
from dflash.inference.state import DecodeState


def page_keys(text: Sequence[int], page_size: int, ahead: int = 0) -> Iterator[bytes]:
    """Keys of the pages that a text fills, in order: a chain of hashes.

    Args:
      text: token ids.
      page_size: tokens of a page.
      ahead: tokens past its end that a page depends on too; a page without them is left out.
    """
    tokens, key = np.asarray(text, np.uint32), b""
    for end in range(page_size, len(tokens) - ahead + 1, page_size):
        # What follows belongs to this page's key, but not to the chain.
        key = hashlib.blake2b(
            key + tokens[end - page_size : end].tobytes(), digest_size=16
        ).digest()
        yield key + tokens[end : end + ahead].tobytes()


class PrefixCache:
    """Finds and publishes the pages of an engine; does nothing where the engine has no cache."""

    def __init__(self, engine: Engine, pool: PagePool):
        """Starts empty.

        Args:
          engine: computes the pages.
          pool: hands them out.
        """
        self._engine, self._pool = engine, pool
        self._keeps_rows = program_table.keeps_rows(engine.shapes)
        # Pages of the drafter's rows, beside those of the target.
        self._context = engine.program("new_context")() if self._keeps_rows else ()

    def find(self, share: int, text: Sequence[int], length: int) -> tuple[int, ...]:
        """Pages of a share that hold the first tokens of a text, for a prompt of `length` of them.

        At least one token of the prompt is left to compute.
        """
        if not self._engine.prefix_cache:
            return ()
        most = (length - 1) // self._engine.layout.page_size
        return self._pool.find(share, list(self._keys(text))[:most])

    def restore(self, lanes: Any, lane: int, pages: Sequence[int], text: Sequence[int]) -> Any:
        """Returns the drafter's state with that of a cached prefix in a lane.

        Args:
          lanes: The drafter's state of the prompts in prefill; consumed.
          lane: Lane of the prompt.
          pages: The cached pages.
          text: Token ids of the prompt, which is longer than they are.
        """
        engine = self._engine
        if self._keeps_rows:
            row = engine.page_row(Slot(lane, tuple(pages)))
            where = np.int32(lane), row, np.int32(len(pages))
            return engine.program("restore")(lanes, self._context, *where)
        if program_table.replays(engine.shapes):
            end, step = len(pages) * engine.layout.page_size, engine.layout.longest_chunk
            for start in range(0, end, step):
                last = min(start + step, end)
                piece = PrefillChunk.of(text, start, last, pages, GREEDY, fresh=not start)
                chunk = pack({lane: piece}, engine.num_lanes, engine.layout)
                run = engine.program("replay", chunk.tokens.shape[1])
                lanes = run(engine.target_params, engine.drafter_params, lanes, chunk)
        return lanes

    def publish(
        self, state: DecodeState, slot: Slot, text: Sequence[int], rows: int, begin: int
    ) -> int:
        """Publishes pages of a slot.

        Args:
          state: the batch.
          slot: where the sequence is.
          text: its tokens.
          rows: positions of it that the cache and the drafter's state hold.
          begin: pages that were published before.
        Returns:
          pages that are published now; those that another sequence has published count too.
        """
        if not self._engine.prefix_cache:
            return begin
        layout = self._engine.layout
        share, full = layout.replica_of(slot.index), rows // layout.page_size
        keys = list(self._keys(text))[:full]
        fresh = [0] * len(keys)
        for i in range(begin, len(keys)):
            if self._pool.publish(share, slot.pages[i], keys[i]):
                fresh[i] = slot.pages[i]
        if any(fresh) and self._keeps_rows:
            row = self._engine.page_row(Slot(slot.index, tuple(fresh)))
            where = np.int32(slot.index), row, np.int32(len(fresh))
            run = self._engine.program("store")
            self._context = run(self._context, state.drafter, *where)
        return max(begin, len(keys))

    def _keys(self, text: Sequence[int]) -> Iterator[bytes]:
        ahead = self._engine.drafter.rows_ahead
        return page_keys(text, self._engine.layout.page_size, ahead)
