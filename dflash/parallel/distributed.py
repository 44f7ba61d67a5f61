"""Joins the processes of a multi-host run."""

import os
import pickle
import sys
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np

from dflash import errors

Made = TypeVar("Made")

AUTO = "auto"
_MESSAGE_BYTES = 4096  # of what one process tells all others at once
_SIZE_BYTES = 8
_PATIENCE_S = 300  # for which a process waits for the others at the start
_HEARTBEAT_S = 15  # after which a process that is not heard of counts as dead, and all others leave


def initialize(
    coordinator_address: str | None, num_processes: int | None, process_id: int | None
) -> None:
    """Joins this process to the others; does nothing if no argument is given.

    Must run before anything touches a device.

    Args:
      coordinator_address: "host:port" of process 0, or "auto" where jax detects the cluster (TPU
        pods, Slurm, Kubernetes, …).
      num_processes: number of processes.
      process_id: index of this process, from 0.
    Raises:
      ConfigError: some of the three are missing or inconsistent.
      UserError: no cluster is detected, or jax refuses. If the other processes cannot be reached,
        this one ends with a line that says so.
    """
    given = {
        "--coordinator_address": coordinator_address,
        "--num_processes": num_processes,
        "--process_id": process_id,
    }
    if all(value is None for value in given.values()):
        return
    if coordinator_address == AUTO:
        _join(None, num_processes, process_id)
        return
    missing = [flag for flag, value in given.items() if value is None]
    if missing:
        raise errors.ConfigError(
            f"{', '.join(missing)}: required: {', '.join(given)} go together "
            f"(or --coordinator_address={AUTO} alone)"
        )
    _check(coordinator_address, num_processes, process_id)
    _join(coordinator_address, num_processes, process_id)


def from_first(value: Any) -> Any:
    """The first process's value, on all processes; others' values do not count.

    It travels pickled, among processes that run one program. It waits for what the devices do.

    Args:
      value: anything that can be pickled.
    """
    if jax.process_count() == 1:
        return value
    from jax.experimental import multihost_utils

    encoded = pickle.dumps(value)
    # Few sizes, since each is a program: most values fit into the first message.
    first = np.zeros(_MESSAGE_BYTES, np.uint8)
    head = len(encoded).to_bytes(_SIZE_BYTES, "little") + encoded[: _MESSAGE_BYTES - _SIZE_BYTES]
    first[: len(head)] = np.frombuffer(head, np.uint8)
    first = multihost_utils.broadcast_one_to_all(first).tobytes()
    size = int.from_bytes(first[:_SIZE_BYTES], "little")
    found = first[_SIZE_BYTES : _SIZE_BYTES + size]
    if len(found) < size:
        missing = size - len(found)
        rest = np.zeros(1 << (missing - 1).bit_length(), np.uint8)
        mine = np.frombuffer(encoded[len(found) : size], np.uint8)[:missing]
        rest[: len(mine)] = mine
        found += multihost_utils.broadcast_one_to_all(rest).tobytes()[:missing]
    return pickle.loads(found)


def made_by_first(make: Callable[[], Made]) -> Made:
    """What the first process makes, on all processes; the others make nothing."""
    return from_first(make() if jax.process_index() == 0 else None)


def _check(coordinator_address: str, num_processes: int, process_id: int) -> None:
    host, _, port = coordinator_address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise errors.ConfigError(
            f"--coordinator_address: expected host:port or {AUTO}, got {coordinator_address!r}"
        )
    if num_processes < 1:
        raise errors.ConfigError(f"--num_processes: expected 1 or more, got {num_processes}")
    if not 0 <= process_id < num_processes:
        raise errors.ConfigError(
            f"--process_id: expected 0 to {num_processes - 1} with "
            f"--num_processes={num_processes}, got {process_id}"
        )


def _join(coordinator_address: str | None, num_processes, process_id) -> None:
    # jax would abort with a stack trace at the end of its own patience.
    given_up = threading.Timer(_PATIENCE_S, _give_up, (coordinator_address or AUTO,))
    given_up.daemon = True
    given_up.start()
    # On CPUs two programs without a common array may run in another order in another process, and
    # each then waits in a collective for the other. So they run as they are called.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    try:
        jax.distributed.initialize(
            coordinator_address,
            num_processes,
            process_id,
            initialization_timeout=2 * _PATIENCE_S,
            heartbeat_timeout_seconds=_HEARTBEAT_S,
        )
    except (RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise errors.UserError(
            f"--coordinator_address={coordinator_address or AUTO}: cannot join: {reason}"
        ) from error
    finally:
        given_up.cancel()


def _give_up(address: str) -> None:
    """Ends a process that waits for others, which nothing can interrupt."""
    print(
        f"error: --coordinator_address={address}: not all processes have joined within "
        f"{_PATIENCE_S} s: start all of them, and see that every host can reach this address",
        file=sys.stderr,
        flush=True,
    )
    os._exit(errors.UserError.exit_status)
