"""Client of a server that prefills; see `prefill_server`."""

import dataclasses
import queue
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from dflash import errors
from dflash.inference.engine import Engine
from dflash.inference.request import TokenLogprobs
from dflash.inference.roles import handover
from dflash.inference.roles.handover import Prefilled, Prefiller, PrefillOrder
from dflash.inference.roles.local import arrived
from dflash.parallel.frames import Channel

_RETRY_S = 0.5


class RemotePrefiller(Prefiller):
    """Connection to a server that prefills, which is opened again when it is lost.

    Orders are kept until their results arrive, and given again to a server that has come back. If
    none comes back in time, they fail, and so do further ones until there is a connection.
    """

    def __init__(
        self, address: tuple[str, int], engine: Engine, facts: Mapping[str, Any], patience_s: float
    ):
        """Connects to the server.

        Args:
          address: Host and port of the server.
          engine: Engine that decodes.
          facts: Facts about this process that must hold of the server too, by config key.
          patience_s: Time to wait for the server, at the start and after a loss, in seconds.
        Raises:
          ConfigError: The server cannot be reached, or it serves something else.
        """
        self._address, self._facts, self._patience_s = address, dict(facts), patience_s
        self._name = f"prefill server {address[0]}:{address[1]}"
        self._rows = handover.abstract_rows(engine)
        self._most_bytes = 2 * sum(one.size * one.dtype.itemsize for one in self._leaves)
        self._results: queue.SimpleQueue[Prefilled] = queue.SimpleQueue()
        self._lock = threading.Lock()  # Of the three fields below.
        self._orders: dict[int, PrefillOrder] = {}
        self._channel: Channel | None = None
        self._is_lost = False
        try:
            self._begin(self._connected(self._patience_s))
        except (errors.UserError, OSError) as error:
            raise errors.ConfigError(f"serve.prefill: {self._name}: {error}") from error
        threading.Thread(target=self._run, name="remote prefill", daemon=True).start()

    @property
    def _leaves(self) -> list[jax.ShapeDtypeStruct]:
        return jax.tree.leaves(self._rows)

    # --- called by the scheduler ----------------------------------------------------------------

    def order(self, order: PrefillOrder) -> None:
        """Sends an order; it fails at once if the server has been lost for long."""
        with self._lock:
            if self._is_lost:
                self._results.put(self._failed(order.id))
                return
            self._orders[order.id] = order
            if self._channel is not None:
                _post(self._channel, order)

    def cancel(self, id: int) -> None:
        """Drops an order."""
        with self._lock:
            if self._orders.pop(id, None) is not None and self._channel is not None:
                self._channel.post({"cancel": id})

    def results(self, wait_s: float) -> Sequence[Prefilled]:
        """Returns the results that have arrived."""
        return arrived(self._results, wait_s)

    # --- on the thread --------------------------------------------------------------------------

    def _run(self) -> None:
        """Receives results, and connects again after a loss."""
        while True:
            try:
                while True:
                    self._receive()
            except (errors.UserError, OSError) as error:
                self._lose(str(error))
            self._reconnect()

    def _receive(self) -> None:
        types = (Prefilled, TokenLogprobs)
        result, arrays = self._channel.receive(types, most_bytes=self._most_bytes)
        if not isinstance(result, Prefilled):
            raise errors.UserError("a frame is not a result; start both servers alike")
        rows = None
        if result.error is None:
            forms = [(array.dtype, array.ndim) for array in arrays]
            if forms != [(one.dtype, one.ndim) for one in self._leaves]:
                raise errors.UserError("its rows have other forms; start both servers alike")
            rows = jax.tree.unflatten(jax.tree.structure(self._rows), arrays)
        with self._lock:
            known = self._orders.pop(result.id, None) is not None
        if known:
            self._results.put(dataclasses.replace(result, rows=rows))

    def _lose(self, problem: str) -> None:
        with self._lock:
            channel, self._channel = self._channel, None
        channel.close()
        _say(f"{self._name}: {problem}; connecting again for {self._patience_s:g} s")

    def _reconnect(self) -> None:
        """Connects again, however long it takes; orders fail meanwhile if it takes too long."""
        while True:
            try:
                self._begin(self._connected(self._patience_s))
            except (errors.UserError, OSError) as error:
                problem = str(error)
            else:
                _say(f"{self._name}: connected again")
                return
            with self._lock:
                orders, self._orders = self._orders, {}
                first, self._is_lost = not self._is_lost, True
            for id in orders:
                self._results.put(self._failed(id))
            if first:
                _say(f"{self._name}: {problem}; requests fail until it is back")

    def _connected(self, patience_s: float) -> Channel:
        """Connects within a time, and compares facts.

        Raises:
          UserError: The server serves something else, or has another secret.
          OSError: There is no connection.
        """
        end = time.monotonic() + patience_s
        while True:
            try:
                channel = Channel(socket.create_connection(self._address, 10.0), accepts=False)
                break
            except OSError:
                if time.monotonic() > end:
                    raise
                time.sleep(_RETRY_S)
        try:
            channel.post(self._facts)
            handover.check_facts(self._facts, channel.receive()[0], "there")
        except (errors.UserError, OSError):
            channel.close()
            raise
        return channel

    def _begin(self, channel: Channel) -> None:
        with self._lock:
            self._channel, self._is_lost = channel, False
            for order in self._orders.values():
                _post(channel, order)

    def _failed(self, id: int) -> Prefilled:
        problem = f"the {self._name} cannot be reached; try again later"
        return Prefilled(id, error=problem, may_retry=True)


def _post(channel: Channel, order: PrefillOrder) -> None:
    arrays = () if order.allowed is None else (order.allowed,)
    channel.post(dataclasses.replace(order, allowed=None), arrays)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
