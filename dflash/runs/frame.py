"""Frame of every run: its work directory, its display and a profiler trace."""

import contextlib
import os
from collections.abc import Iterator

import jax

from dflash.runs.directory import RunDirectory
from dflash.runs.display import Display


def open_display(*, stream: bool = False) -> Display:
    """Returns the display of this process, which is silent on all processes but the first."""
    return Display(stream=stream) if jax.process_index() == 0 else Display.silent()


@contextlib.contextmanager
def open_run(
    directory: RunDirectory, *, profile_dir: str | os.PathLike | None = None
) -> Iterator[Display]:
    """Holds a work directory while a run writes to it, and yields the run's display."""
    trace = jax.profiler.trace(profile_dir) if profile_dir else contextlib.nullcontext()
    with directory, contextlib.closing(open_display()) as display, trace:
        yield display
