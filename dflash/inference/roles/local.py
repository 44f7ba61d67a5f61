"""Prefill by another engine of this process, on devices of its own."""

import queue
import threading
from collections.abc import Sequence

from dflash.inference.engine import Engine
from dflash.inference.roles.handover import Prefilled, Prefiller, PrefillOrder
from dflash.inference.roles.prefilling import PrefillScheduler


class LocalPrefiller(Prefiller):
    """Thread that runs an engine's prefills; leaving the context ends it.

    Rows stay on the devices of the engine until the decoding engine takes them.
    """

    def __init__(self, engine: Engine):
        """Starts the thread."""
        self._scheduler = PrefillScheduler(engine)
        # Orders, numbers of orders to cancel, and None to stop.
        self._commands: queue.SimpleQueue[PrefillOrder | int | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[Prefilled | BaseException] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="prefill", daemon=True)
        self._thread.start()

    def __enter__(self) -> "LocalPrefiller":
        return self

    def __exit__(self, *unused) -> None:
        self._commands.put(None)
        self._thread.join()

    def order(self, order: PrefillOrder) -> None:
        """Appends an order."""
        self._commands.put(order)

    def cancel(self, id: int) -> None:
        """Drops an order."""
        self._commands.put(id)

    def results(self, wait_s: float) -> Sequence[Prefilled]:
        """Returns the results that have arrived; raises the exception that ended the thread."""
        return arrived(self._results, wait_s)

    def _run(self) -> None:
        scheduler = self._scheduler
        try:
            while True:
                while scheduler.idle or not self._commands.empty():
                    command = self._commands.get()
                    if command is None:
                        return
                    if isinstance(command, PrefillOrder):
                        scheduler.submit(None, command)
                    else:
                        scheduler.cancel(None, command)
                for _, result in scheduler.step():
                    self._results.put(result)
        except BaseException as error:
            self._results.put(error)


def arrived(
    results: queue.SimpleQueue[Prefilled | BaseException], wait_s: float
) -> list[Prefilled]:
    """Returns all results in a queue, after waiting for the first one; raises exceptions in it."""
    found: list[Prefilled] = []
    while True:
        try:
            result = results.get(block=wait_s > 0 and not found, timeout=wait_s)
        except queue.Empty:
            return found
        if isinstance(result, BaseException):
            raise result
        found.append(result)
