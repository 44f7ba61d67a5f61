"""Server process: socket, event loop, signals, log, and exit status."""

import asyncio
import contextlib
import copy
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator

from dflash import errors
from dflash.serving import connection, guard
from dflash.serving.app import application
from dflash.serving.backend import Backend
from dflash.serving.engine_thread import EngineThread
from dflash.serving.metrics import Totals
from dflash.serving.service import Service

KEY = "DFLASH_API_KEY"  # Environment variable.
_FAILED, _INTERRUPTED = 1, 130
_SIGNALS = {signal.SIGTERM: 0, signal.SIGINT: _INTERRUPTED}  # Exit status by signal.
_LAST_ANSWERS_S = 0.2  # Time to send error responses after the engine has failed.
_CLOSING_S = 3.0  # Time in which connections must close after the service has stopped.
_EVERY_S = 10.0


def listen(host: str, port: int) -> socket.socket:
    """Opens a socket before weights load; raises ConfigError if the address is bad or in use."""
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
    thread = EngineThread(backend)
    thread.run()
    return 0 if thread.error is None else _status_of(thread.error)


def _status_of(error: BaseException) -> int:
    """Returns the exit status after an error, and prints its traceback; re-raises a UserError."""
    if isinstance(error, errors.UserError):
        raise error
    print("".join(traceback.format_exception(error)), file=sys.stderr, end="", flush=True)
    return _FAILED


async def _serve(
    backend: Backend,
    listener: socket.socket,
    on_ready: Callable[[str], None],
    profile_dir: str | None,
) -> tuple[int, BaseException | None]:
    """Serves until a signal or a failure of the engine; returns the exit status and the error."""
    service = Service(backend, profile_dir)
    with _signals() as stop:
        logging = asyncio.create_task(write_log(service))
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
    for task in (announcing, *waits):
        task.cancel()


def _keys(text: str) -> list[str]:
    return [key for part in text.split(",") if (key := part.strip())]


async def _announce(service: Service, url: str, on_ready: Callable[[str], None]) -> None:
    await service.is_ready.wait()
    if service.model is not None:
        on_ready(url)


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


async def write_log(service: Service) -> None:
    """Writes log lines to stderr until it is cancelled."""
    before, begin = copy.deepcopy(service.metrics.totals), time.perf_counter()
    while True:
        await asyncio.sleep(_EVERY_S)
        now, end = copy.deepcopy(service.metrics.totals), time.perf_counter()
        if service.in_flight or now.output_tokens > before.output_tokens:
            print(line(service, before, now, end - begin), file=sys.stderr, flush=True)
        before, begin = now, end


def line(service: Service, before: Totals, now: Totals, seconds: float) -> str:
    """Returns the log lines of an interval, in vLLM's format."""
    schedulers = list(service.stats.values())
    pages = sum(stats.pages_total for stats in schedulers)
    used = sum(stats.pages_used for stats in schedulers) / pages if pages else 0.0
    queries = sum(stats.prefix_queries_tokens for stats in schedulers)
    hits = sum(stats.prefix_hits_tokens for stats in schedulers)
    parts = [
        f"Running: {sum(stats.running + stats.prefilling for stats in schedulers)} reqs",
        f"Waiting: {sum(stats.waiting for stats in schedulers)} reqs",
        f"prompt throughput: {(now.prompt_tokens - before.prompt_tokens) / seconds:.1f} tokens/s",
        "generation throughput: "
        f"{(now.output_tokens - before.output_tokens) / seconds:.1f} tokens/s",
        f"KV cache usage: {100 * used:.1f}%",
        f"Prefix cache hit rate: {100 * hits / queries if queries else 0:.1f}%",
    ]
    throughput = ", ".join(parts)
    cycles, drafted = now.cycles - before.cycles, now.drafted - before.drafted
    if not cycles:
        return throughput
    accepted, committed = now.accepted - before.accepted, now.committed - before.committed
    rates = [
        (late - early) / cycles
        for late, early in zip(now.accepted_at, before.accepted_at, strict=True)
    ]
    mean_rate = f"{100 * accepted / drafted:.1f}%" if drafted else "–"
    return (
        f"{throughput}\nSpecDecoding metrics: Mean acceptance length: {committed / cycles:.2f}, "
        f"Accepted throughput: {accepted / seconds:.2f} tokens/s, "
        f"Drafted throughput: {drafted / seconds:.2f} tokens/s, "
        f"Accepted: {accepted} tokens, Drafted: {drafted} tokens, "
        f"Per-position acceptance rate: {', '.join(f'{rate:.3f}' for rate in rates)}, "
        f"Avg Draft acceptance rate: {mean_rate}"
    )
