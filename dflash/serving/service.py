"""Between clients and the engine: admission, the events of each request, and the end of it all.

The service lives on the event loop; what the engine's thread says reaches it there, in order. A
client that goes away closes its `Call`, which cancels its requests.
"""

import asyncio
import contextlib
import dataclasses
import enum
import itertools
import math
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Literal

from dflash import errors
from dflash.config.serve_schema import ServeConfig
from dflash.inference.engine import Engine
from dflash.inference.request import Completion, Event, Request, Tokens
from dflash.inference.scheduler import SchedulerStats
from dflash.serving.ask import Ask, Model
from dflash.serving.engine_thread import (
    Cancel,
    Command,
    EngineThread,
    Flush,
    Profile,
    Stop,
    Submit,
)
from dflash.serving.metrics import Metrics
from dflash.serving.refusal import Refusal
from dflash.serving.tracks import DRAFTED, PLAIN, Tracks

_LONGEST_RETRY_S = 60
_UNKNOWN_RETRY_S = 1  # before any request has finished


class State(enum.Enum):
    """What the service does."""

    STARTING = "starting: weights are read and programs compiled"
    READY = "ready"
    DRAINING = "draining: no new requests"
    FAILED = "failed"


@dataclasses.dataclass
class Flight:
    """A request under way.

    Attributes:
      call: whose it is.
      index: place among the call's requests.
      request: what the engine was asked for.
      submitted_at, first_at, last_at: times in seconds of time.perf_counter: of its submission,
        and of its first and last tokens so far.
      tokens: of its output so far.
    """

    call: "Call"
    index: int
    request: Request
    submitted_at: float
    first_at: float | None = None
    last_at: float | None = None
    tokens: int = 0


class Call:
    """The requests of one HTTP request, under way; a context that cancels what is left of them."""

    def __init__(self, service: "Service", requests: Sequence[Request], deadline: float):
        """Holds requests that were admitted.

        Args:
          service: whose it is.
          requests: with ids of their own.
          deadline: time of the event loop at which patience ends.
        """
        self.requests = tuple(requests)
        self._service, self._deadline = service, deadline
        self._open = {request.id for request in requests}
        self._waiting: list[tuple[int, Event]] = []
        self._news = asyncio.Event()
        self._problem: Refusal | None = None

    def __enter__(self) -> "Call":
        return self

    def __exit__(self, *unused) -> None:
        self.cancel(range(len(self.requests)), "abort")

    async def events(self) -> AsyncIterator[list[tuple[int, Event]]]:
        """Yields what is new, each time all of it: pairs of a request's place and its event.

        Raises:
          Refusal: the engine has failed, or the request took too long.
        """
        while self._open or self._waiting:
            try:
                async with asyncio.timeout_at(self._deadline):
                    await self._news.wait()
            except TimeoutError:
                raise Refusal(
                    f"not done in {self._service.config.request_s:g} s", status=504, code="timeout"
                ) from None
            self._news.clear()
            if self._problem is not None:
                raise self._problem
            found, self._waiting = self._waiting, []
            yield found

    def cancel(self, places: Sequence[int], reason: Literal["stop", "abort"]) -> None:
        """Drops requests that are still open, for a reason that metrics count."""
        for place in places:
            id = self.requests[place].id
            if id in self._open:
                self._open.discard(id)
                self._service.drop(id, reason)

    def tell(self, place: int, event: Event) -> None:
        """An event has come."""
        if isinstance(event, Completion):
            self._open.discard(event.id)
        self._waiting.append((place, event))
        self._news.set()

    def fail(self, problem: Refusal) -> None:
        """Nothing more will come."""
        self._problem = problem
        self._open.clear()
        self._news.set()


class Service:
    """Admits requests and hands events to their calls; a listener of the engine's thread.

    Attributes:
      config: limits and timeouts.
      created: when it was made, in seconds since 1970.
      metrics: what happened.
      state: what it does.
      model: what is served; None until it is ready.
      stats: where the schedulers of the tracks stand.
      is_ready: set once requests are served, or never will be.
      ended: set once the engine's thread has ended.
      error: why it has, if it failed.
    """

    def __init__(self, tracks: Tracks, profile_dir: str | None = None):
        """Serves nothing yet.

        Args:
          tracks: what is served.
          profile_dir: where profiles go; None: there are none.
        """
        self.config: ServeConfig = tracks.config.serve
        self.profile_dir = profile_dir
        self.created = int(time.time())
        self.metrics = Metrics()
        self.state = State.STARTING
        self.model: Model | None = None
        self.stats: Mapping[str, SchedulerStats] = {}
        self.error: BaseException | None = None
        self.ended = asyncio.Event()
        self.is_ready = asyncio.Event()
        self._tracks = tracks
        self._engines: Mapping[str, Engine] = {}
        self._loop = asyncio.get_running_loop()
        self._thread: EngineThread | None = None
        self._flights: dict[int, Flight] = {}
        self._ids = itertools.count()
        self._mean_s: float | None = None  # of a request, lately

    # --- for the front end ----------------------------------------------------------------------

    def start(self) -> None:
        """Starts the engine's thread."""
        self._thread = EngineThread(self._tracks, self)
        self._thread.start()

    @property
    def slots(self) -> int:
        """Requests that are decoded at a time."""
        return sum(engine.layout.batch_size for engine in self._engines.values())

    @property
    def in_flight(self) -> int:
        """Requests that wait or are decoded."""
        return len(self._flights)

    def served(self) -> Model:
        """What is served.

        Raises:
          Refusal: the service is not ready.
        """
        if self.state is not State.READY:
            raise Refusal(self.state.value, status=503, code="unavailable", retry_after_s=5)
        return self.model

    def admit(self, ask: Ask) -> Call:
        """Takes requests on, all or none.

        Raises:
          Refusal: they cannot be decoded, or there are too many already.
        """
        model = self.served()
        track = DRAFTED if ask.drafting else PLAIN
        requests = ask.requests(model, self._ids)
        for request in requests:
            try:
                self._engines[track].check(request)
            except errors.InputError as error:
                raise Refusal(str(error).removeprefix(f"prompt {request.id}: ")) from error
        if self.in_flight + len(requests) > self.slots + self.config.queue:
            raise Refusal(
                f"{self.in_flight} requests are running or waiting, and there is room for "
                f"{self.slots + self.config.queue}; try again later",
                status=429,
                code="queue_full",
                retry_after_s=self._retry_after_s(),
            )
        call = Call(self, requests, self._loop.time() + self.config.request_s)
        now = time.perf_counter()
        for index, request in enumerate(requests):
            self._flights[request.id] = Flight(call, index, request, now)
            self._put(Submit(track, request))
        self.metrics.admitted(ask, model.decode)
        return call

    def drop(self, id: int, reason: Literal["stop", "abort"]) -> None:
        """Cancels a request, if it is in flight."""
        flight = self._flights.pop(id, None)
        if flight is not None:
            self.metrics.dropped(flight, reason)
            self._put(Cancel(id))

    def flush(self) -> None:
        """Empties the prefix caches."""
        self._put(Flush())

    def profile(self, running: bool) -> None:
        """Begins or ends a profiler trace.

        Raises:
          Refusal: the server was started without a directory for it.
        """
        if self.profile_dir is None:
            raise Refusal("profiling needs a server with --profile_dir", status=404)
        self._put(Profile(self.profile_dir if running else None))

    async def drain(self) -> None:
        """Refuses new requests, and waits for the others, as long as the config says."""
        if self.state is State.READY:
            self.state = State.DRAINING
        begin = self._loop.time()
        while self._flights and self._loop.time() - begin < self.config.drain_s:
            await asyncio.sleep(0.05)
        for flight in list(self._flights.values()):
            flight.call.fail(Refusal("the server is stopping", status=503, code="stopping"))

    async def stop(self) -> None:
        """Ends the engine's thread; does not wait for one that still compiles."""
        self._put(Stop())
        if self.is_ready.is_set():
            await self.ended.wait()

    def _put(self, command: Command) -> None:
        self._thread.put(command)

    def _retry_after_s(self) -> int:
        """Seconds until a place in the queue may be free."""
        if self._mean_s is None:
            return _UNKNOWN_RETRY_S
        return min(max(1, math.ceil(self._mean_s / self.slots)), _LONGEST_RETRY_S)

    # --- a listener: called on the engine's thread -----------------------------------------------

    def ready(self, engines: Mapping[str, Engine]) -> None:
        """Everything is compiled."""
        self._call_soon(self._on_ready, engines)

    def stepped(
        self, events: Sequence[Event], stats: Mapping[str, SchedulerStats], seconds: float
    ) -> None:
        """A step is done."""
        self._call_soon(self._on_step, events, stats, seconds, time.perf_counter())

    def stopped(self, error: BaseException | None) -> None:
        """The thread has ended."""
        self._call_soon(self._on_end, error)

    def _call_soon(self, function, *arguments) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
            self._loop.call_soon_threadsafe(function, *arguments)

    # --- on the event loop ----------------------------------------------------------------------

    def _on_ready(self, engines: Mapping[str, Engine]) -> None:
        self._engines, self.model = engines, self._tracks.model(engines)
        self.metrics.describe(self.model, engines[DRAFTED])
        if self.state is State.STARTING:
            self.state = State.READY
        self.is_ready.set()

    def _on_step(
        self,
        events: Sequence[Event],
        stats: Mapping[str, SchedulerStats],
        seconds: float,
        now: float,
    ) -> None:
        self.stats = stats
        self.metrics.stepped(events, stats, seconds)
        for event in events:
            flight = self._flights.get(event.id)
            if flight is None:  # dropped meanwhile
                continue
            if isinstance(event, Tokens):
                if event.ids:
                    self.metrics.tokens(flight, event, now)
                    self._note(flight, event, now)
            else:
                del self._flights[event.id]
                self.metrics.finished(flight, event, now)
                took = now - flight.submitted_at
                self._mean_s = took if self._mean_s is None else 0.9 * self._mean_s + 0.1 * took
            flight.call.tell(flight.index, event)

    def _note(self, flight: Flight, event: Tokens, now: float) -> None:
        flight.first_at = now if flight.first_at is None else flight.first_at
        flight.last_at = now
        flight.tokens += len(event.ids)

    def _on_end(self, error: BaseException | None) -> None:
        self.error = error
        if error is not None:
            self.state = State.FAILED
            problem = Refusal("the engine has failed; the server ends", status=500, code="failed")
            flights, self._flights = self._flights, {}
            for flight in flights.values():
                flight.call.fail(problem)
        self.is_ready.set()
        self.ended.set()
