"""Scheduler of an engine that never prefills: another engine computes all prompts."""

import dataclasses
import itertools
import time
from collections.abc import Sequence

from dflash import errors
from dflash.inference.engine import Engine
from dflash.inference.in_flight import ActiveRequest
from dflash.inference.request import Event, Request
from dflash.inference.roles.handover import Prefilled, Prefiller, PrefillOrder
from dflash.inference.scheduler import Scheduler

_WAIT_S = 0.02  # Time to wait for a prompt while there is nothing to decode.


class DecodeScheduler(Scheduler):
    """Scheduler whose prompts are prefilled by another engine.

    Every request in the queue has an order there. It gets a slot and pages once its rows have
    arrived. A preempted request returns to the queue, and its prompt and output so far are ordered
    again.
    """

    def __init__(self, engine: Engine, prefiller: Prefiller):
        """Allocates an empty batch.

        Args:
          engine: Engine that decodes.
          prefiller: Engine that prefills.
        """
        super().__init__(engine)
        self._prefiller = prefiller
        self._numbers = itertools.count()
        self._orders: dict[int, int] = {}  # Number of the current order by the request's id.
        self._arrived: dict[int, Prefilled] = {}  # By the number of the order.
        self._first_events: list[Event] = []  # Events of the requests that a step has admitted.

    def submit(self, request: Request) -> None:
        """Appends a request to the queue, and orders its prompt; see `Scheduler.submit`."""
        super().submit(request)
        self._order(self._queue[-1])

    def cancel(self, id: int) -> bool:
        """Drops a request; see `Scheduler.cancel`."""
        self._forget(id)
        return super().cancel(id)

    def step(self) -> list[Event]:
        """Admits the prompts that have arrived, then steps; see `Scheduler.step`."""
        busy = self._pending or self._batch.running
        for result in self._prefiller.results(0.0 if busy or not self._queue else _WAIT_S):
            self._arrived[result.id] = result
        events = super().step()
        first, self._first_events = self._first_events, []
        return first + events

    def _order(self, active: ActiveRequest) -> None:
        number, request = next(self._numbers), active.request
        self._orders[request.id] = number
        constraints = None if active.output_ids else active.constraints
        self._prefiller.order(
            PrefillOrder(
                number,
                dataclasses.replace(request, grammar=None),
                tuple(active.output_ids),
                constraints and constraints.allowed,
            )
        )

    def _forget(self, id: int) -> Prefilled | None:
        """Drops a request's order; returns its result if that has arrived."""
        number = self._orders.pop(id, None)
        result = self._arrived.pop(number, None)
        if number is not None and result is None:
            self._prefiller.cancel(number)
        return result

    def _admit(self) -> bool:
        """Admits requests whose rows are there, in order, while slots and pages are free.

        Returns:
          False, since no prompt is ever in prefill here.
        """
        current = set(self._orders.values())
        self._arrived = {number: one for number, one in self._arrived.items() if number in current}
        for active in list(self._queue):
            result = self._arrived.get(self._orders[active.request.id])
            if result is None:
                continue
            if result.error is None and not self._take(active, result):
                break
            self._forget(active.request.id)
            self._queue.remove(active)
            self._first_events += self._events_of(active, result)
        return False

    def _take(self, active: ActiveRequest, result: Prefilled) -> bool:
        """Gives a request a slot, with its rows; False if none is free."""
        if self.paused:
            return False
        anchor = active.output_ids[-1] if active.output_ids else result.anchor
        return self._batch.take_over(active, result.rows, anchor)

    def _events_of(self, active: ActiveRequest, result: Prefilled) -> list[Event]:
        """Returns the events of a request that has been admitted, or whose prefill has failed."""
        now = time.perf_counter()
        if result.error is not None:
            kind = errors.UnavailableError if result.may_retry else errors.UserError
            active.error = kind(f"prompt {active.request.id}: {result.error}")
            return [self._completion(active, now)]
        active.prefill_ms += result.prefill_ms
        self._counts.update(
            prefix_queries_tokens=active.context, prefix_hits_tokens=result.cached_tokens
        )
        if active.output_ids:  # It was preempted.
            return []
        active.queued_ms, active.cached_tokens = result.queued_ms, result.cached_tokens
        return self._begin(active, result.anchor, now, result.logprobs)

    def _requeue(self, requests: Sequence[ActiveRequest]) -> None:
        super()._requeue(requests)
        for active in requests:
            self._order(active)
