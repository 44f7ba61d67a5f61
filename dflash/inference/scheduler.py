"""The scheduler: requests arrive at any time; slots and pages are assigned between dispatches.

    submit(request)    appends a request to the queue
    cancel(id)         removes a request, wherever it is
    step() -> events   waits for the device's next result, and keeps the device busy

A dispatch is at most one prefill chunk per data replica that has a prompt waiting, followed by
`sync_every` cycles of the running requests. The host reads nothing in between, so a long prompt
delays running requests by one chunk at a time. While no request runs, chunks follow one another
immediately.

`step` returns while the device is busy, so the caller's work on the events, such as detokenization,
costs no time. Decisions depend only on requests and tokens, never on time, so several processes
that submit and cancel the same requests make the same decisions.
"""

import collections
import time
from collections.abc import Sequence

import jax
import numpy as np

from dflash import errors
from dflash.inference import first_token
from dflash.inference.batch import Batch
from dflash.inference.cycle.state import Report
from dflash.inference.engine import Engine
from dflash.inference.first_token import FirstTokenConstraints
from dflash.inference.in_flight import (
    ActiveRequest,
    PendingCycles,
    PendingPrefill,
    committed,
    committed_logprobs,
    count_cycles,
    grammar_error,
    rejected,
)
from dflash.inference.logits import controls, nonfinite
from dflash.inference.prefill import padded
from dflash.inference.request import Event, Request, RequestOutput, TokenLogprobs, Tokens
from dflash.inference.stats import COUNTERS, SchedulerStats


class Scheduler:
    """Queue of requests in front of the batch of an engine.

    Attributes:
      paused: Whether queued requests wait; admitted ones go on, until the scheduler is `settled`.
    """

    def __init__(self, engine: Engine, *, fill_at_once: bool = False):
        """Allocates an empty batch.

        Args:
          fill_at_once: Prefill for all free slots before each dispatch. This keeps the most slots
            busy, but running requests wait meanwhile; use it when nobody waits for single tokens.
        """
        self._engine, self._layout, self._fill_at_once = engine, engine.layout, fill_at_once
        self._queue: collections.deque[ActiveRequest] = collections.deque()
        self._ids: set[int] = set()  # Ids of all requests in flight.
        # Work that the device was given and whose results have not been read, in order.
        self._pending: collections.deque[PendingPrefill | PendingCycles] = collections.deque()
        self._done_at = 0.0  # Time at which the device finished the last collected work.
        self._clock_s = 0.0
        self._counts: collections.Counter[str] = collections.Counter()
        self._batch = Batch(engine)
        self._has_nonfinite = False  # Some request's logits were not finite; see `_recover`.
        self.paused = False

    @property
    def idle(self) -> bool:
        """Returns whether no request is queued or running, and no result is left to collect."""
        return not (self._queue or self._batch.requests or self._pending)

    def submit(self, request: Request) -> None:
        """Appends a request to the queue.

        Raises:
          InputError: The request cannot be decoded (see `Engine.check`), or its grammar fails.
          ValueError: Another request in flight has the same id.
        """
        self._engine.check(request)
        if request.id in self._ids:
            raise ValueError(f"request {request.id} is in flight already")
        matcher = constraints = None
        if not controls.is_default(request):
            try:
                timed = jax.process_count() == 1
                matcher = request.matcher(timed=timed)
                allowed = first_token.allowed_first(request, matcher, self._engine.vocab_size)
            except Exception as error:
                raise grammar_error(request, error) from error
            request_controls = controls.of_request(request, (), self._layout.max_length)
            constraints = FirstTokenConstraints(request_controls, allowed)
        self._ids.add(request.id)
        scored = self._engine.score(request)
        self._queue.append(
            ActiveRequest(request, time.perf_counter(), matcher, constraints, prompt_tokens=scored)
        )

    def cancel(self, id: int) -> bool:
        """Drops a request, its slot, pages and events; returns False if no request has this id."""
        if id not in self._ids:
            return False
        self._ids.discard(id)
        for request in self._batch.requests:
            if request.request.id == id:
                self._batch.vacate(request)
                return True
        self._queue.remove(next(queued for queued in self._queue if queued.request.id == id))
        return True

    def step(self) -> list[Event]:
        """Waits for one chunk or dispatch, and gives the device more work.

        Returns:
          The events of the finished work: Tokens as they are committed, the first token of a
            request by itself, and a RequestOutput after the last Tokens of each request. Empty
            after a chunk that completes no prompt.
        """
        self._keep_busy()
        events = self._collect() if self._pending else []
        if self._has_nonfinite:
            events += self._recover()
        self._keep_busy()
        return events

    def stats(self) -> SchedulerStats:
        """Returns the current load and the counters."""
        return SchedulerStats(
            waiting=len(self._queue),
            prefilling=len(self._batch.prefilling),
            running=len(self._batch.running),
            **self._batch.pages(),
            **{name: self._counts[name] for name in COUNTERS},
            events={name: self._counts[name] for name in self._counts.keys() - set(COUNTERS)},
        )

    @property
    def settled(self) -> bool:
        """Returns whether no request holds a slot, and no result is left to collect."""
        return not (self._batch.requests or self._pending)

    def restart(self) -> None:
        """Empties all caches, after an update of the weights; requests keep reported output."""
        self._requeue(self._renew())

    def flush_prefix_cache(self) -> None:
        """Forgets all cached pages; requests in flight keep the pages that they hold."""
        self._batch.pool.forget()

    def close(self) -> None:
        """Hands the acceptance statistics to the engine; must be the last call."""
        self._batch.close()

    # --- giving the device work -----------------------------------------------------------------

    def _keep_busy(self) -> None:
        """Dispatches until cycles or two chunks are pending, or there is nothing to do."""
        while len(self._pending) < 2 and not any(
            isinstance(work, PendingCycles) for work in self._pending
        ):
            before = len(self._pending)
            self._dispatch()
            if len(self._pending) == before:
                return

    def _dispatch(self) -> None:
        """Runs a prefill chunk, further chunks while their rows fit into a full one, then cycles.

        While no request runs, a dispatch ends with its chunk, unless the chunk completes a prompt.
        """
        batch = self._batch
        for request in batch.grow():
            self._requeue([request])
        budget = self._layout.prefill_chunk
        while self._admit():
            rows, decoding = batch.next_rows(), bool(batch.running)
            if decoding and rows > budget and not self._fill_at_once:
                break
            budget -= rows if decoding else 0
            self._prefill()
            if not (batch.running or self._fill_at_once):
                break
        begin, queued = time.perf_counter(), bool(self._queue)
        if reports := batch.decode(queued=queued and not self.paused):
            self._pending.append(PendingCycles(begin, reports, queued=queued))

    def _admit(self) -> bool:
        """Admits queued requests while there is room; returns whether a prompt is in prefill."""
        while self._queue and not (self.paused or self._must_wait(self._queue[0])):
            request = self._queue[0]
            if not self._batch.admit(request):
                break
            self._queue.popleft()
            if self._engine.prefix_cache:
                self._counts.update(
                    prefix_queries_tokens=request.context, prefix_hits_tokens=request.prefilled
                )
        return bool(self._batch.prefilling)

    def _must_wait(self, request: ActiveRequest) -> bool:
        """Returns whether a request would overtake an earlier one that is still in prefill.

        This matters only for forced acceptance lengths, which are assigned to sequences in the
        order of the queue. Otherwise every prefill slot takes its next prompt as soon as it is
        free.
        """
        if not (self._fill_at_once and self._engine.rules.revise):
            return False
        prefilling = self._batch.prefilling.values()
        longest = max((active.context - active.prefilled for active in prefilling), default=0)
        return self._num_chunks(request.context) < self._num_chunks(longest)

    def _num_chunks(self, tokens: int) -> int:
        return -(-tokens // self._layout.longest_chunk)

    def _prefill(self) -> None:
        """Runs the next chunk of every prompt in prefill."""
        batch, begin, others_wait = self._batch, time.perf_counter(), bool(self._batch.running)
        for request in batch.prefilling.values():
            if request.queued_ms is None:
                request.queued_ms = 1e3 * (begin - request.submitted_at)
        before = sum(request.prefilled for request in batch.prefilling.values())
        requests, anchors, logprobs = batch.prefill()
        tokens = sum(request.prefilled for request, _ in requests.values()) - before
        self._counts.update(prefill_tokens=tokens, prefill_chunks=len(requests))
        self._pending.append(PendingPrefill(begin, requests, anchors, logprobs, others_wait))

    # --- collecting results ---------------------------------------------------------------------

    def _collect(self) -> list[Event]:
        """Waits for the oldest pending work, and returns its events."""
        work = self._pending.popleft()
        if isinstance(work, PendingPrefill):
            return self._collect_prefill(work)
        return self._collect_cycles(work)

    def _collect_prefill(self, work: PendingPrefill) -> list[Event]:
        anchors = jax.device_get(work.anchors)
        begin, end = self._time(work.enqueued_at)
        self._counts.update(
            prefill_dispatches=1,
            prefill_prompts=sum(complete for _, complete in work.requests.values()),
            prefill_seconds=end - begin,
            stalled_seconds=end - begin if work.others_wait else 0.0,
        )
        events: list[Event] = []
        for prefill_slot, (request, complete) in work.requests.items():
            request.prefill_ms += 1e3 * (end - begin)
            # The request may have been cancelled since.
            if not complete or request.slot is None or request.output_ids:
                continue
            logprobs: list[TokenLogprobs] = []
            if request.request.logprobs is not None:
                here = (slice(prefill_slot, prefill_slot + 1),)
                logprobs = jax.device_get(work.logprobs).of(here, 1, request.request.logprobs)
            events += self._begin(request, int(anchors[prefill_slot]), end, logprobs)
        return events

    def _begin(
        self, active: ActiveRequest, anchor: int, now: float, logprobs: Sequence[TokenLogprobs]
    ) -> list[Event]:
        """Returns the events of a request's first token.

        The device has decided by the same rule whether this token is also the last one.
        """
        request = active.request
        if anchor == nonfinite.NO_TOKEN:
            self._examine(active)
            return []
        active.first_token_at = now
        active.extend([anchor])
        cached = active.cached_tokens
        events: list[Event] = [
            Tokens(
                request.id,
                (anchor,),
                logprobs=tuple(logprobs),
                cached_tokens=cached,
                prompt_tokens=active.prompt_tokens,
            )
        ]
        if request.max_new_tokens == 1 or anchor in request.stop_ids or active.error:
            events.append(self._finish(active, now))
        return events

    def _collect_cycles(self, work: PendingCycles) -> list[Event]:
        requests = [active.request for active in self._batch.running.values()]
        logprobs = any(request.logprobs is not None for request in requests)
        drafts = any(request.rejected for request in requests)
        # Transfer only what some request has asked for.
        reports = [each.with_only(logprobs=logprobs, rejected=drafts) for each in work.reports]
        report = Report.joined(jax.device_get(reports))
        begin, end = self._time(work.enqueued_at)
        self._clock_s += end - begin
        counts = count_cycles(report)
        self._counts.update(dispatches=1, decode_seconds=end - begin, **counts)
        if work.queued:
            self._counts.update(
                queued_cycles=counts["cycles"], queued_slot_cycles=counts["slot_cycles"]
            )
        events: list[Event] = []
        for slot, active in list(self._batch.running.items()):
            events += self._advance(active, slot, report, begin, end)
        return events

    def _time(self, enqueued_at: float) -> tuple[float, float]:
        """Returns when the device began the work that it has just finished, and the time now.

        The device runs one piece of work after the other.
        """
        begin, self._done_at = max(enqueued_at, self._done_at), time.perf_counter()
        return begin, self._done_at

    def _advance(
        self, active: ActiveRequest, slot: int, report: Report, begin: float, end: float
    ) -> list[Event]:
        """Returns a request's events of a dispatch that ran from `begin` to `end`."""
        cycles = int(report.cycles)
        counts = report.num_committed[:cycles, slot]
        steps = np.flatnonzero(counts)
        tokens = committed(report, slot, steps)
        lengths = [int(counts[i]) for i in steps]
        sizes = [int(report.block_sizes[i, slot]) for i in steps]
        active.extend(tokens)
        active.acceptance_lengths += lengths
        active.block_sizes += sizes
        request, events = active.request, []
        if tokens:
            events.append(
                Tokens(
                    request.id,
                    tuple(tokens),
                    tuple(lengths),
                    tuple(int(report.num_accepted[i, slot]) for i in steps),
                    committed_logprobs(report, slot, steps, request.logprobs),
                    tuple(sizes),
                    rejected(report, slot, steps) if request.rejected else (),
                )
            )
        if report.nonfinite_at[slot]:
            self._examine(active)
        elif active.error or not report.active[slot]:
            events.append(self._finish(active, begin + len(steps) / max(cycles, 1) * (end - begin)))
        return events

    def _finish(self, active: ActiveRequest, now: float) -> RequestOutput:
        self._batch.vacate(active)
        return self._completion(active, now)

    def _completion(self, active: ActiveRequest, now: float) -> RequestOutput:
        self._ids.discard(active.request.id)
        return active.completion(now, self._clock_s)

    # --- logits that are not finite -------------------------------------------------------------

    def _examine(self, active: ActiveRequest) -> None:
        """Finds out whether a request itself causes its non-finite logits, and then fails it.

        If they are finite when computed once more, the caches may hold rows of another sequence's
        making, so the request is computed again; it fails if its logits are not finite then either.
        """
        self._has_nonfinite = True
        error, recurs = self._explain(active.request, active.output_ids)
        if recurs or active.recomputed:
            active.error = error
        active.recomputed = True

    def _explain(
        self, request: Request, output_ids: Sequence[int]
    ) -> tuple[errors.NumericsError, bool]:
        """Runs a sequence once more, alone and with every layer tapped.

        Returns:
          The error of the sequence, which names the first layer to blame, and whether its logits
          are not finite this time either.
        """
        engine, rows = self._engine, self._layout.longest_chunk
        tokens, finite = (*request.prompt, *output_ids), True
        try:
            cache = engine.program("new_examined")()
            run = engine.program("examine", rows)
            for start in range(0, len(tokens), rows):
                part = tokens[start : start + rows]
                where = np.int32(start), np.int32(len(part)), np.int32(request.adapter)
                cache, now = run(engine.target_params, cache, padded(part, rows)[None], *where)
                finite = finite & jax.device_get(now)
        except jax.errors.JaxRuntimeError:
            finite = None
        error = nonfinite.error(engine.target, request, output_ids, finite)
        return error, finite is None or not all(finite)

    def _recover(self) -> list[Event]:
        """Ends the requests that failed, and recomputes all others from empty caches.

        Attention multiplies masked rows by 0, so a non-finite row in a page would reach the next
        owner of the page.
        """
        self._has_nonfinite = False
        requests = self._renew()
        self._requeue([request for request in requests if not request.error])
        now = time.perf_counter()
        return [self._completion(request, now) for request in requests if request.error]

    def _renew(self) -> list[ActiveRequest]:
        """Replaces the batch by an empty one; returns the requests that held a slot, in order."""
        requests = [*self._batch.running.values(), *self._batch.prefilling.values()]
        self._pending.clear()
        self._batch.close()
        del self._batch  # Frees the caches before new ones are allocated.
        self._batch = Batch(self._engine)
        for request in requests:
            request.slot, request.pages = None, ()
        return requests

    def _requeue(self, requests: Sequence[ActiveRequest]) -> None:
        """Returns preempted requests, in order, to the head of the queue."""
        for request in requests:
            request.preemptions += 1
        self._counts["preemptions"] += len(requests)
        self._queue.extendleft(reversed(requests))
