"""Processes of a run, forked from this one: they start at once, since all is imported.

The process that forks them must not have touched a device.
"""

import dataclasses
import os
import pathlib
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable

from support import free_port

_CRASHED = 70
_LOOK_S = 0.02

# (address of the coordinator, number of processes, index of this one) -> exit status
Work = Callable[[tuple[str, int, int]], int]


@dataclasses.dataclass(frozen=True)
class End:
    """How a process has ended.

    Attributes:
      status: exit status; minus the number of a signal that has killed it.
      seconds: since all were started.
      lines: what it has written, stdout and stderr together.
    """

    status: int
    seconds: float
    lines: list[str]


class Forked:
    """Processes that run together.

    Attributes:
      ends: by process; None while it runs.
    """

    def __init__(self, work: Work, count: int, directory: pathlib.Path):
        """Starts them.

        Args:
          work: what each does.
          count: how many.
          directory: takes a file for what each of them writes.
        """
        self.ends: list[End | None] = [None] * count
        self._files = [directory / f"process.{process}" for process in range(count)]
        self._begin = time.monotonic()
        address = f"localhost:{free_port()}"
        self._running = {
            _fork(work, (address, count, process), self._files[process]): process
            for process in range(count)
        }

    @property
    def seconds(self) -> float:
        """Since they were started."""
        return time.monotonic() - self._begin

    def wait(self, seconds: float) -> bool:
        """Waits until all have ended, so long at most; returns whether they have."""
        end = time.monotonic() + seconds
        while self._running:
            child = self._look()
            if child is None:
                if time.monotonic() > end:
                    return False
                time.sleep(_LOOK_S)
        return True

    def kill(self, process: int) -> bool:
        """Kills one with signal 9; returns False if any has ended before."""
        while self._look() is not None:
            pass
        found = [child for child, index in self._running.items() if index == process]
        if not found or any(self.ends):
            return False
        os.kill(found[0], signal.SIGKILL)
        return True

    def close(self) -> None:
        """Kills all that still run."""
        for child in self._running:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        self._running.clear()

    def __enter__(self) -> "Forked":
        return self

    def __exit__(self, *unused):
        self.close()

    def _look(self) -> int | None:
        """Notes the end of a process, if one has ended; returns which."""
        for child, process in self._running.items():
            found, status = os.waitpid(child, os.WNOHANG)
            if found:
                del self._running[child]
                lines = self._files[process].read_text(errors="replace").splitlines()
                status = os.waitstatus_to_exitcode(status)
                self.ends[process] = End(status, self.seconds, lines)
                return process
        return None


def _fork(work: Work, given: tuple[str, int, int], file: pathlib.Path) -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of forks among threads: none of them holds a lock
        child = os.fork()
    if child:
        return child
    status = _CRASHED
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for stream, number in (("stdout", 1), ("stderr", 2)):
            os.dup2(descriptor, number)
            setattr(sys, stream, open(number, "w", buffering=1, closefd=False))  # noqa: SIM115
        status = work(given)
        _leave_the_others()
    except SystemExit as end:
        status = end.code or 0
        _leave_the_others()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def share_programs() -> None:
    """Lets one process compile for all; to be called before any starts.

    On CPUs, unlike elsewhere, jax's name of a program depends on the process.
    """
    import jax
    from jax._src import cache_key

    cache_key._hash_accelerator_config = lambda hash_obj, devices: None
    jax.config.update("jax_share_binary_between_hosts", True)


def _leave_the_others() -> None:
    """Ends what joins the processes, which a fork does not do by itself at its end."""
    import jax

    jax.distributed.shutdown()
