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
    first_token_at: float = 0.0
    prefill_ms: float = 0.0
    preemptions: int = 0

    @property
    def length(self) -> int:
        """Committed tokens, prompt included."""
        return len(self.request.prompt) + len(self.output_ids)


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
        self._queue.append(_Sequence(request))

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
        asked = controls.of_request(request, said, self._layout.max_length)
        allowed = first_token.allowed_first(request, None, self._engine.vocab_size)
        prefix = self._engine.prefill(
            (*request.prompt, *said[:-1]), request.sampling, asked, allowed
        )
        anchor = said[-1] if said else int(jax.device_get(prefix.anchor)[0])
        if anchor == broken.NO_TOKEN:
            raise self._engine.explain(request, said)
        now = time.perf_counter()
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
