"""Rendering of chat templates in a separate process with limits on time and memory.

A process renders for this one as long as it lives. A template that exceeds a limit ends it, and the
next rendering starts another.
"""

import atexit
import contextlib
import datetime
import functools
import json
import os
import subprocess
import threading
from collections.abc import Mapping
from typing import Any

from dflash import errors
from dflash.text import limited_process

SECONDS = 1  # processor time per rendering; a conversation of a million characters takes 0.02 s
MAX_BYTES = 2**30
_PROGRAM = "dflash.text.template_sandbox"  # not imported here, since importing jinja2 takes time


def render(source: str, date: datetime.date, variables: Mapping[str, Any]) -> str:
    """Renders a template.

    Args:
      source: Text of the template.
      date: Date that the template may print.
      variables: Variables of the template; values of JSON's types.
    Raises:
      InputError: The template fails or exceeds a limit, or a variable has another type.
      UserError: The process ended for a reason that does not lie in the template.
    """
    try:
        line = json.dumps([source, date.isoformat(), variables])
    except (TypeError, ValueError, RecursionError) as error:
        raise errors.InputError(f"{type(error).__name__}: {error}") from error
    # A forked process needs another one, since both would read from the same pipe.
    answer = _renderer(os.getpid()).render(line.encode())
    if "error" in answer:
        raise errors.InputError(answer["error"])
    return answer["text"]


@functools.cache
def _renderer(process_id: int) -> "_Renderer":
    return _Renderer()


class _Renderer:
    """Process that renders templates."""

    def __init__(self):
        """Prepares the process, which starts with the first rendering."""
        self._lock = threading.Lock()
        self._process: subprocess.Popen | None = None
        atexit.register(self._end)

    def render(self, line: bytes) -> Mapping[str, str]:
        """Sends one rendering, and returns the answer; raises like the function `render`."""
        with self._lock:
            try:
                answer = self._ask(line)
            except BrokenPipeError:
                answer = b""
            except OSError as error:
                raise errors.UserError(f"no process renders: {error.strerror or error}") from error
            except BaseException:  # the answer that was not read must not answer another rendering
                self._process.kill()
                self._end()
                raise
            if answer.endswith(b"\n"):
                return json.loads(answer)
            status = self._end()
        limit = limited_process.exceeded(status, SECONDS, MAX_BYTES)
        if limit is None:
            raise errors.UserError(f"the process that renders ended with {status}; try again")
        raise errors.InputError(f"takes {limit}")

    def _ask(self, line: bytes) -> bytes:
        """Returns the line of the answer; incomplete if the process has ended."""
        if self._process is None or self._process.poll() is not None:
            self._end()
            self._process = limited_process.start(_PROGRAM)
        self._process.stdin.write(line + b"\n")
        self._process.stdin.flush()
        return self._process.stdout.readline()

    def _end(self) -> int:
        """Ends the process, and returns its exit status; does nothing if it has not started."""
        if self._process is None:
            return 0
        process, self._process = self._process, None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        status = process.wait()
        process.stdout.close()
        return status
