"""Commands that run as several processes: joining, comparing arguments, and exiting together."""

import contextlib
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax

from dflash import errors
from dflash.config import loader
from dflash.parallel import agreement, distributed, host
from dflash.parallel.agreement import Failure, ProcessGroup
from dflash.runs import outputs

_FAILED = 1
_STATUS = re.compile(r"(UNKNOWN|UNAVAILABLE|INTERNAL|ABORTED|DEADLINE_EXCEEDED|CANCELLED): ")
_MAX_CHARACTERS = 300  # Characters of a failure other than a UserError.


def run(join_arguments: Sequence[Any], work: Callable[[ProcessGroup], int]) -> int:
    """Joins the other processes and does the work; if one fails, all exit with its status."""
    host.quiet_without_tpu()
    _keep_stdout_for_results()
    distributed.initialize(*join_arguments)
    group = agreement.ProcessGroup(_say_failure)
    try:
        # Raise on SIGTERM, so that the other processes stop too. Training installs its own handler.
        signal.signal(signal.SIGTERM, _terminate)
        status = work(group)
        sys.stdout.flush()
    except BaseException as error:
        group.leave(*_failure_of(error))
    group.close()
    return status


def check_alike(group: ProcessGroup, command: str, config: Any) -> None:
    """Raises if versions, command, config or devices differ between processes.

    Raises:
      ConfigError: Raised on all processes; it names the first process that differs, and the value.
    """
    values = dict(loader.flatten(loader.to_dict(config)))
    group.check_same({"command": command, **outputs.versions(), **values})
    # Compare devices last: processes with other versions may fail before they see devices.
    group.check_same({"devices of a process": jax.local_device_count()})


def _failure_of(error: BaseException) -> tuple[int, tuple[str, ...]]:
    """Returns the exit status and the lines for an exception that ends a process."""
    if isinstance(error, errors.UserError):
        return error.exit_status, tuple(str(error).splitlines())
    if isinstance(error, KeyboardInterrupt):
        return errors.INTERRUPTED, ("interrupted",)
    if isinstance(error, BrokenPipeError):
        return errors.BROKEN_PIPE, ("the reader of stdout has closed it",)
    if isinstance(error, SystemExit):
        return error.code, ("stopped by SIGTERM",)
    # A collective fails like this if another process was killed.
    reason = " ".join(str(error).split())
    if isinstance(error, jax.errors.JaxRuntimeError) or _STATUS.match(reason):
        line = f"a computation of all processes failed; one of them may be gone: {reason}"
    else:
        traceback.print_exception(error)
        line = f"{type(error).__name__}: {reason}"
    return _FAILED, (errors.shorten(line, _MAX_CHARACTERS),)


def _say_failure(failure: Failure) -> None:
    shown_cursor = "\x1b[?25h" if sys.stderr.isatty() else ""  # A display may have hidden it.
    for line in failure.lines:
        print(f"{shown_cursor}error: process {failure.process}: {line}", file=sys.stderr)
    sys.stderr.flush()
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()


def _terminate(number: int, frame: object) -> NoReturn:
    raise SystemExit(128 + number)


def _keep_stdout_for_results() -> None:
    """Redirects file descriptor 1 to /dev/null and keeps `sys.stdout` for results.

    Gloo, which connects the processes, prints to the file descriptor from native code.
    """
    try:
        is_descriptor = sys.stdout.fileno() == 1
    except OSError:  # Notebooks and tests may have no file descriptor.
        is_descriptor = False
    if is_descriptor:
        sys.stdout.flush()
        encoding, errors_, line = sys.stdout.encoding, sys.stdout.errors, sys.stdout.line_buffering
        results, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.close(nowhere)
        buffering = 1 if line else -1
        sys.stdout = open(results, "w", buffering, encoding=encoding, errors=errors_)  # noqa: SIM115
