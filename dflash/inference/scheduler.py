"""The scheduler: requests come in at any time, slots and pages are handed out between dispatches.

    submit(request)    puts a request into the queue
    cancel(id)         takes it out again, wherever it is
    step() -> events   waits for what the device finishes next, and keeps it busy

A dispatch is at most one chunk of prefill for each data replica that has a prompt waiting, followed
by `sync_every` cycles of the sequences that are complete. Nothing is read in between. So a prompt,
however long, holds the others up by one chunk at a time. While nothing is being decoded, chunks
follow one another at once.

`step` returns while the device is busy, so what a caller does with the events, such as turning
tokens into text, costs no time. What it decides depends on requests and tokens alone, never on
time, so that several processes which submit and cancel alike do the same.
"""

import collections
import time
from collections.abc import Sequence

import jax
import numpy as np

from dflash.inference import constrained, controls, examination, first_token, nonfinite
from dflash.inference.adaptive import spare_rows
from dflash.inference.engine import Engine
from dflash.inference.first_token import FirstTokenConstraints
from dflash.inference.in_flight import (
    ActiveRequest,
    GivenCycles,
    GivenPrefill,
    committed,
    committed_logprobs,
    refused,
)
from dflash.inference.pages import PagePool, Slot
from dflash.inference.pieces import PrefillChunk
from dflash.inference.prefix_cache import PrefixCache
from dflash.inference.request import Completion, Event, Request, TokenLogprobs, Tokens
from dflash.inference.state import DecodeState, Report
from dflash.inference.stats import SchedulerStats


class Scheduler:
    """Keeps the slots of an engine busy; owns the device state between dispatches."""

    def __init__(self, engine: Engine, *, fill_at_once: bool = False):
        """Allocates an empty batch.

        Args:
          engine: decodes.
          fill_at_once: prefill for all free slots before each dispatch. That keeps the most slots
            busy, but sequences stand still meanwhile: for decoding where nobody waits for the next
            token.
        """
        layout = engine.layout
        self._engine, self._layout, self._fill_at_once = engine, layout, fill_at_once
        self._queue: collections.deque[ActiveRequest] = collections.deque()
        # By lane and by slot, in the order of admission: the last one is the youngest.
        self._entering: dict[int, ActiveRequest] = {}
        self._running: dict[int, ActiveRequest] = {}
        self._ids: set[int] = set()  # of all requests in flight
        self._pool = PagePool(layout.num_replicas, layout.pages_per_replica)
        # What the device was given and has not been waited for, in order.
        self._given: collections.deque[GivenPrefill | GivenCycles] = collections.deque()
        self._done_at = 0.0  # when it was done with the one before
        self._clock_s = 0.0
        # Of `SchedulerStats`, times included.
        self._counts: collections.Counter[str] = collections.Counter()
        self._cache = PrefixCache(engine, self._pool)
        # Empty caches exist before the clock of the first prompt starts.
        self._state: DecodeState = jax.block_until_ready(engine.new_state())
        self._lanes = jax.block_until_ready(engine.new_lanes())

    @property
    def idle(self) -> bool:
        """Whether nothing is queued, running or left to collect."""
        return not (self._queue or self._entering or self._running or self._given)

    def submit(self, request: Request) -> None:
        """Puts a request at the end of the queue.

        Raises:
          InputError: it cannot be decoded; see `Engine.check`.
          ValueError: another request in flight has its id.
        """
        self._engine.check(request)
        if request.id in self._ids:
            raise ValueError(f"request {request.id} is in flight already")
        matcher = request.grammar and request.grammar.matcher()
        asked = None
        if not controls.is_plain(request):
            asked = FirstTokenConstraints(
                controls.of_request(request, (), self._layout.max_length),
                first_token.allowed_first(request, matcher, self._engine.vocab_size),
            )
        self._ids.add(request.id)
        self._queue.append(ActiveRequest(request, time.perf_counter(), matcher, asked))

    def cancel(self, id: int) -> bool:
        """Drops a request, whose slot and pages are free at once; no further events come of it.

        Returns:
          whether there was such a request.
        """
        if id not in self._ids:
            return False
        self._ids.discard(id)
        held = (*self._entering.values(), *self._running.values())
        for sequence in held:
            if sequence.request.id == id:
                self._vacate(sequence)
                return True
        self._queue.remove(next(one for one in self._queue if one.request.id == id))
        return True

    def step(self) -> list[Event]:
        """Waits for one chunk or dispatch, and gives the device the next one.

        Returns:
          what it has brought: Tokens as they are committed, the first token of a request by itself,
          and a Completion after the last Tokens of each request. Nothing, where a chunk was but a
          part of a prompt.
        Raises:
          NumericsError: the target's logits are not finite.
        """
        self._keep_busy()
        events = self._collect() if self._given else []
        self._keep_busy()
        return events

    def stats(self) -> SchedulerStats:
        """See `SchedulerStats`."""
        shares, usable = range(self._layout.num_replicas), self._layout.pages_per_replica - 1
        total = len(shares) * usable
        counted = {name: self._counts[name] for name in _COUNTED}
        return SchedulerStats(
            waiting=len(self._queue),
            prefilling=len(self._entering),
            running=len(self._running),
            pages_used=total - sum(map(self._pool.num_free, shares)),
            pages_cached=sum(map(self._pool.num_idle, shares)),
            pages_total=total,
            **counted,
        )

    def flush_prefix_cache(self) -> None:
        """Forgets all cached pages; requests in flight keep theirs."""
        self._pool.forget()

    def close(self) -> None:
        """Hands what was learned about block sizes back to the engine; the last call."""
        self._engine.retire(self._state)

    # --- giving the device work -----------------------------------------------------------------

    def _keep_busy(self) -> None:
        """Gives the device a dispatch, unless it has cycles to run, or two chunks."""
        while len(self._given) < 2 and not any(isinstance(one, GivenCycles) for one in self._given):
            before = len(self._given)
            self._dispatch()
            if len(self._given) == before:
                return

    def _dispatch(self) -> None:
        """A chunk of prefill, then cycles; further chunks while they fit into one of full length.

        Where nothing is being decoded a dispatch ends with the chunk, unless it completes a prompt.
        """
        self._grow()
        left = self._layout.prefill_chunk
        while self._admit():
            rows, decoding = self._next_rows(), bool(self._running)
            if decoding and rows > left and not self._fill_at_once:
                break
            left -= rows if decoding else 0
            self._prefill()
            if not (self._running or self._fill_at_once):
                break
        running = self._running.items()
        ready = {
            i: (one.request, one.matcher) for i, one in running if one.matcher and one.output_ids
        }
        others = any(one.matcher is None for _, one in running)
        if ready or others:
            begin = time.perf_counter()
            self._state, reports = constrained.generate(
                self._engine,
                self._state,
                ready,
                others=others,
                bucket=self._layout.bucket_for(self._running),
            )
            self._given.append(GivenCycles(begin, reports, queued=bool(self._queue)))

    def _next_rows(self) -> int:
        """Rows of the next chunk, padding included."""
        left = max(one.context - one.prefilled for one in self._entering.values())
        return self._layout.chunk(left)

    def _prefill(self) -> None:
        """Runs the next chunk of every lane; sequences that are complete enter their slots."""
        begin, pieces, done = time.perf_counter(), {}, {}
        for lane, one in self._entering.items():
            if one.queued_ms is None:
                one.queued_ms = 1e3 * (begin - one.submitted_at)
            start = one.prefilled
            end = min(start + self._layout.longest_chunk, one.context)
            sampling, fresh = one.request.sampling, not one.touched
            asked = None if one.output_ids else one.asked
            pieces[lane] = PrefillChunk.of(
                one.text, start, end, one.pages, sampling, fresh=fresh, asked=asked
            )
            one.prefilled, one.touched = end, True
            done[lane] = one, end == one.context
            self._counts.update(prefill_tokens=end - start, prefill_chunks=1)
        self._state, self._lanes, anchors, logprobs = self._engine.prefill(
            self._state, self._lanes, pieces
        )
        others_wait = bool(self._running)
        self._given.append(GivenPrefill(begin, done, anchors, logprobs, others_wait))
        for lane, (one, complete) in done.items():
            if complete:
                self._insert(lane, one, anchors)

    def _insert(self, lane: int, one: ActiveRequest, anchors: jax.Array) -> None:
        """Moves a prefilled sequence from its lane to its slot."""
        slot = Slot(one.slot, one.pages)
        self._state = self._engine.insert(
            self._state, self._lanes, anchors, lane, slot, one.request, one.output_ids
        )
        del self._entering[lane]
        self._running[one.slot] = one
        self._publish(one)

    # --- collecting what it has done ------------------------------------------------------------

    def _collect(self) -> list[Event]:
        """Waits for the oldest chunk or dispatch, and hands its tokens to their requests."""
        given = self._given.popleft()
        if isinstance(given, GivenPrefill):
            anchors = jax.device_get(given.anchors)
            begin, end = self._time(given.enqueued_at)
            finished = sum(complete for _, complete in given.sequences.values())
            self._counts.update(
                prefill_dispatches=1,
                prefill_prompts=finished,
                prefill_seconds=end - begin,
                stalled_seconds=end - begin if given.others_wait else 0.0,
            )
            events: list[Event] = []
            for lane, (one, complete) in given.sequences.items():
                one.prefill_ms += 1e3 * (end - begin)
                # It may have been cancelled since.
                if complete and one.slot is not None and not one.output_ids:
                    found: list[TokenLogprobs] = []
                    if one.request.logprobs is not None:
                        logprobs = jax.device_get(given.logprobs)
                        found = logprobs.of((slice(lane, lane + 1),), 1, one.request.logprobs)
                    events += self._begin(one, int(anchors[lane]), end, found)
            return events
        asked = [one.request for one in self._running.values()]
        logprobs = any(one.logprobs is not None for one in asked)
        drafts = any(one.refused for one in asked)
        reports = [one.with_only(logprobs=logprobs, refused=drafts) for one in given.reports]
        report = Report.joined(jax.device_get(reports))
        begin, end = self._time(given.enqueued_at)
        self._clock_s += end - begin
        cycles = int(report.cycles)
        busy = int(np.count_nonzero(report.num_committed[:cycles]))
        self._counts.update(
            dispatches=1, cycles=cycles, slot_cycles=busy, decode_seconds=end - begin
        )
        if given.queued:
            self._counts.update(queued_cycles=cycles, queued_slot_cycles=busy)
        return self._hand_out(report, begin, end)

    def _time(self, enqueued_at: float) -> tuple[float, float]:
        """When the device began with what it has just finished, and now.

        It takes one thing after the other.
        """
        begin, self._done_at = max(enqueued_at, self._done_at), time.perf_counter()
        return begin, self._done_at

    def _begin(
        self, one: ActiveRequest, anchor: int, now: float, logprobs: Sequence[TokenLogprobs]
    ) -> list[Event]:
        """The first token of a request; the device has decided alike whether it is the last."""
        request = one.request
        if anchor == nonfinite.NO_TOKEN:
            raise examination.explain(self._engine, request, ())
        one.first_token_at = now
        one.extend([anchor])
        events: list[Event] = [
            Tokens(request.id, (anchor,), logprobs=tuple(logprobs), cached_tokens=one.cached_tokens)
        ]
        if request.max_new_tokens == 1 or anchor in request.stop_ids:
            events.append(self._finish(one, now))
        return events

    def _hand_out(self, report: Report, begin: float, end: float) -> list[Event]:
        """The events of a dispatch of cycles, which took from `begin` to `end`."""
        events: list[Event] = []
        cycles = int(report.cycles)
        counts = report.num_committed[:cycles]
        self._check_finite(report, counts)
        for index, one in list(self._running.items()):
            ran = np.flatnonzero(counts[:, index])
            fresh = committed(report, index, ran)
            lengths = [int(counts[i, index]) for i in ran]
            one.extend(fresh)
            one.acceptance_lengths += lengths
            sizes = [int(report.block_sizes[i]) for i in ran]
            one.block_sizes += sizes
            if fresh:
                events.append(
                    Tokens(
                        one.request.id,
                        tuple(fresh),
                        tuple(lengths),
                        committed_logprobs(report, index, ran, one.request.logprobs),
                        tuple(sizes),
                        refused(report, index, ran) if one.request.refused else (),
                    )
                )
            if not report.active[index]:
                events.append(self._finish(one, begin + len(ran) / cycles * (end - begin)))
        return events

    def _check_finite(self, report: Report, counts: np.ndarray) -> None:
        """Raises NumericsError for the first sequence whose logits were not finite."""
        for index, one in self._running.items():
            if report.nonfinite_at[index]:
                fresh = committed(report, index, np.flatnonzero(counts[:, index]))
                raise examination.explain(self._engine, one.request, [*one.output_ids, *fresh])

    def _finish(self, one: ActiveRequest, now: float) -> Completion:
        self._vacate(one)
        self._ids.discard(one.request.id)
        return Completion(
            id=one.request.id,
            output_ids=tuple(one.output_ids),
            finish_reason=one.finish_reason,
            acceptance_lengths=tuple(one.acceptance_lengths),
            block_sizes=tuple(one.block_sizes),
            prefill_ms=one.prefill_ms,
            decode_ms=1e3 * (now - one.first_token_at),
            decode_clock_s=self._clock_s,
            finished_at=now,
            preemptions=one.preemptions,
            cached_tokens=one.cached_tokens,
            queued_ms=one.queued_ms,
        )

    # --- slots and pages ------------------------------------------------------------------------

    def _vacate(self, one: ActiveRequest) -> None:
        """Ends a sequence's stay in its slot, or in its lane on the way there."""
        share = self._layout.replica_of(one.slot)
        if self._running.get(one.slot) is one:
            self._publish(one)
            del self._running[one.slot]
            self._state = self._engine.release(self._state, one.slot)
        else:
            del self._entering[share]
        self._pool.give_back(share, one.pages)
        one.slot, one.pages = None, ()

    def _publish(self, one: ActiveRequest) -> None:
        """Publishes the full pages of a running sequence, as far as the drafter has rows too."""
        # The drafter may lack the last rows of plain cycles.
        rows = one.length - 1 - spare_rows(self._engine.block_sizes)
        rows = max(rows, one.prefilled)
        slot = Slot(one.slot, one.pages)
        one.published = self._cache.publish(self._state, slot, one.text, rows, one.published)

    def _grow(self) -> None:
        """Gives every sequence the pages that the next dispatch may fill, the oldest first.

        Where pages run out, the youngest sequence of the share is preempted: it goes back to the
        head of the queue, to be prefilled again with its prompt and output so far. The oldest one
        always proceeds, since a share holds at least one sequence of full length.
        """
        changed = False
        for index, one in list(self._running.items()):
            while one.slot is not None and (missing := self._missing_pages(one)) > 0:
                fresh = self._pool.take(self._layout.replica_of(index), missing)
                if fresh is None:
                    self._preempt_youngest(self._layout.replica_of(index))
                else:
                    one.pages += fresh
                    changed = True
        if changed:
            slots = [Slot(index, one.pages) for index, one in self._running.items()]
            self._state = self._engine.set_pages(self._state, slots)

    def _missing_pages(self, one: ActiveRequest) -> int:
        return self._layout.pages_ahead(one.length, one.request.limit) - len(one.pages)

    def _preempt_youngest(self, share: int) -> None:
        """A sequence in prefill was admitted after all that run."""
        mine = [one for one in self._running.values() if self._layout.replica_of(one.slot) == share]
        one = self._entering.get(share) or mine[-1]
        self._vacate(one)
        one.preemptions += 1
        self._counts["preemptions"] += 1
        self._queue.appendleft(one)

    def _admit(self) -> bool:
        """Gives free lanes to queued requests, in order, while there are slots and pages for them.

        Returns:
          whether a prompt is in a lane.
        """
        while self._queue and not self._overtakes(self._queue[0]):
            if not self._place(self._queue[0]):
                break
            self._queue.popleft()
        return bool(self._entering)

    def _overtakes(self, one: ActiveRequest) -> bool:
        """Whether a prompt must wait, to enter its slot in the order of the queue.

        That matters for forced acceptance lengths alone, which are those of sequences in this
        order. Otherwise every lane takes its next prompt as soon as it is free.
        """
        if not (self._fill_at_once and self._engine.rules.revise):
            return False
        left = max((held.context - held.prefilled for held in self._entering.values()), default=0)
        return self._num_chunks(one.context) < self._num_chunks(left)

    def _num_chunks(self, tokens: int) -> int:
        return -(-tokens // self._layout.longest_chunk)

    def _place(self, one: ActiveRequest) -> bool:
        """Gives a sequence a slot, with the lane of its share, and pages; False if there are none.

        Of several shares it takes the one that has most of its pages cached.
        """
        taken = {held.slot for held in (*self._entering.values(), *self._running.values())}
        free: dict[int, int] = {}  # by share, the first slot
        for slot in range(self._layout.batch_size):
            share = self._layout.replica_of(slot)
            if slot not in taken and share not in self._entering:
                free.setdefault(share, slot)
        text, context = one.text, one.context
        found = {share: self._cache.find(share, text, context) for share in free}
        for share in sorted(free, key=lambda share: -len(found[share])):
            if self._take_pages(one, share, found[share]):
                self._enter(one, free[share], share, found[share])
                return True
        return False

    def _take_pages(self, one: ActiveRequest, share: int, cached: Sequence[int]) -> bool:
        """Holds the cached pages, and takes the others that the sequence needs."""
        self._pool.hold(share, cached)
        fresh = self._pool.take(share, self._missing_pages(one) - len(cached))
        if fresh is None:
            self._pool.give_back(share, cached)
            return False
        one.pages = (*cached, *fresh)
        return True

    def _enter(self, one: ActiveRequest, slot: int, lane: int, cached: Sequence[int]) -> None:
        """Begins the prefill of a sequence behind its cached pages."""
        tokens = len(cached) * self._layout.page_size
        if cached:
            self._lanes = self._cache.restore(self._lanes, lane, cached, one.text)
        one.slot, one.prefilled, one.published = slot, tokens, len(cached)
        one.touched = bool(cached)
        if not one.output_ids:
            one.cached_tokens = tokens
        if self._engine.prefix_cache:
            self._counts.update(prefix_queries_tokens=one.context, prefix_hits_tokens=tokens)
        self._entering[lane] = one


_COUNTED = (
    "preemptions",
    "prefix_queries_tokens",
    "prefix_hits_tokens",
    "prefill_tokens",
    "prefill_chunks",
    "prefill_dispatches",
    "prefill_prompts",
    "prefill_seconds",
    "stalled_seconds",
    "decode_seconds",
    "dispatches",
    "cycles",
    "slot_cycles",
    "queued_cycles",
    "queued_slot_cycles",
)
