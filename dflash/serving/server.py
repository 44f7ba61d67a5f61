"""Server process: socket, event loop, signals, log, and exit status."""

import asyncio
import contextlib
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from dflash import errors
from dflash.serving import connection, guard
from dflash.serving.app import application
from dflash.serving.backend import Backend
from dflash.serving.engine_thread import EngineThread
from dflash.serving.log import write_log
from dflash.serving.service import Service

KEY = "DFLASH_API_KEY"  # Environment variable.
_FAILED, _INTERRUPTED = 1, 130
_SIGNALS = {signal.SIGTERM: 0, signal.SIGINT: _INTERRUPTED}  # Exit status by signal.
_LAST_ANSWERS_S = 0.2  # Time to send error responses after the engine has failed.
_CLOSING_S = 3.0  # Time in which connections must close after the service has stopped.


def listen(host: str, port: int) -> socket.socket:
    """Opens a listening socket; called first, so that a bad address fails before weights load.

    Raises:
      ConfigError: The address is invalid or in use.
    """
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=connection.BACKLOG)
    except (OSError, OverflowError) as error:
        number = getattr(error, "errno", None)
        reason = os.strerror(number) if number and number > 0 else error
        raise errors.ConfigError(
            f"--host={host} --port={port}: cannot listen there: {reason}"
        ) from error


def address(listener: socket.socket) -> str:
    """Returns the URL of a listening socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def run(
    backend: Backend,
    listener: socket.socket,
    *,
    on_ready: Callable[[str], None],
    profile_dir: str | None = None,
) -> int:
    """Serves until SIGTERM or SIGINT, or until the engine fails.

    Args:
      backend: Engines to serve.
      listener: Socket that `listen` has opened.
      on_ready: Function that is called with the URL once requests are served.
      profile_dir: Directory of profiler traces; None disables profiling.
    Returns:
      Exit status: 0 after SIGTERM, 130 after SIGINT, 1 if the engine has failed.
    Raises:
      UserError: The engine cannot start, or logits are not finite.
    """
    status, error = asyncio.run(_serve(backend, listener, on_ready, profile_dir))
    return status if error is None else _status_of(error)


def follow(backend: Backend) -> int:
    """Runs the engine on a process other than process 0, which has the HTTP server.

    Signals are ignored here: process 0 handles them and broadcasts the command to stop.

    Returns:
      Exit status: 1 if the engine has failed, otherwise 0.
    Raises:
      UserError: The engine cannot start, or logits are not finite.
    """
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    follower = _Follower()
    EngineThread(backend, follower).run()
    return 0 if follower.error is None else _status_of(follower.error)


def _status_of(error: BaseException) -> int:
    """Returns the exit status after an error, and prints its traceback; re-raises a UserError."""
    if isinstance(error, errors.UserError):
        raise error
    print("".join(traceback.format_exception(error)), file=sys.stderr, end="", flush=True)
    return _FAILED


class _Follower:
    error: BaseException | None = None

    def ready(self, engines) -> None:
        pass

    def stepped(self, events, stats, seconds) -> None:
        pass

    def updated(self, problem: str | None) -> None:
        pass

    def stopped(self, error: BaseException | None) -> None:
        self.error = error


async def _serve(
    backend: Backend,
    listener: socket.socket,
    on_ready: Callable[[str], None],
    profile_dir: str | None,
) -> tuple[int, BaseException | None]:
    """Serves until a signal or a failure of the engine; returns the exit status and the error."""
    service = Service(backend, profile_dir)
    with _signals() as stop:
        logging = asyncio.create_task(write_log(service, backend.config.drafter))
        await serve(service, listener, stop, on_ready)
        logging.cancel()
    return stop.status, service.error


async def serve(
    service: Service,
    listener: socket.socket,
    stop: asyncio.Event,
    on_ready: Callable[[str], None],
) -> None:
    """Runs a service until stop is requested or its engine ends.

    Args:
      service: Service that has not been started.
      listener: Socket that `listen` has opened.
      stop: Event that requests the stop.
      on_ready: Function that is called with the URL once requests are served.
    """
    names = guard.served_names(listener.getsockname()[0], service.config.hosts)
    app = application(service, names=names, keys=_keys(os.environ.get(KEY, "")))
    server = connection.Server(app, service.config, _CLOSING_S)
    service.start()
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    announcing = asyncio.create_task(_announce(service, address(listener), on_ready))
    waits = [asyncio.create_task(stop.wait()), asyncio.create_task(service.ended.wait())]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    if not service.ended.is_set():
        await service.drain()
        await service.stop()
    else:
        await asyncio.sleep(_LAST_ANSWERS_S)
    server.should_exit = True
    await serving
    await service.close()
    for task in (announcing, *waits):
        task.cancel()


def _keys(text: str) -> list[str]:
    return [key for part in text.split(",") if (key := part.strip())]


@contextlib.contextmanager
def in_background(backend: Backend) -> Iterator[str]:
    """Runs a server on a thread, at a free port of this machine, and yields its URL.

    Raises:
      BaseException: The exception with which the engine failed.
    """
    listener, ready = listen("127.0.0.1", 0), threading.Event()
    shared: dict[str, Any] = {}

    async def serving() -> None:
        service, stop = Service(backend), asyncio.Event()
        shared.update(service=service, stop=stop, loop=asyncio.get_running_loop())
        try:
            await serve(service, listener, stop, lambda url: ready.set())
        finally:
            ready.set()

    thread = threading.Thread(target=lambda: asyncio.run(serving()), name="server", daemon=True)
    thread.start()
    ready.wait()
    try:
        if shared["service"].error is None:
            yield address(listener)
    finally:
        with contextlib.suppress(RuntimeError):  # The loop has ended already.
            shared["loop"].call_soon_threadsafe(shared["stop"].set)
        thread.join()
    if shared["service"].error is not None:
        raise shared["service"].error


async def _announce(service: Service, url: str, on_ready: Callable[[str], None]) -> None:
    await service.is_ready.wait()
    if service.model is not None:
        on_ready(url)


@contextlib.contextmanager
def stop_signals(stop: Callable[[], None]) -> Iterator[Callable[[], int]]:
    """Calls `stop` at SIGTERM or SIGINT within the context; a second signal exits at once.

    For a main thread without an event loop. Yields a function that returns the exit status.
    """
    statuses: list[int] = []

    def on_signal(number: int, frame: Any) -> None:
        if statuses:
            os._exit(_INTERRUPTED)
        statuses.append(_SIGNALS[signal.Signals(number)])
        stop()

    before = {number: signal.signal(number, on_signal) for number in _SIGNALS}
    try:
        yield lambda: statuses[0] if statuses else 0
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _StopEvent(asyncio.Event):
    status = 0


@contextlib.contextmanager
def _signals() -> Iterator[_StopEvent]:
    """Handles SIGTERM and SIGINT within the context; a second signal exits at once."""
    stop, loop = _StopEvent(), asyncio.get_running_loop()

    def on_signal(status: int) -> None:
        if stop.is_set():
            os._exit(_INTERRUPTED)
        stop.status = status
        stop.set()

    for number, status in _SIGNALS.items():
        loop.add_signal_handler(number, on_signal, status)
    try:
        yield stop
    finally:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)
