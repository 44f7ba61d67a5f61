"""Joins the processes of a multi-host run."""

import jax

from dflash import errors

AUTO = "auto"


def initialize(
    coordinator_address: str | None, num_processes: int | None, process_id: int | None
) -> None:
    """Joins this process to the others; does nothing when nothing is given.

    Must run before anything touches a device.

    Args:
      coordinator_address: "host:port" of process 0, or "auto" where the cluster itself tells each
        process its place (TPU pods, Slurm, Kubernetes and what else jax detects).
      num_processes: how many there are.
      process_id: which one this is, from 0.
    Raises:
      ConfigError: some of the three are missing, or do not fit together.
      UserError: the others cannot be reached, or no cluster is detected.
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
            f"{', '.join(missing)}: required, for {', '.join(given)} go together "
            f"(or --coordinator_address={AUTO} alone)"
        )
    _check(coordinator_address, num_processes, process_id)
    _join(coordinator_address, num_processes, process_id)


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
    try:
        jax.distributed.initialize(coordinator_address, num_processes, process_id)
    except (RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise errors.UserError(
            f"--coordinator_address={coordinator_address or AUTO}: cannot join: {reason}"
        ) from error
