"""Runs the server: a socket, the event loop, signals, the log, and an exit status."""

import asyncio
import contextlib
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import uvicorn

from dflash import errors
from dflash.config.serve_schema import ServeConfig
from dflash.inference.engine import Engine
from dflash.serving.app import application
from dflash.serving.engine_thread import EngineThread
from dflash.serving.log import write_log
from dflash.serving.service import ModelOf, Service

KEY = "DFLASH_API_KEY"  # the environment variable
_FAILED, _INTERRUPTED = 1, 130
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
    config: ServeConfig,
    listener: socket.socket,
    start: Callable[[], Mapping[str, Engine]],
    model_of: ModelOf,
    *,
    on_ready: Callable[[str], None],
    profile_dir: str | None = None,
) -> int:
    """Serves until SIGTERM or SIGINT, or until the engine fails.

    Args:
      config: limits and timeouts.
      listener: from `listen`.
      start: loads, compiles and returns the engine of each lane; called on the engine's thread.
      model_of: tells what is served, from the engines.
      on_ready: gets the URL once requests are served.
      profile_dir: where profiles go; None: there are none.
    Returns:
      The exit status: 0 after SIGTERM, 130 after SIGINT, 1 if the engine has failed.
    Raises:
      UserError: the engine cannot start, or numbers are not finite.
    """
    serving = _serve(config, listener, start, model_of, on_ready, profile_dir)
    status, error = asyncio.run(serving)
    if isinstance(error, errors.UserError):
        raise error
    if error is not None:
        print("".join(traceback.format_exception(error)), file=sys.stderr, end="", flush=True)
    return status


def follow(start: Callable[[], Mapping[str, Engine]]) -> int:
    """Does what the first process's server does, on every other process of a run.

    Returns:
      The exit status.
    """
    follower = _Follower()
    EngineThread(start, follower).run()
    if isinstance(follower.error, errors.UserError):
        raise follower.error
    if follower.error is not None:
        traceback.print_exception(follower.error)
        return _FAILED
    return 0


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
    config: ServeConfig,
    listener: socket.socket,
    start: Callable[[], Mapping[str, Engine]],
    model_of: ModelOf,
    on_ready: Callable[[str], None],
    profile_dir: str | None,
) -> tuple[int, BaseException | None]:
    """Serves until a signal asks to stop, or the engine fails; see `run`."""
    service = Service(config, model_of, profile_dir)
    with _signals() as asked:
        logging = asyncio.create_task(write_log(service))
        await serve(service, listener, start, asked, on_ready)
        logging.cancel()
    if service.error is not None:
        return _FAILED, service.error
    return asked.status, None


async def serve(
    service: Service,
    listener: socket.socket,
    start: Callable[[], Mapping[str, Engine]],
    asked: asyncio.Event,
    on_ready: Callable[[str], None],
) -> None:
    """Runs a service until it is asked to stop, or its engine ends.

    Args:
      service: not started yet.
      listener: from `listen`.
      start: see `run`.
      asked: set by who wants it to stop.
      on_ready: see `run`.
    """
    front = _front(application(service, key=os.environ.get(KEY) or None))
    service.start(EngineThread(start, service))
    serving = asyncio.create_task(front.serve(sockets=[listener]))
    announcing = asyncio.create_task(_announce(service, address(listener), on_ready))
    waits = [asyncio.create_task(asked.wait()), asyncio.create_task(service.ended.wait())]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    if not service.ended.is_set():
        await service.drain()
        service.stop()
    else:
        await asyncio.sleep(_LAST_ANSWERS_S)
    front.should_exit = True
    await serving
    for task in (announcing, *waits):
        task.cancel()


@contextlib.contextmanager
def in_background(
    config: ServeConfig, start: Callable[[], Mapping[str, Engine]], model_of: ModelOf
) -> Iterator[str]:
    """A server on a thread of its own, at a free port of this machine; yields its URL.

    Raises:
      BaseException: what kept its engine from starting, or ended it.
    """
    listener, ready = listen("127.0.0.1", 0), threading.Event()
    held: dict[str, Any] = {}

    async def serving() -> None:
        service, asked = Service(config, model_of), asyncio.Event()
        held.update(service=service, asked=asked, loop=asyncio.get_running_loop())
        try:
            await serve(service, listener, start, asked, lambda url: ready.set())
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

    for number, status in ((signal.SIGTERM, 0), (signal.SIGINT, _INTERRUPTED)):
        loop.add_signal_handler(number, stop, status)
    try:
        yield asked
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
