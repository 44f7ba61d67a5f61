"""Agree, then act: what one of several processes finds or fails at, all of them know.

Values travel through the key-value store of jax's coordination service, which needs no device. So
processes can agree while their devices are busy, or before they have any.
"""

import contextlib
import dataclasses
import json
import os
import pickle
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
from jax._src import distributed as _jax_distributed  # jax shows the store to nobody else

from dflash import errors

Done = TypeVar("Done")

_ROOT = "dflash"
_FAILURE = f"{_ROOT}/failure"
_LEAVING = f"{_ROOT}/leaving"
_FOR_EVER_MS = 7 * 24 * 3600 * 1000  # a failure in the meantime is announced
_LOOK_S = 1.0  # between two looks whether another process has failed
_FAREWELL_MS = 5000  # for which a process that leaves waits for the others


def from_all(name: str, value: Any) -> list[Any]:
    """Every process's value, in the order of processes; all call this at the same place.

    Args:
      name: of the question; it may be asked any number of times.
      value: anything that can be pickled.
    """
    if jax.process_count() == 1:
        return [value]
    return _ask_all(name, value, jax.process_index(), jax.process_count())


def wait_for_all(name: str) -> None:
    """Returns once every process has called it with this name; at once where there is only one."""
    from_all(name, None)


def first_alone(name: str, do: Callable[[], Done]) -> Done:
    """Does something on every process, on the first one before it begins on the others.

    So the first one leaves files where others find them, if they see the same directory.
    """
    if jax.process_index() == 0:
        done = do()
        wait_for_all(name)
        return done
    wait_for_all(name)
    return do()


def check_same(what: str, value: Any) -> None:
    """Refuses a value that differs between processes.

    Args:
      what: the name of the value, for the message.
      value: this process's; compared with `==`.
    Raises:
      InputError: on all processes; it names the first one that differs from process 0.
    """
    first, *others = from_all(f"same {what}", value)
    for process, other in enumerate(others, start=1):
        if other != first:
            raise errors.InputError(
                f"{what}: {_difference(first, other, process)}; give all processes the same files"
            )


@dataclasses.dataclass(frozen=True)
class Failure:
    """What ended a run of several processes.

    Attributes:
      process: the first process that failed.
      status: exit status of all.
      lines: what it was, for the terminal.
    """

    process: int
    status: int
    lines: tuple[str, ...]


class ProcessGroup:
    """The processes of a run, which leave together: one that fails takes all others with it.

    While it is open, a thread of every process waits for the news of a failure. It prints the lines
    and ends its process, whatever that is waiting for: a collective that another process will
    never enter cannot be interrupted in another way.

    Attributes:
      process: index of this process.
    """

    def __init__(self, say: Callable[[Failure], None]):
        """Opens it; the processes have joined.

        Args:
          say: prints a failure.
        """
        state = _jax_distributed.global_state
        self.process, self._client = state.process_id, state.client
        self._count = state.num_processes
        self._say = say
        self._closing = threading.Lock()  # its holder decides how the process ends
        self._closed = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="group", daemon=True)
        self._watcher.start()

    def check_same(self, facts: Mapping[str, Any]) -> None:
        """Refuses processes that were started with other facts; needs no device.

        Raises:
          UserError: names the first process that differs from process 0, and in what.
        """
        first, *others = _ask_all("start", dict(facts), self.process, self._count)
        for process, other in enumerate(others, start=1):
            for key in {**first, **other}:
                if first.get(key) != other.get(key):
                    found = _difference(first.get(key), other.get(key), process)
                    raise errors.ConfigError(f"{key}: {found}; start all processes of a run alike")

    def leave(self, status: int, lines: tuple[str, ...]) -> None:
        """Announces that this process has failed, and ends it with all others; never returns.

        Of several failures the first counts, on every process.
        """
        self._closing.acquire()
        mine = Failure(self.process, status, lines)
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # another one was first
            self._client.key_value_set(_FAILURE, json.dumps(dataclasses.asdict(mine)))
        try:
            first = self._client.blocking_key_value_get(_FAILURE, _FAREWELL_MS)
        except jax.errors.JaxRuntimeError:  # the process that keeps the store is gone
            self._end(mine)
        self._end(_read(first))

    def close(self) -> None:
        """The run has ended well: this process ends by itself."""
        self._closing.acquire()
        self._closed.set()
        self._watcher.join()  # a thread must not be within jax when Python ends

    def _watch(self) -> None:
        while not self._closed.wait(_LOOK_S):
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # there is no such key
                text = self._client.key_value_try_get(_FAILURE)
                if self._closing.acquire(blocking=False):
                    self._end(_read(text))
                return

    def _end(self, failure: Failure) -> None:
        """Prints, waits until all others know too, and ends the process."""
        self._say(failure)
        # If one went before the others know, they would fail at its absence instead.
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            self._client.wait_at_barrier(_LEAVING, _FAREWELL_MS)
        if self.process == 0:
            time.sleep(0.5)  # it keeps the store, in which the others wait
        os._exit(failure.status)  # a normal end would wait for devices, and for the others


def _ask_all(name: str, value: Any, process: int, count: int) -> list[Any]:
    client = _jax_distributed.global_state.client
    number = client.key_value_increment(f"{_ROOT}/count/{name}/{process}", 1)
    place = f"{_ROOT}/value/{name}/{number}"
    client.key_value_set_bytes(f"{place}/{process}", pickle.dumps(value))
    client.wait_at_barrier(f"{_ROOT}/wait/{name}/{number}", _FOR_EVER_MS)
    found = [
        client.blocking_key_value_get_bytes(f"{place}/{i}", _FOR_EVER_MS) for i in range(count)
    ]
    return [pickle.loads(one) for one in found]


def _read(text: str) -> Failure:
    values = json.loads(text)
    return Failure(values["process"], values["status"], tuple(values["lines"]))


def _difference(first: Any, other: Any, process: int) -> str:
    there, here = errors.shorten(repr(other), 80), errors.shorten(repr(first), 80)
    return f"{there} in process {process}, {here} in process 0"
