"""Joins the processes of a multi-host run, and broadcasts values of process 0 to the others."""

import contextlib
import os
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import numpy as np

from dflash import errors
from dflash.parallel import messages

Result = TypeVar("Result")

AUTO = "auto"
_BIND_ADDRESS = "JAX_COORDINATOR_BIND_ADDRESS"  # environment variable of JAX
_MESSAGE_BYTES = 4096  # size of the first message of a broadcast
_SIZE_BYTES = 8
_JOIN_TIMEOUT_S = 300  # time that a process waits for the others at the start
_HEARTBEAT_S = 15  # a process that is silent for longer counts as dead, and all others leave


def initialize(
    coordinator_address: str | None, num_processes: int | None, process_id: int | None
) -> None:
    """Joins this process to the others; does nothing if no argument is given.

    Must be called before any device is used.

    Args:
      coordinator_address: "host:port" of process 0, at which alone it listens, or "auto" where JAX
        detects the cluster (TPU pods, Slurm, Kubernetes, …); then it listens on all interfaces.
      process_id: Index of this process, from 0.
    Raises:
      ConfigError: Some of the three are missing or inconsistent.
      UserError: No cluster is detected, or JAX cannot join. If the other processes cannot be
        reached in time, this process prints an error and exits.
    """
    flags = {
        "--coordinator_address": coordinator_address,
        "--num_processes": num_processes,
        "--process_id": process_id,
    }
    if all(value is None for value in flags.values()):
        return
    if coordinator_address == AUTO:
        _join(None, num_processes, process_id)
        return
    missing = [flag for flag, value in flags.items() if value is None]
    if missing:
        raise errors.ConfigError(
            f"{', '.join(missing)}: required: {', '.join(flags)} go together "
            f"(or --coordinator_address={AUTO} alone)"
        )
    _check(coordinator_address, num_processes, process_id)
    _join(coordinator_address, num_processes, process_id)


def broadcast(value: Any, types: Sequence[type] = ()) -> Any:
    """Returns process 0's value on all processes; the arguments of the others are ignored.

    It is a collective on devices, so it waits for the programs that run there.

    Args:
      value: Value of the types that `messages.encode` accepts.
      types: Dataclasses that it may contain.
    Raises:
      UserError: The message of process 0 cannot be decoded.
    """
    if jax.process_count() == 1:
        return value
    from jax.experimental import multihost_utils

    encoded = messages.encode(value)
    # Each size compiles a program, so there are few of them: most values fit into one message.
    first = np.zeros(_MESSAGE_BYTES, np.uint8)
    head = len(encoded).to_bytes(_SIZE_BYTES, "little") + encoded[: _MESSAGE_BYTES - _SIZE_BYTES]
    first[: len(head)] = np.frombuffer(head, np.uint8)
    first = multihost_utils.broadcast_one_to_all(first).tobytes()
    size = int.from_bytes(first[:_SIZE_BYTES], "little")
    received = first[_SIZE_BYTES : _SIZE_BYTES + size]
    if len(received) < size:
        missing = size - len(received)
        second = np.zeros(1 << (missing - 1).bit_length(), np.uint8)
        rest = np.frombuffer(encoded[len(received) : size], np.uint8)[:missing]
        second[: len(rest)] = rest
        received += multihost_utils.broadcast_one_to_all(second).tobytes()[:missing]
    try:
        return messages.decode(received, types)
    except ValueError as error:
        raise errors.UserError(
            f"process 0: its broadcast cannot be decoded: {error}; start all processes with the "
            "same version of dflash"
        ) from error


def compute_on_first(function: Callable[[], Result], types: Sequence[type] = ()) -> Result:
    """Calls `function` on process 0 only, and returns its result on all; see `broadcast`."""
    return broadcast(function() if jax.process_index() == 0 else None, types)


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
    # JAX's own timeout aborts the process with a stack trace.
    timer = threading.Timer(_JOIN_TIMEOUT_S, _exit_unjoined, (coordinator_address or AUTO,))
    timer.daemon = True
    timer.start()
    # With asynchronous dispatch on CPUs, two programs that share no array may run in a different
    # order in each process, and then deadlock in their collectives.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    try:
        jax.distributed.initialize(
            coordinator_address,
            num_processes,
            process_id,
            initialization_timeout=2 * _JOIN_TIMEOUT_S,
            heartbeat_timeout_seconds=_HEARTBEAT_S,
            coordinator_bind_address=_bind_address(coordinator_address, process_id),
        )
    except (RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise errors.UserError(
            f"--coordinator_address={coordinator_address or AUTO}: cannot join: {reason}"
        ) from error
    finally:
        timer.cancel()


def _bind_address(coordinator_address: str | None, process_id: int | None) -> str | None:
    """Returns the address at which process 0 listens; None for all interfaces.

    A name may stand for an address of another machine that forwards to this one, such as a service
    of Kubernetes. JAX's own environment variable goes before both.
    """
    if process_id or coordinator_address is None or _BIND_ADDRESS in os.environ:
        return None
    host = coordinator_address.rpartition(":")[0].strip("[]")
    with contextlib.suppress(OSError):
        for family, kind, _, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
            with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
                probe.bind(address)
                return coordinator_address
    print(
        f"--coordinator_address={coordinator_address}: not an address of this machine, so process "
        f"0 listens on all interfaces; {_BIND_ADDRESS} names another address",
        file=sys.stderr,
        flush=True,
    )
    return None


def _exit_unjoined(address: str) -> None:
    print(
        f"error: --coordinator_address={address}: not all processes have joined within "
        f"{_JOIN_TIMEOUT_S} s: start all of them, and check that every host can reach this address",
        file=sys.stderr,
        flush=True,
    )
    os._exit(errors.UserError.exit_status)
