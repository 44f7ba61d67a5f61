"""Connections of the HTTP server, with limits that apply before and after the application runs.

uvicorn and h11 bound the size of a request's head and close connections between requests. A
`Connection` also bounds the time in which a head must arrive and a response must be read, and the
number of connections.
"""

import asyncio
import contextlib
import dataclasses
import functools
import resource
import socket
from collections.abc import Sequence

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from dflash.config.serve_schema import ServeConfig

MAX_HEAD_BYTES = 2**15  # Request line and headers together.
KEEP_ALIVE_S = 75
BACKLOG = 2048  # Connections that the operating system holds until they are accepted.
# Connections accepted in one iteration of the event loop; silent ones are closed two later.
_ACCEPTED_AT_ONCE = 64
_OTHER_FILES = 128 + 4 * _ACCEPTED_AT_ONCE
# One read of the smallest chunks, 6 bytes each, then holds the event loop for some 20 ms.
_READ_BYTES = 2**14


class Connection(H11Protocol):
    """HTTP/1.1 connection that ends if its client is silent or does not read."""

    def __init__(self, *args, limits: ServeConfig, **kwargs):
        super().__init__(*args, **kwargs)
        self._limits = limits
        self._waiting_since = self.loop.time()
        self._head_timer: asyncio.TimerHandle | None = None
        self._send_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Starts the time limit of the first request, and closes a silent connection for it."""
        super().connection_made(transport)
        transport.max_size = _READ_BYTES
        transport.set_write_buffer_limits(high=0)  # Any unsent byte starts the time limit.
        self._head_timer = self.loop.call_later(self._limits.read_s, transport.abort)
        self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancels all time limits."""
        super().connection_lost(exc)
        self._head_timer = _cancelled(self._head_timer)
        self._send_timer = _cancelled(self._send_timer)

    def data_received(self, data: bytes) -> None:
        """Starts the time limit of a request with its first byte; ends it with its head."""
        if self._head_timer is None and self._between_requests:
            self._head_timer = self.loop.call_later(self._limits.read_s, self.transport.abort)
        super().data_received(data)
        if not self._between_requests:
            self._head_timer = _cancelled(self._head_timer)

    def on_response_complete(self) -> None:
        """Notes since when the connection has been waiting for a request."""
        self._waiting_since = self.loop.time()
        super().on_response_complete()

    def pause_writing(self) -> None:
        """Starts the time limit of the client to read what could not be sent."""
        super().pause_writing()
        self._send_timer = self.loop.call_later(self._limits.send_s, self.transport.abort)

    def resume_writing(self) -> None:
        """Cancels the time limit, since all has been sent."""
        super().resume_writing()
        self._send_timer = _cancelled(self._send_timer)

    def send_400_response(self, msg: str) -> None:
        """Rejects malformed HTTP, if a response can still be sent."""
        if self.cycle is not None:
            self.cycle.disconnected = True
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.close()
        if self.cycle is not None:
            self.cycle.message_event.set()

    @property
    def _between_requests(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _make_room(self) -> None:
        """Closes the connection that has been waiting longest, if there are too many."""
        connections = [
            other
            for other in self.connections
            if other is not self and not other.transport.is_closing()
        ]
        if len(connections) < self._limits.connections:
            return
        waiting = [
            other for other in connections if other._between_requests or other.cycle.more_body
        ]
        longest = min(waiting, key=lambda other: other._waiting_since, default=self)
        longest.transport.abort()


def _cancelled(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


class Server(uvicorn.Server):
    """Server of uvicorn over `Connection`; it installs no signal handlers."""

    def __init__(self, app, limits: ServeConfig, closing_s: float):
        """Creates the server without starting it; at its end, connections close in `closing_s`."""
        limits = _within_file_limit(limits)
        super().__init__(
            uvicorn.Config(
                app,
                http=functools.partial(Connection, limits=limits),
                h11_max_incomplete_event_size=MAX_HEAD_BYTES,
                backlog=_ACCEPTED_AT_ONCE,
                lifespan="off",
                log_config=None,
                log_level="critical",
                access_log=False,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=closing_s,
                ws="none",
            )
        )

    async def startup(self, sockets: Sequence[socket.socket] | None = None) -> None:
        """Starts to accept connections; asyncio takes as many at once as its backlog says."""
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(BACKLOG)

    def capture_signals(self) -> contextlib.AbstractContextManager:
        """Returns an empty context: `serving/server.py` handles the signals."""
        return contextlib.nullcontext()


def _within_file_limit(limits: ServeConfig) -> ServeConfig:
    """Raises the process's limit of open files as far as allowed, and fits `connections` to it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = limits.connections + _OTHER_FILES
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return limits
    soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return dataclasses.replace(limits, connections=max(1, soft - _OTHER_FILES))
