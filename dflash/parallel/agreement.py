"""Agreement of several processes: a value or failure of one of them becomes known to all.

Values travel through the key-value store of JAX's coordination service, which needs no device. So
processes can agree while their devices are busy, or before they have any.

The service authenticates nobody. With the same secret in the environment of all processes
(DFLASH_RUN_SECRET), each message is signed, so that nobody else can take a process's place.
"""

import contextlib
import dataclasses
import hmac
import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax

from dflash import errors
from dflash.parallel import jax_internals, messages

Result = TypeVar("Result")

SECRET = "DFLASH_RUN_SECRET"  # environment variable
_SIGNATURE_BYTES = 64  # hexadecimal digits of a SHA-256
_ROOT = "dflash"
_FAILURE = f"{_ROOT}/failure"
_LEAVING = f"{_ROOT}/leaving"
# Long waits are safe, because a failure of another process ends this one meanwhile.
_NO_TIMEOUT_MS = 7 * 24 * 3600 * 1000
_POLL_S = 1.0  # interval at which a process checks whether another one has failed
_LEAVE_TIMEOUT_MS = 5000  # time that a leaving process waits for the others


def gather(name: str, value: Any) -> list[Any]:
    """Returns every process's value, ordered by process index; all processes must call this.

    Args:
      name: Name of the exchange, the same on all processes; it may be used repeatedly.
      value: This process's value, of the types that `messages.encode` accepts.
    Raises:
      UserError: The message of a process cannot be decoded.
    """
    if jax.process_count() == 1:
        return [value]
    return _gather(name, value, jax_internals.coordination())


def barrier(name: str) -> None:
    """Returns once every process has called it with this name; at once for a single process."""
    gather(name, None)


def run_first_process_first(name: str, function: Callable[[], Result]) -> Result:
    """Calls a function on every process, and completes process 0's call before the others begin.

    Files that process 0 writes are then there for the others, if they share the directory.
    """
    if jax.process_index() == 0:
        result = function()
        barrier(name)
        return result
    barrier(name)
    return function()


def check_same(name: str, value: Any) -> None:
    """Raises if a value differs between processes.

    Args:
      value: This process's value; compared with `==`.
    Raises:
      InputError: On all processes; names the first process that differs from process 0.
    """
    first, *later = gather(f"same {name}", value)
    for process, other in enumerate(later, start=1):
        if other != first:
            raise errors.InputError(
                f"{name}: {_difference(first, other, process)}; give all processes the same files"
            )


@dataclasses.dataclass(frozen=True)
class Failure:
    """The failure that ended a run of several processes.

    Attributes:
      process: Index of the process that failed first.
      status: Exit status of all processes.
    """

    process: int
    status: int
    lines: tuple[str, ...]


class ProcessGroup:
    """The processes of a run, which end together: when one fails, all others exit too.

    While the group is open, a thread of every process watches for a failure of another one. The
    thread prints the message and ends its process, whatever the process is waiting for: a
    collective that another process will never enter cannot be interrupted in any other way.
    """

    def __init__(self, report: Callable[[Failure], None]):
        """Opens the group; `jax.distributed` must be initialized."""
        self._coordination = jax_internals.coordination()
        self.process, self._client = self._coordination.process, self._coordination.client
        self._report = report
        self._closing = threading.Lock()  # its holder decides how the process ends
        self._closed = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="group", daemon=True)
        self._watcher.start()

    def check_same(self, facts: Mapping[str, Any]) -> None:
        """Raises if processes were started differently; needs no device.

        Args:
          facts: Values that must be equal on all processes, by the name to print.
        Raises:
          ConfigError: Names the first process that differs from process 0, and the value.
        """
        first, *later = _gather("start", dict(facts), self._coordination)
        for process, other in enumerate(later, start=1):
            for key in {**first, **other}:
                if first.get(key) != other.get(key):
                    difference = _difference(first.get(key), other.get(key), process)
                    raise errors.ConfigError(
                        f"{key}: {difference}; start all processes of a run alike"
                    )

    def leave(self, status: int, lines: tuple[str, ...]) -> None:
        """Announces that this process has failed, and ends it with all others; never returns.

        If several processes fail, all of them report the first failure.
        """
        self._closing.acquire()
        failure = Failure(self.process, status, lines)
        # Setting the key raises if another process has reported its failure before.
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            message = json.dumps(dataclasses.asdict(failure)).encode()
            self._client.key_value_set(_FAILURE, _signed(_FAILURE, message).decode())
        try:
            first = self._client.blocking_key_value_get(_FAILURE, _LEAVE_TIMEOUT_MS)
        except jax.errors.JaxRuntimeError:  # the process that hosts the store is gone
            self._end(failure)
        self._end(_parse_failure(first))

    def close(self) -> None:
        """Closes the group after a successful run; this process then ends by itself."""
        self._closing.acquire()
        self._closed.set()
        self._watcher.join()  # no thread may be inside JAX when Python exits

    def _watch(self) -> None:
        while not self._closed.wait(_POLL_S):
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # the key does not exist yet
                text = self._client.key_value_try_get(_FAILURE)
                if self._closing.acquire(blocking=False):
                    self._end(_parse_failure(text))
                return

    def _end(self, failure: Failure) -> None:
        """Reports the failure, waits until the other processes know it, and exits."""
        self._report(failure)
        # A process that exited before the others know would make them fail at its absence instead.
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            self._client.wait_at_barrier(_LEAVING, _LEAVE_TIMEOUT_MS)
        if self.process == 0:
            time.sleep(0.5)  # it hosts the store, at which the others still wait
        os._exit(failure.status)  # a normal exit would wait for devices and for the others


def _gather(name: str, value: Any, coordination: jax_internals.Coordination) -> list[Any]:
    client, process = coordination.client, coordination.process
    number = client.key_value_increment(f"{_ROOT}/count/{name}/{process}", 1)
    prefix = f"{_ROOT}/value/{name}/{number}"
    key = f"{prefix}/{process}"
    client.key_value_set_bytes(key, _signed(key, messages.encode(value)))
    client.wait_at_barrier(f"{_ROOT}/wait/{name}/{number}", _NO_TIMEOUT_MS)
    values = []
    for index in range(coordination.num_processes):
        key = f"{prefix}/{index}"
        message = _verified(key, client.blocking_key_value_get_bytes(key, _NO_TIMEOUT_MS))
        if message is None:
            raise errors.UserError(
                f"process {index}: its message {name!r} is not signed with this run's secret; set "
                f"the same {SECRET} for all processes"
            )
        try:
            values.append(messages.decode(message))
        except ValueError as error:
            raise errors.UserError(
                f"process {index}: its message {name!r} cannot be decoded: {error}; start all "
                "processes with the same version of dflash"
            ) from error
    return values


def _signed(key: str, message: bytes) -> bytes:
    """Returns a message with its signature, which no other key has."""
    secret = os.environ.get(SECRET, "").encode()
    return hmac.new(secret, f"{key}\n".encode() + message, "sha256").hexdigest().encode() + message


def _verified(key: str, signed: bytes) -> bytes | None:
    """Returns the message of `_signed`; None if another secret or none has signed it."""
    message = signed[_SIGNATURE_BYTES:]
    return message if hmac.compare_digest(_signed(key, message), signed) else None


def _parse_failure(text: str) -> Failure:
    try:
        fields = json.loads(_verified(_FAILURE, text.encode()) or b"")
        return Failure(int(fields["process"]), int(fields["status"]), tuple(fields["lines"]))
    except (ValueError, TypeError, LookupError):
        return Failure(0, errors.UserError.exit_status, ("the reported failure is not readable",))


def _difference(first: Any, other: Any, process: int) -> str:
    there, here = errors.shorten(repr(other), 80), errors.shorten(repr(first), 80)
    return f"{there} in process {process}, {here} in process 0"
