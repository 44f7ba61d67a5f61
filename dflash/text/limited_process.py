"""Separate processes with limits on processor time and memory, for work on untrusted input.

Unlike a thread, a process can be stopped whatever it does. Processor time is limited instead of
wall-clock time, which depends on the load of the machine.
"""

import math
import signal
import subprocess
import sys
import time

OUT_OF_MEMORY = 3  # Exit status of a process that has caught a MemoryError.
_OUT_OF_TIME = -signal.SIGXCPU if hasattr(signal, "SIGXCPU") else None
# Signals that end native code when it runs out of memory or stack.
_CRASHED = (-signal.SIGABRT, -signal.SIGSEGV)


def start(module: str) -> subprocess.Popen:
    """Starts a Python process that calls `main()` of a module, with pipes to stdin and stdout.

    The process ignores the environment, and finds modules where this process does.

    Raises:
      OSError: The system starts no process.
    """
    program = (
        f"import importlib, sys; sys.path[:] = {[*map(str, sys.path)]!r}; "
        f"importlib.import_module({module!r}).main()"
    )
    return subprocess.Popen(
        [sys.executable, "-I", "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C concerns this process, which ends the other one
    )


def limit_memory(max_bytes: int) -> None:
    """Limits the address space of this process."""
    _limit("RLIMIT_AS", max_bytes)


def limit_time(seconds: int) -> None:
    """Lets this process use `seconds` more of processor time, rounded up to whole seconds."""
    _limit("RLIMIT_CPU", math.ceil(time.process_time()) + seconds)


def exceeded(status: int, seconds: int, max_bytes: int) -> str | None:
    """Returns the limit that ended a process, such as "more than 1 s"; None for another reason.

    Args:
      status: Return code of the process.
      seconds: Limit of its processor time.
      max_bytes: Limit of its memory.
    """
    if status == _OUT_OF_TIME:
        return f"more than {seconds} s"
    if status == OUT_OF_MEMORY or status in _CRASHED:
        return f"more than {max_bytes >> 20} MiB"
    return None


def _limit(name: str, value: int) -> None:
    """Sets a limit; the hard limit stays, so that the soft one may be raised again."""
    try:
        import resource
    except ImportError:  # not available on Windows
        return
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, hard = resource.getrlimit(getattr(resource, name))
    if hard != resource.RLIM_INFINITY:
        value = min(value, hard)
    resource.setrlimit(getattr(resource, name), (value, hard))
