"""Admitted requests, grouped by the HTTP request that contained them."""

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Literal, Protocol

from dflash.inference.request import Event, Request, RequestOutput, Tokens
from dflash.serving.validation import RequestError

CancelReason = Literal["stop", "abort"]


@dataclasses.dataclass
class ServedRequest:
    """A request that is queued or being decoded.

    Attributes:
      submitted_at: Time of submission, in seconds of time.perf_counter.
      first_at: Time of the first output token, in the same unit; None before it.
      last_at: Time of the latest output token, in the same unit; None before the first.
    """

    group: "RequestGroup"
    index: int
    request: Request
    submitted_at: float
    first_at: float | None = None
    last_at: float | None = None
    tokens: int = 0

    def count(self, num_tokens: int, now: float) -> None:
        """Counts output tokens that arrived at time `now`."""
        self.first_at = now if self.first_at is None else self.first_at
        self.last_at = now
        self.tokens += num_tokens


class Recorder(Protocol):
    """Receiver of what becomes of requests: `metrics.Metrics`, which imports this module."""

    def tokens(self, served: ServedRequest, event: Tokens, now: float) -> None:
        """Counts new tokens of a request."""

    def finished(self, served: ServedRequest, done: RequestOutput, now: float) -> None:
        """Records a request that the engine has finished."""

    def cancelled(self, served: ServedRequest, reason: CancelReason) -> None:
        """Records a request that a stop string ended, or whose client disconnected."""


class RequestGroup:
    """The admitted requests of one HTTP request; leaving the context cancels unfinished ones.

    The reader of `events` reports to `count` and `finish` which of them belong to the output, since
    the engine decodes past a stop string before it hears of it.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        *,
        timeout_s: float,
        cancel: Callable[[int], None],
        metrics: Recorder,
    ):
        now = time.perf_counter()
        self.requests = tuple(requests)
        self.served = tuple(
            ServedRequest(self, i, request, now) for i, request in enumerate(requests)
        )
        self._timeout_s, self._cancel, self._metrics = timeout_s, cancel, metrics
        self._deadline = asyncio.get_running_loop().time() + timeout_s
        self._open = {request.id for request in requests}
        self._unrecorded = set(range(len(requests)))  # Requests whose end was not recorded yet.
        self._undelivered: list[tuple[int, Event, float]] = []
        self._changed = asyncio.Event()
        self._problem: RequestError | None = None

    def __enter__(self) -> "RequestGroup":
        return self

    def __exit__(self, *unused) -> None:
        self.cancel(range(len(self.requests)), "abort")

    async def events(self) -> AsyncIterator[list[tuple[int, Event, float]]]:
        """Yields the new events whenever some arrive, each with its request's index and its time.

        Raises:
          RequestError: The engine has failed, or the requests took too long.
        """
        while self._open or self._undelivered:
            try:
                async with asyncio.timeout_at(self._deadline):
                    await self._changed.wait()
            except TimeoutError:
                raise RequestError(
                    f"not done in {self._timeout_s:g} s; ask for fewer tokens, or raise "
                    "serve.request_s",
                    status=504,
                    code="timeout",
                ) from None
            self._changed.clear()
            if self._problem is not None:
                raise self._problem
            events, self._undelivered = self._undelivered, []
            yield events

    def cancel(self, indices: Sequence[int], reason: CancelReason) -> None:
        """Ends the requests at these indices whose end was not recorded yet."""
        for index in sorted(self._unrecorded.intersection(indices)):
            self._unrecorded.discard(index)
            self._metrics.cancelled(self.served[index], reason)
            id = self.requests[index].id
            if id in self._open:
                self._open.discard(id)
                self._cancel(id)

    def count(self, index: int, event: Tokens, now: float) -> None:
        """Records tokens of the output of the request at `index`, which arrived at `now`."""
        self._metrics.tokens(self.served[index], event, now)
        self.served[index].count(len(event.ids), now)

    def finish(self, index: int, done: RequestOutput, now: float) -> None:
        """Records the end of the request at `index`, unless it was cancelled."""
        if index in self._unrecorded:
            self._unrecorded.discard(index)
            self._metrics.finished(self.served[index], done, now)

    def deliver(self, index: int, event: Event, now: float) -> None:
        """Passes an event of the request at `index`, which arrived at `now`, on to `events`."""
        if isinstance(event, RequestOutput):
            self._open.discard(event.id)
        self._undelivered.append((index, event, now))
        self._changed.set()

    def fail(self, problem: RequestError) -> None:
        """Makes `events` raise `problem`."""
        self._problem = problem
        self._open.clear()
        self._changed.set()
