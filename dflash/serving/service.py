"""Front of the engine: admits requests, delivers their events, drains, and stops.

The service runs on the event loop. The engine's thread posts its reports there, so they are
handled in order. When a client disconnects, its `RequestGroup` cancels its requests.
"""

import asyncio
import collections
import contextlib
import dataclasses
import enum
import itertools
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from dflash import errors
from dflash.config.serve_schema import ServeConfig
from dflash.inference.engine import Engine
from dflash.inference.request import Event, RequestOutput
from dflash.inference.scheduler import SchedulerStats
from dflash.serving.backend import DRAFTED, PLAIN, Backend
from dflash.serving.completion_request import CompletionRequest
from dflash.serving.engine_thread import (
    Cancel,
    EngineThread,
    Flush,
    Profile,
    ReplaceWeights,
    Stop,
    Submit,
)
from dflash.serving.fair_queue import FairQueue
from dflash.serving.metrics import Metrics
from dflash.serving.served_model import ServedModel
from dflash.serving.served_requests import RequestGroup, ServedRequest
from dflash.serving.validation import RequestError, unavailable, unsupported

_MAX_RETRY_S = 60
_DEFAULT_RETRY_S = 1  # Used until a request has finished.
# Requests that wait in the scheduler, per slot, so that a slot is filled as soon as it is free.
_AHEAD = 0.25


class ServiceState(enum.Enum):
    """Phase of the service; the value is shown by /health."""

    STARTING = "starting: loading weights and compiling programs"
    READY = "ready"
    DRAINING = "draining: new requests are rejected"
    FAILED = "failed"


class Service:
    """Admits requests and delivers their events.

    Attributes:
      created: Time of creation, in seconds since 1970.
      model: Facts about the served model; None until the service is ready.
      is_ready: Set once requests are served, or once it is certain that they never will be.
    """

    def __init__(self, backend: Backend, profile_dir: str | None = None):
        """Creates the service without starting its engine."""
        self.config: ServeConfig = backend.config.serve
        self.profile_dir = profile_dir
        self._is_profiling = False
        self.created = int(time.time())
        self.metrics = Metrics()
        self.state = ServiceState.STARTING
        self.model: ServedModel | None = None
        self.stats: Mapping[str, SchedulerStats] = {}
        self.error: BaseException | None = None
        self.ended = asyncio.Event()
        self.is_ready = asyncio.Event()
        self._backend = backend
        self._engines: Mapping[str, Engine] = {}
        self._loop = asyncio.get_running_loop()
        self._thread: EngineThread | None = None
        self._requests: dict[int, ServedRequest] = {}
        self._queues: dict[str, FairQueue] = {}  # By decoding mode.
        self._updates: collections.deque[asyncio.Future[str | None]] = collections.deque()
        self._ids = itertools.count()
        self._mean_s: float | None = None  # Moving average of request latency, in seconds.

    # --- called by the endpoints -----------------------------------------------------------------

    def start(self) -> None:
        """Starts the engine's thread."""
        self._thread = EngineThread(self._backend, self._report)
        self._thread.start()

    def _report(self, name: str, *arguments: Any) -> None:
        with contextlib.suppress(RuntimeError):  # The loop is closed during shutdown.
            self._loop.call_soon_threadsafe(getattr(self, name), *arguments)

    @property
    def slots(self) -> int:
        """Maximum number of requests that are decoded at the same time."""
        return sum(engine.layout.batch_size for engine in self._engines.values())

    @property
    def in_flight(self) -> int:
        """Number of requests that are queued or being decoded."""
        return len(self._requests)

    def served(self) -> ServedModel:
        """Returns facts about the served model; raises RequestError while it is not ready."""
        if self.state is not ServiceState.READY:
            raise unavailable(self.state.value)
        return self.model

    def admit(self, completion_request: CompletionRequest, client: str) -> RequestGroup:
        """Queues the requests of one HTTP request: all of them, or none.

        Args:
          client: Name of the client, with whose other requests it shares slots.
        Raises:
          RequestError: They cannot be decoded, or too many others wait.
        """
        model = self.served()
        if completion_request.priority and not self.config.priorities:
            raise unsupported("priority", "only 0 is supported, since serve.priorities is false")
        mode = DRAFTED if completion_request.drafting else PLAIN
        requests = completion_request.requests(model, self._ids)
        for request in requests:
            try:
                self._engines[mode].check(request)
            except errors.InputError as error:
                raise RequestError(str(error).removeprefix(f"prompt {request.id}: ")) from error
        self._check_room(len(requests), client)
        group = RequestGroup(
            requests, timeout_s=self.config.request_s, cancel=self.cancel, metrics=self.metrics
        )
        for served in group.served:
            self._requests[served.request.id] = served
            owners = client, group
            self._queues[mode].add(served.request.id, owners, completion_request.priority)
        self._submit_next()
        self.metrics.admitted(completion_request, model.decode)
        return group

    def _check_room(self, added: int, client: str) -> None:
        capacity, limit = self.slots + self.config.queue, self.config.client_requests
        of_client = sum(queue.count(client) for queue in self._queues.values()) if limit else 0
        if self.in_flight + added > capacity:
            problem = f"{self.in_flight} requests are running or queued, and the server takes"
            problem += f" {capacity}"
        elif limit and of_client + added > limit:
            problem = f"{of_client} requests of this client are running or queued, and "
            problem += f"serve.client_requests allows {limit}"
        else:
            return
        raise RequestError(
            f"{problem}; try again later",
            status=429,
            code="queue_full",
            retry_after_s=self._retry_after_s(),
        )

    def cancel(self, id: int) -> None:
        """Cancels the request `id` if it is in flight."""
        if self._requests.pop(id, None) is not None:
            if self._leave_queue(id):
                self._thread.put(Cancel(id))
            self._submit_next()

    def flush(self) -> None:
        """Empties the prefix caches."""
        self._thread.put(Flush())

    async def update_weights(self, path: str) -> None:
        """Replaces the target's weights; requests in flight go on with the new ones.

        Raises:
          RequestError: Updates are disabled, the checkpoint does not fit, or the engine failed.
        """
        if not self.config.update_weights:
            message = "updates are off; start the server with serve.update_weights=true"
            raise RequestError(message, status=404)
        end: asyncio.Future[str | None] = self._loop.create_future()
        self._updates.append(end)
        self._thread.put(ReplaceWeights(path))
        problem = await end
        if problem is not None:
            raise RequestError(f"path: {problem}", param="path")

    def profile(self, running: bool) -> None:
        """Starts or stops a trace; raises RequestError if that is impossible or already so."""
        if self.profile_dir is None:
            raise RequestError("profiling is off; start the server with --profile_dir", status=404)
        if running == self._is_profiling:
            hint = "a profile is running; stop it first" if running else "no profile is running"
            raise RequestError(hint, status=409)
        self._is_profiling = running
        self._thread.put(Profile(self.profile_dir if running else None))

    async def drain(self) -> None:
        """Rejects new requests, and waits up to serve.drain_s for those in flight."""
        if self.state is ServiceState.READY:
            self.state = ServiceState.DRAINING
        begin = self._loop.time()
        while self._requests and self._loop.time() - begin < self.config.drain_s:
            await asyncio.sleep(0.05)
        for served in list(self._requests.values()):
            served.group.fail(RequestError("the server is stopping", status=503, code="stopping"))

    async def stop(self) -> None:
        """Stops the engine's thread; does not wait for it if it is still compiling."""
        self._thread.put(Stop())
        if self.is_ready.is_set():
            await self.ended.wait()

    def _submit_next(self) -> None:
        for mode, queue in self._queues.items():
            for id in queue.take():
                self._thread.put(Submit(mode, self._requests[id].request))

    def _leave_queue(self, id: int) -> bool:
        """Gives the place of a request back; returns whether it had been submitted."""
        return any(queue.remove(id) for queue in self._queues.values())

    def _retry_after_s(self) -> int:
        if self._mean_s is None:
            return _DEFAULT_RETRY_S
        return min(max(1, math.ceil(self._mean_s / self.slots)), _MAX_RETRY_S)

    # --- reports of the engine's thread, on the event loop ----------------------------------------

    def ready(self, engines: Mapping[str, Engine]) -> None:
        """Starts to serve requests, since all programs are compiled."""
        self._engines, self.model = engines, self._backend.model(engines)
        for mode, engine in engines.items():
            slots = engine.layout.batch_size
            self._queues[mode] = FairQueue(slots + math.ceil(_AHEAD * slots))
        self.metrics.describe(self.model, engines[DRAFTED])
        if self.state is ServiceState.STARTING:
            self.state = ServiceState.READY
        self.is_ready.set()

    def stepped(
        self,
        events: Sequence[Event],
        stats: Mapping[str, SchedulerStats],
        seconds: float,
        end: float,
    ) -> None:
        """Records a step of the engine, and delivers its events.

        Args:
          seconds: Duration of the step; 0 if all schedulers were idle.
          end: Time of its end, in seconds of time.perf_counter.
        """
        self.stats = {
            mode: dataclasses.replace(
                scheduler_stats, waiting=scheduler_stats.waiting + self._queues[mode].waiting
            )
            for mode, scheduler_stats in stats.items()
        }
        self.metrics.stepped(events, self.stats, seconds)
        for event in events:
            served = self._requests.get(event.id)
            if served is None:  # The request was cancelled in the meantime.
                continue
            if isinstance(event, RequestOutput):
                del self._requests[event.id]
                self._leave_queue(event.id)
                took = end - served.submitted_at
                self._mean_s = took if self._mean_s is None else 0.9 * self._mean_s + 0.1 * took
            served.group.deliver(served.index, event, end)
        self._submit_next()

    def updated(self, problem: str | None) -> None:
        """Ends a `ReplaceWeights`; `problem` is the reason if the old weights stay."""
        end = self._updates.popleft()
        if not end.done():  # The client may have disconnected.
            end.set_result(problem)

    def stopped(self, error: BaseException | None) -> None:
        """Ends the service with its thread, whose exception is given if it has failed."""
        self.error = error
        for end in self._updates:
            if not end.done():
                end.set_exception(RequestError("the server is stopping", status=503))
        if error is not None:
            self.state = ServiceState.FAILED
            problem = RequestError(
                "the engine failed; the server is stopping", status=500, code="failed"
            )
            requests, self._requests = self._requests, {}
            for served in requests.values():
                served.group.fail(problem)
        self.is_ready.set()
        self.ended.set()
