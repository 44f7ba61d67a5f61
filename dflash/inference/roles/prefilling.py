"""Scheduler of an engine that only prefills: each prompt leaves as soon as it is complete."""

import collections
import dataclasses
import time
from collections.abc import Hashable

import jax

from dflash import errors
from dflash.inference.batch import Batch
from dflash.inference.engine import Engine
from dflash.inference.first_token import FirstTokenConstraints
from dflash.inference.in_flight import ActiveRequest
from dflash.inference.logits import controls
from dflash.inference.logits.logprobs import Logprobs
from dflash.inference.request import TokenLogprobs
from dflash.inference.roles.handover import Prefilled, PrefillOrder, PromptRows

_MOST_PENDING = 2  # Chunks that the device is given before the host waits for the first one.


@dataclasses.dataclass(eq=False)
class _Order:
    """An order in progress."""

    owner: Hashable
    id: int
    active: ActiveRequest


@dataclasses.dataclass(frozen=True)
class _Pending:
    """Chunk that the device was given; the last one of a prompt has its rows."""

    order: _Order
    enqueued_at: float
    anchors: jax.Array
    logprobs: Logprobs
    rows: PromptRows | None


class PrefillScheduler:
    """Queue of orders in front of the batch of an engine with one data replica.

    Orders have owners, so that several decoding engines may share this one.
    """

    def __init__(self, engine: Engine):
        """Allocates an empty batch."""
        self._engine, self._batch = engine, Batch(engine)
        self._queue: collections.deque[_Order] = collections.deque()
        self._pending: collections.deque[_Pending] = collections.deque()
        self._current: _Order | None = None  # The order in the prefill slot.
        self._failed: list[tuple[Hashable, Prefilled]] = []
        self._done_at = 0.0

    @property
    def idle(self) -> bool:
        """Returns whether no order is queued or in progress."""
        return not (self._queue or self._current or self._pending or self._failed)

    def submit(self, owner: Hashable, order: PrefillOrder) -> None:
        """Appends an order to the queue; one that cannot be prefilled results in an error."""
        request = order.request
        try:
            self._engine.check(request)
        except errors.InputError as error:
            self._failed.append((owner, Prefilled(order.id, error=str(error))))
            return
        constraints = None
        if order.allowed is not None:
            stated = controls.of_request(request, (), self._engine.layout.max_length)
            constraints = FirstTokenConstraints(stated, order.allowed)
        active = ActiveRequest(request, time.perf_counter(), constraints=constraints)
        active.output_ids = list(order.output_ids)
        self._queue.append(_Order(owner, order.id, active))

    def cancel(self, owner: Hashable, id: int | None = None) -> None:
        """Drops an order of an owner, or all of them if `id` is None."""

        def dropped(order: _Order) -> bool:
            return order.owner == owner and id in (None, order.id)

        self._queue = collections.deque(one for one in self._queue if not dropped(one))
        if self._current is not None and dropped(self._current):
            self._batch.vacate(self._current.active)
            self._current = None

    def flush_prefix_cache(self) -> None:
        """Forgets all cached pages."""
        self._batch.pool.forget()

    def step(self) -> list[tuple[Hashable, Prefilled]]:
        """Gives the device a chunk, and waits for an earlier one; returns results by owner."""
        results, self._failed = self._failed, []
        if self._current is None and self._queue and self._batch.admit(self._queue[0].active):
            self._current = self._queue.popleft()
        if self._current is not None:
            self._prefill(self._current)
        if self._pending and (self._current is None or len(self._pending) >= _MOST_PENDING):
            results += self._collect()
        return results

    def _prefill(self, order: _Order) -> None:
        """Runs the next chunk of the current order."""
        active, begin = order.active, time.perf_counter()
        if active.queued_ms is None:
            active.queued_ms = 1e3 * (begin - active.submitted_at)
        _, anchors, logprobs = self._batch.prefill()
        rows = None
        if active.prefilled == active.context:
            rows = self._batch.hand_over(active)
            self._current = None
        self._pending.append(_Pending(order, begin, anchors, logprobs, rows))

    def _collect(self) -> list[tuple[Hashable, Prefilled]]:
        """Waits for the oldest pending chunk."""
        work = self._pending.popleft()
        anchor = int(jax.device_get(work.anchors)[0])
        begin, self._done_at = max(work.enqueued_at, self._done_at), time.perf_counter()
        active = work.order.active
        active.prefill_ms += 1e3 * (self._done_at - begin)
        if work.rows is None:
            return []
        logprobs: list[TokenLogprobs] = []
        count = active.request.logprobs
        if count is not None and not active.output_ids:
            logprobs = jax.device_get(work.logprobs).of((slice(0, 1),), 1, count)
        result = Prefilled(
            work.order.id,
            anchor=anchor,
            logprobs=tuple(logprobs),
            cached_tokens=active.cached_tokens,
            queued_ms=active.queued_ms,
            prefill_ms=active.prefill_ms,
            rows=work.rows,
        )
        return [(work.order.owner, result)]
