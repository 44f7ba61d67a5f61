"""Runs the server: a socket, the event loop, signals, the log, and an exit status."""

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

import uvicorn

from dflash import errors
from dflash.serving.app import application
from dflash.serving.backend import Backend
from dflash.serving.engine_thread import EngineThread
from dflash.serving.log import write_log
from dflash.serving.service import Service

KEY = "DFLASH_API_KEY"  # the environment variable
_FAILED, _INTERRUPTED = 1, 130
_SIGNALS = {signal.SIGTERM: 0, signal.SIGINT: _INTERRUPTED}  # to stop, and the status then
_LAST_ANSWERS_S = 0.2  # for those who wait when the engine fails
_CLOSING_S = 3.0  # that connections have to end once nothing runs any more
_KEEP_ALIVE_S = 75
_BACKLOG = 2048


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens, before anything expensive is done.

    Raises:
      ConfigError: the address cannot be used.
    """
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except (OSError, OverflowError) as error:
        number = getattr(error, "errno", None)
        reason = os.strerror(number) if number and number > 0 else error
        raise errors.ConfigError(
            f"--host={host} --port={port}: cannot listen there: {reason}"
        ) from error


def address(listener: socket.socket) -> str:
    """The URL of a socket."""
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
      backend: what to serve.
      listener: from `listen`.
      on_ready: gets the URL once requests are served.
      profile_dir: where profiles go; None: there are none.
    Returns:
      The exit status: 0 after SIGTERM, 130 after SIGINT, 1 if the engine has failed.
    Raises:
      UserError: the engine cannot start, or numbers are not finite.
    """
    status, error = asyncio.run(_serve(backend, listener, on_ready, profile_dir))
    return status if error is None else _status_of(error)


def follow(backend: Backend) -> int:
    """Does what the first process's server does, on every other process of a run.

    Signals to stop are the first process's to obey: it tells the others.

    Returns:
      The exit status.
    Raises:
      UserError: see `run`.
    """
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    follower = _Follower()
    EngineThread(backend, follower).run()
    return 0 if follower.error is None else _status_of(follower.error)


def _status_of(error: BaseException) -> int:
    """The exit status after an engine has failed; a UserError is raised instead."""
    if isinstance(error, errors.UserError):
        raise error
    print("".join(traceback.format_exception(error)), file=sys.stderr, end="", flush=True)
    return _FAILED


class _Follower:
    """Hears of everything, and keeps but the error."""

    error: BaseException | None = None

    def ready(self, engines) -> None:
        pass

    def stepped(self, events, stats, seconds) -> None:
        pass

    def stopped(self, error: BaseException | None) -> None:
        self.error = error


async def _serve(
    backend: Backend,
    listener: socket.socket,
    on_ready: Callable[[str], None],
    profile_dir: str | None,
) -> tuple[int, BaseException | None]:
    """Serves until a signal asks to stop, or the engine fails; see `run`."""
    service = Service(backend, profile_dir)
    with _signals() as asked:
        logging = asyncio.create_task(write_log(service))
        await serve(service, listener, asked, on_ready)
        logging.cancel()
    return asked.status, service.error


async def serve(
    service: Service,
    listener: socket.socket,
    asked: asyncio.Event,
    on_ready: Callable[[str], None],
) -> None:
    """Runs a service until it is asked to stop, or its engine ends.

    Args:
      service: not started yet.
      listener: from `listen`.
      asked: set by who wants it to stop.
      on_ready: see `run`.
    """
    front = _front(application(service, key=os.environ.get(KEY) or None))
    service.start()
    serving = asyncio.create_task(front.serve(sockets=[listener]))
    announcing = asyncio.create_task(_announce(service, address(listener), on_ready))
    waits = [asyncio.create_task(asked.wait()), asyncio.create_task(service.ended.wait())]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    if not service.ended.is_set():
        await service.drain()
        await service.stop()
    else:
        await asyncio.sleep(_LAST_ANSWERS_S)
    front.should_exit = True
    await serving
    for task in (announcing, *waits):
        task.cancel()


@contextlib.contextmanager
def in_background(backend: Backend) -> Iterator[str]:
    """A server on a thread of its own, at a free port of this machine; yields its URL.

    Raises:
      BaseException: what kept its engine from starting, or ended it.
    """
    listener, ready = listen("127.0.0.1", 0), threading.Event()
    held: dict[str, Any] = {}

    async def serving() -> None:
        service, asked = Service(backend), asyncio.Event()
        held.update(service=service, asked=asked, loop=asyncio.get_running_loop())
        try:
            await serve(service, listener, asked, lambda url: ready.set())
        finally:
            ready.set()

    thread = threading.Thread(target=lambda: asyncio.run(serving()), name="server", daemon=True)
    thread.start()
    ready.wait()
    try:
        if held["service"].error is None:
            yield address(listener)
    finally:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            held["loop"].call_soon_threadsafe(held["asked"].set)
        thread.join()
    if held["service"].error is not None:
        raise held["service"].error


async def _announce(service: Service, url: str, on_ready: Callable[[str], None]) -> None:
    await service.is_ready.wait()
    if service.model is not None:
        on_ready(url)


class _Front(uvicorn.Server):
    """uvicorn, without its own way with signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _front(app) -> uvicorn.Server:
    return _Front(
        uvicorn.Config(
            app,
            lifespan="off",
            log_config=None,
            log_level="critical",
            access_log=False,
            server_header=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=_CLOSING_S,
            ws="none",
        )
    )


class _Asked(asyncio.Event):
    """Set by the first signal to stop; `status` is the exit status that it means."""

    status = 0


@contextlib.contextmanager
def _signals() -> Iterator[_Asked]:
    """Takes SIGTERM and SIGINT while the context lasts; a second signal ends at once."""
    asked, loop = _Asked(), asyncio.get_running_loop()

    def stop(status: int) -> None:
        if asked.is_set():
            os._exit(_INTERRUPTED)
        asked.status = status
        asked.set()

    for number, status in _SIGNALS.items():
        loop.add_signal_handler(number, stop, status)
    try:
        yield asked
    finally:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)
