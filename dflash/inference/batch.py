"""The batch of an engine: its device state, and the requests that hold its slots and pages."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from dflash.inference import first_token
from dflash.inference.cycle import dispatch
from dflash.inference.cycle.backlog import spare_rows
from dflash.inference.cycle.state import DecodeState, Report
from dflash.inference.engine import Engine
from dflash.inference.in_flight import ActiveRequest
from dflash.inference.logits import controls
from dflash.inference.logits.logprobs import Logprobs
from dflash.inference.pages import PagePool, Slot
from dflash.inference.prefill import PrefillChunk
from dflash.inference.prefix_cache import PrefixCache


class Batch:
    """Requests in the slots of an engine, with the pages that they hold.

    A request that is admitted holds a slot and pages at once. Its prompt runs in the prefill slot
    of the slot's replica, and it becomes one of `running` when the prompt is complete.

    Attributes:
      prefilling: Requests in prefill by prefill slot, in the order of admission.
      running: Requests that decode by slot, in the order of admission.
      pool: Pages of the target's cache.
    """

    def __init__(self, engine: Engine):
        """Allocates empty caches, so that they exist before the first prompt's clock starts."""
        layout = engine.layout
        self._engine, self._layout = engine, layout
        self.prefilling: dict[int, ActiveRequest] = {}
        self.running: dict[int, ActiveRequest] = {}
        self.pool = PagePool(layout.num_replicas, layout.pages_per_replica)
        self._cache = PrefixCache(engine, self.pool)
        self.state: DecodeState = jax.block_until_ready(engine.new_state())
        self._prefill_state = jax.block_until_ready(engine.new_prefill_state())

    @property
    def requests(self) -> tuple[ActiveRequest, ...]:
        """Requests that hold a slot."""
        return (*self.prefilling.values(), *self.running.values())

    # --- device calls -----------------------------------------------------------------------------

    def next_rows(self) -> int:
        """Returns the number of rows of the next prefill chunk, padding included."""
        remainders = (request.context - request.prefilled for request in self.prefilling.values())
        return self._layout.chunk(max(remainders))

    def prefill(self) -> tuple[dict[int, tuple[ActiveRequest, bool]], jax.Array, Logprobs]:
        """Runs the next chunk of every prompt in prefill; complete ones enter their slots.

        Returns:
          The requests by prefill slot, each with whether its prompt is complete; the token after
          each chunk, int32 [n]; its log-probabilities [n]. See `Engine.prefill`.
        """
        chunks, requests = {}, dict(self.prefilling)
        for prefill_slot, request in requests.items():
            start = request.prefilled
            end = min(start + self._layout.longest_chunk, request.context)
            chunks[prefill_slot] = PrefillChunk.of(
                request.token_ids,
                start,
                end,
                Slot(request.slot, request.pages),
                request.request.sampling,
                fresh=not request.touched,
                constraints=None if request.output_ids else request.constraints,
                adapter=request.request.adapter,
            )
            request.prefilled, request.touched = end, True
        self.state, self._prefill_state, anchors, logprobs = self._engine.prefill(
            self.state, self._prefill_state, chunks
        )
        outcomes = {}
        for prefill_slot, request in requests.items():
            complete = request.prefilled == request.context
            outcomes[prefill_slot] = request, complete
            if complete:
                del self.prefilling[prefill_slot]
                self._insert(request, self._prefill_state, anchors, prefill_slot)
        return outcomes, anchors, logprobs

    def _insert(
        self, request: ActiveRequest, prefill_state: Any, anchors: Any, prefill_slot: int
    ) -> None:
        self.state = self._engine.insert(
            self.state,
            prefill_state,
            anchors,
            prefill_slot,
            Slot(request.slot, request.pages),
            request.request,
            request.output_ids,
        )
        self.running[request.slot] = request
        self._publish(request)

    def decode(self, *, queued: bool) -> list[Report]:
        """Runs one dispatch of cycles; empty if no request can run.

        A request with a grammar runs once its first token is known, since masks depend on it.

        Args:
          queued: Whether requests wait for a slot. Then the dispatch ends before the slots of ended
            sequences are idle for longer than another dispatch costs.
        """
        reports, running = [], self.running.items()
        ready = {
            slot: request for slot, request in running if request.matcher and request.output_ids
        }
        if ready:
            self.state, report = _masked_cycle(self._engine, self.state, ready)
            reports.append(report)
        if any(request.matcher is None for _, request in running):
            self.state, report = self._engine.generate(
                self.state,
                bucket=self._layout.bucket_for(self.running),
                greedy=all(controls.is_greedy(request.request) for _, request in running),
                max_idle=self._layout.batch_size // 2 if queued else dispatch.ANY,
            )
            # An engine that drafts ahead returns the report of each cycle.
            reports += report if isinstance(report, list) else [report]
        return reports

    def close(self) -> None:
        """Hands the acceptance statistics to the engine."""
        self._engine.retire(self.state)

    # --- slots and pages ------------------------------------------------------------------------

    def admit(self, request: ActiveRequest) -> bool:
        """Gives a request a slot and pages, and starts its prefill; False if none are free.

        Among several replicas it prefers the one that has most of the prompt's pages cached.
        """
        occupied = {active.slot for active in self.requests}
        free: dict[int, int] = {}  # First free slot by replica.
        for slot in range(self._layout.batch_size):
            replica = self._layout.replica_of(slot)
            if slot not in occupied and replica not in self.prefilling:
                free.setdefault(replica, slot)
        prefix = request.token_ids, request.context, request.request.cache_group
        cached = {replica: self._cache.find(replica, *prefix) for replica in free}
        for replica in sorted(free, key=lambda replica: -len(cached[replica])):
            if self._take_pages(request, replica, cached[replica]):
                self._start_prefill(request, free[replica], replica, cached[replica])
                return True
        return False

    def _take_pages(self, request: ActiveRequest, replica: int, cached: Sequence[int]) -> bool:
        """Holds the cached pages, and takes the others that the request needs."""
        self.pool.hold(replica, cached)
        fresh = self.pool.take(replica, self._missing_pages(request) - len(cached))
        if fresh is None:
            self.pool.give_back(replica, cached)
            return False
        request.pages = (*cached, *fresh)
        return True

    def _start_prefill(
        self, request: ActiveRequest, slot: int, prefill_slot: int, cached: Sequence[int]
    ) -> None:
        """Puts a request into a prefill slot, behind its cached pages."""
        tokens = len(cached) * self._layout.page_size
        if cached:
            self._prefill_state = self._cache.restore(
                self._prefill_state, prefill_slot, cached, request.token_ids
            )
        request.slot, request.prefilled, request.published = slot, tokens, len(cached)
        request.touched = bool(cached)
        if not request.output_ids:
            request.cached_tokens = tokens
        self.prefilling[prefill_slot] = request

    def vacate(self, request: ActiveRequest) -> None:
        """Takes a request's slot and pages from it, in prefill or later."""
        replica = self._layout.replica_of(request.slot)
        if self.running.get(request.slot) is request:
            self._publish(request)
            del self.running[request.slot]
            self.state = self._engine.release(self.state, request.slot)
        else:
            del self.prefilling[replica]
        self.pool.give_back(replica, request.pages)
        request.slot, request.pages = None, ()

    def grow(self) -> list[ActiveRequest]:
        """Gives every running request the pages that the next dispatch may fill, oldest first.

        When a replica runs out of pages, its youngest request is preempted: it loses its slot, and
        must be prefilled again with its prompt and its output so far. The oldest request always
        proceeds, since a replica holds at least one sequence of full length.

        Returns:
          The preempted requests, youngest first.
        """
        preempted, changed = [], False
        for slot, request in list(self.running.items()):
            replica = self._layout.replica_of(slot)
            while request.slot is not None and (missing := self._missing_pages(request)) > 0:
                fresh = self.pool.take(replica, missing)
                if fresh is None:
                    preempted.append(self._youngest(replica))
                    self.vacate(preempted[-1])
                else:
                    request.pages += fresh
                    changed = True
        if changed:
            slots = [Slot(slot, request.pages) for slot, request in self.running.items()]
            self.state = self._engine.set_pages(self.state, slots)
        return preempted

    def _youngest(self, replica: int) -> ActiveRequest:
        """Returns the youngest request; one in prefill is younger than all running ones."""
        running = [
            request
            for slot, request in self.running.items()
            if self._layout.replica_of(slot) == replica
        ]
        return self.prefilling.get(replica) or running[-1]

    def _missing_pages(self, request: ActiveRequest) -> int:
        ahead = self._layout.pages_ahead(request.length, request.request.limit)
        return ahead - len(request.pages)

    def _publish(self, request: ActiveRequest) -> None:
        """Publishes the full pages of a running request whose rows the drafter has too."""
        # The drafter may lack the last rows, which come from cycles without a draft.
        rows = request.length - 1 - spare_rows(self._engine.block_sizes)
        rows = max(rows, request.prefilled)
        slot = Slot(request.slot, request.pages)
        request.published = self._cache.publish(
            self.state,
            slot,
            request.token_ids,
            rows,
            request.published,
            request.request.cache_group,
        )

    def pages(self) -> dict[str, int]:
        """Returns the counts of pages for `SchedulerStats`."""
        replicas = range(self._layout.num_replicas)
        total = len(replicas) * (self._layout.pages_per_replica - 1)
        return {
            "pages_used": total - sum(map(self.pool.num_free, replicas)),
            "pages_cached": sum(map(self.pool.num_idle, replicas)),
            "pages_total": total,
        }


def _masked_cycle(
    engine: Engine, state: DecodeState, ready: Mapping[int, ActiveRequest]
) -> tuple[DecodeState, Report]:
    """Runs one cycle of the constrained sequences; consumes `state`.

    Args:
      ready: Constrained sequences by slot, with matchers that have consumed all of their output.
        Other sequences wait, and so does one whose matcher raises an exception, which becomes the
        sequence's error.
    """
    state, proposal = engine.draft(state)
    tokens, parents = jax.device_get((proposal.tokens, proposal.parents))
    slots, rows = len(tokens), tokens.shape[1] + 1
    allowed = np.tile(first_token.allow_all(engine.vocab_size), (slots, rows, 1))
    for slot, active in ready.items():
        with active.failing():
            active.matcher.fill(
                allowed[slot],
                tokens[slot].tolist(),
                None if parents is None else parents[slot].tolist(),
                ends=active.request.stop_ids,
                first_end=active.request.min_new_tokens,
            )
    masked = [slot for slot, active in ready.items() if active.error is None]
    return engine.conclude(state, proposal, allowed, np.isin(np.arange(slots), masked))
