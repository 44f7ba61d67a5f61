"""Server that prefills for servers that decode: `dflash serve CONFIG serve.role=prefill`.

It has no HTTP endpoints: servers with serve.role=decode connect to it and give it orders.
"""

import contextlib
import dataclasses
import queue
import socket
import sys
import threading
from collections.abc import Callable

import jax

from dflash import errors
from dflash.inference.request import Request, RequestSampling
from dflash.inference.roles import handover
from dflash.inference.roles.handover import Prefilled, PrefillOrder
from dflash.inference.roles.prefilling import PrefillScheduler
from dflash.parallel import frames
from dflash.parallel.frames import Channel
from dflash.serving import server
from dflash.serving.backend import DRAFTED, Backend

# An order, the number of an order to cancel, or None for all orders of the channel.
_Command = tuple[Channel, PrefillOrder | int | None]


class _Stopped(Exception):
    """A signal has requested the end."""


def listen(host: str, port: int) -> socket.socket:
    """Opens the listening socket.

    Raises:
      ConfigError: The address is invalid, in use, or reaches other machines without a secret.
    """
    frames.check_exposed(host, "--host")
    return server.listen(host, port)


def run(backend: Backend, listener: socket.socket, *, on_ready: Callable[[str], None]) -> int:
    """Prefills until SIGTERM or SIGINT.

    Args:
      backend: Engine that prefills.
      listener: Listening socket.
      on_ready: Function that is called with "host:port" once orders are taken.
    Returns:
      Exit status: 0 after SIGTERM, 130 after SIGINT.
    Raises:
      UserError: The engine cannot start.
    """
    prefilling = _PrefillServer(backend, listener)
    with server.stop_signals(prefilling.stop) as status, contextlib.suppress(_Stopped):
        prefilling.run(on_ready)
    return status()


class _PrefillServer:
    """The engine on the main thread, and one thread for each connection."""

    def __init__(self, backend: Backend, listener: socket.socket):
        self._backend, self._listener = backend, listener
        self._commands: queue.SimpleQueue[_Command | None] = queue.SimpleQueue()
        self._stopping = False

    def stop(self) -> None:
        self._stopping = True
        self._commands.put(None)

    def run(self, on_ready: Callable[[str], None]) -> None:
        engine = self._backend.start(self._go_on)[DRAFTED]
        self._facts = self._backend.facts(engine)
        scheduler = PrefillScheduler(engine)
        threading.Thread(target=self._accept, name="accept", daemon=True).start()
        host, port = self._listener.getsockname()[:2]
        on_ready(f"{host}:{port}")
        while True:
            while scheduler.idle or not self._commands.empty():
                self._execute(scheduler, self._commands.get())
            for channel, result in scheduler.step():
                _answer(channel, result)

    def _go_on(self) -> None:
        if self._stopping:
            raise _Stopped

    def _execute(self, scheduler: PrefillScheduler, command: _Command | None) -> None:
        self._go_on()
        if command is None:
            return
        channel, what = command
        if isinstance(what, PrefillOrder):
            scheduler.submit(channel, what)
        else:
            scheduler.cancel(channel, what)

    # --- connections ----------------------------------------------------------------------------

    def _accept(self) -> None:
        while True:
            connection, address = self._listener.accept()
            arguments = connection, f"{address[0]}:{address[1]}"
            threading.Thread(target=self._serve, args=arguments, daemon=True).start()

    def _serve(self, connection: socket.socket, name: str) -> None:
        """Reads the orders of one server until its connection ends."""
        channel = None
        try:
            channel = Channel(connection, accepts=True)
            channel.post(self._facts)
            handover.check_facts(self._facts, channel.receive()[0], "there")
            print(f"decode server {name}: connected", file=sys.stderr, flush=True)
            while True:
                self._commands.put((channel, _read(channel)))
        except (errors.UserError, OSError) as error:
            print(f"decode server {name}: {error}", file=sys.stderr, flush=True)
        finally:
            if channel is not None:
                channel.close()
                self._commands.put((channel, None))


def _read(channel: Channel) -> PrefillOrder | int:
    """Returns the next order of a server, or the number of one to cancel."""
    types = PrefillOrder, Request, RequestSampling
    value, arrays = channel.receive(types, most_bytes=2**24)
    if isinstance(value, dict) and isinstance(value.get("cancel"), int):
        return value["cancel"]
    if not isinstance(value, PrefillOrder):
        raise errors.UserError("a frame is no order; start both servers alike")
    (allowed,) = arrays or (None,)
    return PrefillOrder(value.id, value.request, value.output_ids, allowed)


def _answer(channel: Channel, result: Prefilled) -> None:
    """Sends a result; the thread of the channel reads its rows from the device."""
    channel.post(dataclasses.replace(result, rows=None), jax.tree.leaves(result.rows))
