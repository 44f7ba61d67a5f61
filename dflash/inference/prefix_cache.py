"""Prefix cache: full pages of computed tokens, for later prompts with the same beginning.

A page is published under a key that identifies all tokens up to its end, and everything else that
its rows depend on. It is published once the rows of both target and drafter exist. The target's
rows stay in place, since sequences share pages. The drafter's rows are copied from the slot to
pages of their own with the same numbers, and from there to the prefill slot of a prompt with a hit.
"""

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from dflash.inference import program_table
from dflash.inference.cycle.state import DecodeState
from dflash.inference.engine import Engine
from dflash.inference.pages import PagePool, Slot
from dflash.inference.prefill import GREEDY, PrefillChunk, pack
from dflash.inference.request import SHARED, CacheGroup


def page_keys(
    token_ids: Sequence[int], page_size: int, ahead: int = 0, group: CacheGroup = SHARED
) -> Iterator[bytes]:
    """Yields the keys of the pages that a sequence fills, in order, as a chain of hashes.

    Args:
      ahead: Number of tokens past its end that a page depends on too; pages without them are left
        out.
      group: What all keys depend on, so that pages of another group are never found.
    """
    tokens, key = np.asarray(token_ids, np.uint32), b""
    if group.salt:
        key = hashlib.blake2b(group.salt.encode(), digest_size=16, person=b"salt").digest()
    if group.adapter:
        number = group.adapter.to_bytes(4, "little")
        key = hashlib.blake2b(key + number, digest_size=16, person=b"adapter").digest()
    for end in range(page_size, len(tokens) - ahead + 1, page_size):
        # The tokens that follow belong to the key of this page, but not to the chain.
        key = hashlib.blake2b(
            key + tokens[end - page_size : end].tobytes(), digest_size=16
        ).digest()
        yield key + tokens[end : end + ahead].tobytes()


class PrefixCache:
    """Prefix cache of an engine; empty if the engine has none."""

    def __init__(self, engine: Engine, pool: PagePool):
        """Creates an empty cache of pages that the engine computes and the pool allocates."""
        self._engine, self._pool = engine, pool
        self._keeps_rows = program_table.keeps_rows(engine.shapes)
        # Pages of the drafter's rows, with the numbers of the target's pages.
        self._context = engine.program("new_context")() if self._keeps_rows else ()

    def find(
        self, replica: int, token_ids: Sequence[int], length: int, group: CacheGroup
    ) -> tuple[int, ...]:
        """Returns a replica's cached pages of the first `length` tokens of a sequence.

        At least one of these tokens is left to compute.
        """
        if not self._engine.prefix_cache:
            return ()
        most = (length - 1) // self._engine.layout.page_size
        return self._pool.find(replica, list(self._keys(token_ids, group))[:most])

    def restore(
        self,
        prefill_state: Any,
        prefill_slot: int,
        pages: Sequence[int],
        token_ids: Sequence[int],
    ) -> Any:
        """Returns the prefill state with a cached prefix in one prefill slot.

        Args:
          prefill_state: The drafter's state of the prompts in prefill; consumed.
          token_ids: Tokens of the prompt, which extends beyond these pages.
        """
        engine = self._engine
        if self._keeps_rows:
            row = engine.page_row(Slot(prefill_slot, tuple(pages)))
            where = np.int32(prefill_slot), row, np.int32(len(pages))
            return engine.program("restore")(prefill_state, self._context, *where)
        if program_table.replays(engine.shapes):
            end, step = len(pages) * engine.layout.page_size, engine.layout.longest_chunk
            slot = Slot(prefill_slot * engine.layout.slots_per_replica, tuple(pages))
            for start in range(0, end, step):
                last = min(start + step, end)
                chunk = PrefillChunk.of(token_ids, start, last, slot, GREEDY, fresh=not start)
                inputs = pack({prefill_slot: chunk}, engine.num_prefill_slots, engine.layout)
                run = engine.program("replay", inputs.tokens.shape[1])
                weights = engine.target_params, engine.drafter_params
                prefill_state = run(*weights, prefill_state, inputs)
        return prefill_state

    def publish(
        self,
        state: DecodeState,
        slot: Slot,
        token_ids: Sequence[int],
        rows: int,
        begin: int,
        group: CacheGroup,
    ) -> int:
        """Publishes the full pages of a sequence.

        Args:
          rows: Number of its positions that both the cache and the drafter's state hold.
          begin: Number of its pages that were published before.
        Returns:
          The number of its published pages, including those published by other sequences.
        """
        if not self._engine.prefix_cache:
            return begin
        layout = self._engine.layout
        replica, full = layout.replica_of(slot.index), rows // layout.page_size
        keys = list(self._keys(token_ids, group))[:full]
        fresh = [0] * len(keys)
        for i in range(begin, len(keys)):
            if self._pool.publish(replica, slot.pages[i], keys[i]):
                fresh[i] = slot.pages[i]
        if any(fresh) and self._keeps_rows:
            row = self._engine.page_row(Slot(slot.index, tuple(fresh)))
            where = np.int32(slot.index), row, np.int32(len(fresh))
            run = self._engine.program("store")
            self._context = run(self._context, state.drafter, *where)
        return max(begin, len(keys))

    def _keys(self, token_ids: Sequence[int], group: CacheGroup) -> Iterator[bytes]:
        ahead = self._engine.drafter.rows_ahead
        return page_keys(token_ids, self._engine.layout.page_size, ahead, group)
