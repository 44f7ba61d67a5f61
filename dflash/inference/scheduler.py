"""The scheduler: requests come in at any time, slots and pages are handed out between dispatches.

    submit(request)    puts a request into the queue
    cancel(id)         takes it out again, wherever it is
    step() -> events   collects the dispatch that is running, refills slots, starts the next one

`step` returns while the device is busy with the dispatch that it started, so what a caller does
with the events, such as turning tokens into text, costs no time. Offline decoding and a server are
both clients of these three calls.
"""

import collections
import dataclasses
import time

import jax
import numpy as np

from dflash.inference import broken, controls, first_token
from dflash.inference.engine import Engine
from dflash.inference.pages import PagePool, Slot
from dflash.inference.request import Completion, Event, Request, TokenLogprobs, Tokens
from dflash.inference.state import DecodeState, Report


@dataclasses.dataclass
class _Sequence:
    """A request and how far it has come; it holds a slot and pages only while it runs."""

    request: Request
    output_ids: list[int] = dataclasses.field(default_factory=list)
    acceptance_lengths: list[int] = dataclasses.field(default_factory=list)
    block_sizes: list[int] = dataclasses.field(default_factory=list)
    pages: tuple[int, ...] = ()
    submitted_at: float = 0.0
    queued_ms: float = 0.0
    first_token_at: float = 0.0
    prefill_ms: float = 0.0
    preemptions: int = 0

    @property
    def length(self) -> int:
        """Committed tokens, prompt included."""
        return len(self.request.prompt) + len(self.output_ids)


@dataclasses.dataclass(frozen=True)
class SchedulerStats:
    """What a scheduler holds now, and what it has done since it was made.

    Attributes:
      waiting: requests in the queue, those that were preempted included.
      prefilling: requests that hold a slot while their prompt is computed.
      running: requests that are being decoded.
      pages_used: pages of the target's cache that requests hold.
      pages_cached: pages that no request holds, but that the prefix cache keeps.
      pages_total: pages that can be handed out, over all shares.
      preemptions: how often a request had to give up its slot for want of pages.
      prefix_queries_tokens: prompt tokens that were looked up in the prefix cache.
      prefix_hits_tokens: those of them that it held.
      prefill_tokens: prompt tokens that were computed.
      prefill_chunks: chunks of prompts that were computed.
      dispatches: dispatches of cycles that were collected.
      cycles: cycles in them.
    """

    waiting: int
    prefilling: int
    running: int
    pages_used: int
    pages_cached: int
    pages_total: int
    preemptions: int
    prefix_queries_tokens: int
    prefix_hits_tokens: int
    prefill_tokens: int
    prefill_chunks: int
    dispatches: int
    cycles: int


_COUNTED = (
    "preemptions",
    "prefix_queries_tokens",
    "prefix_hits_tokens",
    "prefill_tokens",
    "prefill_chunks",
    "dispatches",
    "cycles",
)


class Scheduler:
    """Keeps the slots of an engine busy; owns the device state between dispatches."""

    def __init__(self, engine: Engine):
        """Allocates an empty batch."""
        layout = engine.layout
        self._engine, self._layout = engine, layout
        self._queue: collections.deque[_Sequence] = collections.deque()
        # By slot, in the order of admission: the last one is the youngest.
        self._running: dict[int, _Sequence] = {}
        self._ids: set[int] = set()  # of all requests in flight
        self._pool = PagePool(layout.num_shares, layout.pages_per_share)
        self._dispatched: tuple[Report, float] | None = None
        self._clock_s = 0.0
        self._counts: collections.Counter[str] = collections.Counter()  # of `SchedulerStats`
        # Empty caches exist before the clock of the first prompt starts.
        self._state: DecodeState = jax.block_until_ready(engine.new_state())

    @property
    def idle(self) -> bool:
        """Whether nothing is queued, running or left to collect."""
        return not (self._queue or self._running or self._dispatched)

    def submit(self, request: Request) -> None:
        """Puts a request at the end of the queue.

        Raises:
          InputError: it cannot be decoded; see `Engine.check`.
          ValueError: another request in flight has its id.
        """
        self._engine.check(request)
        if request.id in self._ids:
            raise ValueError(f"request {request.id} is in flight already")
        self._ids.add(request.id)
        self._queue.append(_Sequence(request, submitted_at=time.perf_counter()))

    def cancel(self, id: int) -> bool:
        """Drops a request, whose slot and pages are free at once; no further events come of it.

        Returns:
          whether there was such a request.
        """
        for sequence in self._queue:
            if sequence.request.id == id:
                self._queue.remove(sequence)
                self._ids.discard(id)
                return True
        for index, sequence in self._running.items():
            if sequence.request.id == id:
                self._vacate(index)
                self._ids.discard(id)
                return True
        return False

    def step(self) -> list[Event]:
        """Advances all sequences by one dispatch.

        Returns:
          what the dispatch before has brought, and the first tokens of the requests that entered:
          Tokens as they are committed, and a Completion after the last Tokens of each request.
        Raises:
          NumericsError: the target's logits are not finite.
        """
        events = self._collect()
        self._grow()
        events += self._admit()
        if self._running:
            begin = time.perf_counter()
            self._state, report = self._engine.generate(self._state)
            self._dispatched = report, begin
        return events

    def stats(self) -> SchedulerStats:
        """See `SchedulerStats`."""
        layout = self._layout
        total = layout.num_shares * (layout.pages_per_share - 1)
        free = sum(map(self._pool.num_free, range(layout.num_shares)))
        counted = {field: self._counts[field] for field in _COUNTED}
        return SchedulerStats(
            waiting=len(self._queue),
            prefilling=0,
            running=len(self._running),
            pages_used=total - free,
            pages_cached=0,
            pages_total=total,
            **counted,
        )

    def flush_prefix_cache(self) -> None:
        """Forgets all cached pages; requests in flight keep theirs."""

    def close(self) -> None:
        """Hands what was learned about block sizes back to the engine; the last call."""
        self._engine.retire(self._state)

    # --- collecting a dispatch ------------------------------------------------------------------

    def _collect(self) -> list[Event]:
        """Waits for the running dispatch, and hands its tokens to their requests."""
        if self._dispatched is None:
            return []
        report, begin = self._dispatched
        self._dispatched = None
        wanted = any(one.request.logprobs is not None for one in self._running.values())
        report = jax.device_get(report if wanted else report.without_logprobs())
        end = time.perf_counter()
        self._clock_s += end - begin
        events: list[Event] = []
        cycles = int(report.cycles)
        self._counts.update(dispatches=1, cycles=cycles)
        counts = report.num_committed[:cycles]
        self._check_finite(report, counts)
        for index, sequence in list(self._running.items()):
            fresh: list[int] = []
            lengths: list[int] = []
            logprobs: list[TokenLogprobs] = []
            for i in np.flatnonzero(counts[:, index]):
                count = int(counts[i, index])
                fresh += report.tokens[i, index, :count].tolist()
                lengths.append(count)
                if sequence.request.logprobs is not None:
                    logprobs += report.logprobs.of((i, index), count, sequence.request.logprobs)
                sequence.block_sizes.append(int(report.block_sizes[i]))
            sequence.output_ids += fresh
            sequence.acceptance_lengths += lengths
            told = Tokens(sequence.request.id, tuple(fresh), tuple(lengths), tuple(logprobs))
            events.append(told)
            if not report.active[index]:
                share = int(np.count_nonzero(counts[:, index])) / cycles
                events.append(self._finish(index, begin + share * (end - begin)))
        return events

    def _check_finite(self, report: Report, counts: np.ndarray) -> None:
        """Raises NumericsError for the first sequence whose logits were not finite."""
        for index, sequence in self._running.items():
            if report.broken_at[index]:
                said = list(sequence.output_ids)
                for i in np.flatnonzero(counts[:, index]):
                    said += report.tokens[i, index, : counts[i, index]].tolist()
                raise self._engine.explain(sequence.request, said)

    def _finish(self, index: int, now: float) -> Completion:
        sequence = self._running[index]
        self._vacate(index)
        self._ids.discard(sequence.request.id)
        stopped = sequence.output_ids[-1] in sequence.request.stop_ids
        return Completion(
            id=sequence.request.id,
            output_ids=tuple(sequence.output_ids),
            finish_reason="stop" if stopped else "length",
            acceptance_lengths=tuple(sequence.acceptance_lengths),
            block_sizes=tuple(sequence.block_sizes),
            prefill_ms=sequence.prefill_ms,
            decode_ms=1e3 * (now - sequence.first_token_at),
            decode_clock_s=self._clock_s,
            finished_at=now,
            preemptions=sequence.preemptions,
            queued_ms=sequence.queued_ms,
        )

    def _vacate(self, index: int) -> None:
        """Ends a sequence's stay in its slot."""
        sequence, share = self._running.pop(index), self._layout.share_of(index)
        self._state = self._engine.release(self._state, index)
        self._pool.give_back(share, sequence.pages)
        sequence.pages = ()

    # --- pages ----------------------------------------------------------------------------------

    def _grow(self) -> None:
        """Gives every sequence the pages that the next dispatch may fill, the oldest first.

        Where pages run out, the youngest sequence of the share is preempted: it goes back to the
        head of the queue, to be prefilled again with its prompt and output so far. The oldest one
        always proceeds, since a share holds at least one sequence of full length.
        """
        changed = False
        for index, sequence in list(self._running.items()):
            while index in self._running:
                missing = self._missing_pages(sequence)
                if missing <= 0:
                    break
                share = self._layout.share_of(index)
                fresh = self._pool.take(share, missing)
                if fresh is None:
                    self._preempt_youngest(share)
                    continue
                sequence.pages += fresh
                changed = True
        if changed:
            self._state = self._engine.set_pages(
                self._state, [Slot(index, one.pages) for index, one in self._running.items()]
            )

    def _missing_pages(self, sequence: _Sequence) -> int:
        needed = self._layout.pages_ahead(sequence.length, sequence.request.limit)
        return needed - len(sequence.pages)

    def _preempt_youngest(self, share: int) -> None:
        index = [i for i in self._running if self._layout.share_of(i) == share][-1]
        sequence = self._running[index]
        self._vacate(index)
        sequence.preemptions += 1
        self._counts["preemptions"] += 1
        self._queue.appendleft(sequence)

    # --- admission ------------------------------------------------------------------------------

    def _admit(self) -> list[Event]:
        """Prefills queued requests, in order, into free slots while there are pages for them."""
        events: list[Event] = []
        for index in range(self._layout.batch_size):
            share = self._layout.share_of(index)
            while index not in self._running and self._queue:
                pages = self._pool.take(share, self._missing_pages(self._queue[0]))
                if pages is None:
                    break
                sequence = self._queue.popleft()
                sequence.pages = pages
                events += self._start(sequence, index)
        return events

    def _start(self, sequence: _Sequence, index: int) -> list[Event]:
        """Prefills a sequence: its prompt, or all that it had committed when it was preempted."""
        request, said = sequence.request, tuple(sequence.output_ids)
        begin = time.perf_counter()
        if not said:
            sequence.queued_ms = 1e3 * (begin - sequence.submitted_at)
        asked = controls.of_request(request, said, self._layout.max_length)
        allowed = first_token.allowed_first(request, None, self._engine.vocab_size)
        prefix = self._engine.prefill(
            (*request.prompt, *said[:-1]), request.sampling, asked, allowed
        )
        anchor = said[-1] if said else int(jax.device_get(prefix.anchor)[0])
        if anchor == broken.NO_TOKEN:
            raise self._engine.explain(request, said)
        now = time.perf_counter()
        length = len(request.prompt) + max(len(said) - 1, 0)
        chunks = -(-length // self._layout.chunk(self._layout.bucket(length)))
        self._counts.update(prefill_tokens=length, prefill_chunks=chunks)
        sequence.prefill_ms += 1e3 * (now - begin)
        slot = Slot(index, sequence.pages)
        self._state = self._engine.insert(self._state, prefix, slot, request, anchor)
        self._running[index] = sequence
        if said:
            return []
        sequence.first_token_at = now
        sequence.output_ids.append(anchor)
        found = ()
        if request.logprobs is not None:
            found = tuple(jax.device_get(prefix.logprobs).of((), 1, request.logprobs))
        events: list[Event] = [Tokens(request.id, (anchor,), (), found)]
        if request.max_new_tokens == 1 or anchor in request.stop_ids:
            events.append(self._finish(index, now))
        return events
