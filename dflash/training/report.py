"""Output of a training run: a progress bar or plain lines, metrics.jsonl, and TensorBoard."""

import datetime
import json
import math
import os
import pathlib
import sys
import time
from collections.abc import Mapping
from typing import Any, TextIO

import rich.console
import rich.progress
import rich.table
import rich.text

from dflash.storage import files, growing, paths
from dflash.training import rundir

Metrics = Mapping[str, float]


class TrainReport:
    """Shows the progress of a run and writes its metrics; only process 0 has output."""

    def __init__(
        self,
        directory: pathlib.Path | None,
        *,
        steps: int,
        first_step: int,
        tokens_per_step: int,
        stderr: TextIO | None = None,
    ):
        """Removes lines about steps after `first_step`, which will be logged again.

        Args:
          directory: work directory; None to write and show nothing.
          steps: total optimizer steps.
          first_step: number of steps already done.
          tokens_per_step: tokens in all rows of a batch.
          stderr: stream to show lines on; None for the standard one.
        Raises:
          WorkdirError: the directory cannot be written.
        """
        self._silent = directory is None
        self._steps, self._tokens_per_step = steps, tokens_per_step
        self._opened = time.perf_counter()
        self._mark = (first_step, self._opened)
        self._rate: float | None = None  # seconds per step
        self._paused_s = 0.0
        stream = open(os.devnull, "w") if self._silent else stderr or sys.stderr  # noqa: SIM115
        self._console = rich.console.Console(file=stream, highlight=False, markup=False)
        self._bar = None
        if not self._silent:
            self._path = directory / rundir.METRICS
            with files.explained(self._path):
                _cut(self._path, first_step)
                self._metrics = growing.open_file(self._path)
            self._board = _tensorboard(directory / rundir.TENSORBOARD, first_step)
            if self._console.is_terminal:
                self._bar = _make_bar(self._console)
                self._task = self._bar.add_task(
                    "", total=steps, completed=first_step, metrics="compiling", left="?"
                )
                self._bar.start()

    def start_clock(self, step: int) -> None:
        """Excludes the time until now from the step rate: the first step compiles."""
        self._mark, self._paused_s = (step, time.perf_counter()), 0.0

    def step(self, step: int) -> None:
        """Shows that a step is done."""
        if self._bar is not None:
            self._bar.update(self._task, completed=step)

    def log(self, step: int, metrics: Metrics) -> None:
        """Reports mean metrics of the steps since the last call.

        Raises:
          WorkdirError: they cannot be written.
        """
        since, then = self._mark
        now = time.perf_counter()
        self._mark = (step, now)
        seconds, self._paused_s = now - then - self._paused_s, 0.0
        if step == since:  # the first step was logged alone
            since, seconds = since - 1, now - self._opened
        rate = max(seconds, 1e-9) / (step - since)
        self._rate = rate if self._rate is None else 0.7 * self._rate + 0.3 * rate
        tokens_per_second = self._tokens_per_step / rate
        shown = describe(metrics)
        speed = f"{tokens_per_second:,.0f} tokens/s"
        eta = datetime.timedelta(seconds=round(self._rate * (self._steps - step)))
        if self._bar is not None:
            # Lines of 80 characters have no room for the learning rate; the files have it.
            shown = describe({k: v for k, v in metrics.items() if k != "learning_rate"})
            self._bar.update(self._task, completed=step, metrics=f"{shown} · {speed}", left=eta)
        else:
            self.note(f"step {step}/{self._steps} · {shown} · {speed} · {eta} left")
        self._write("train", step, {**metrics, "tokens_per_second": tokens_per_second})

    def evaluation(self, step: int, metrics: Metrics, seconds: float) -> None:
        """Reports the results of an evaluation, which took `seconds`.

        Raises:
          WorkdirError: they cannot be written.
        """
        self.note(f"step {step} · held out: {describe(metrics)} · {seconds:.1f} s")
        self._write("evaluation", step, {**metrics, "seconds": seconds})

    def pause(self, seconds: float) -> None:
        """Excludes time from the step rate that was not spent on steps."""
        self._paused_s += seconds

    def note(self, message: str) -> None:
        """Shows one line."""
        self._console.print(rich.text.Text(message), soft_wrap=True)

    def close(self) -> None:
        """Stops the bar and closes the files."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        if self._silent:
            return
        with files.explained(self._path):
            self._metrics.close()
        if self._board is not None:
            self._board.close()

    def __enter__(self):
        return self

    def __exit__(self, *unused):
        self.close()

    def _write(self, kind: str, step: int, metrics: Metrics) -> None:
        if self._silent:
            return
        values = {name: _finite(value) for name, value in metrics.items()}
        with files.explained(self._path):
            line = json.dumps({"kind": kind, "step": step, **values}) + "\n"
            self._metrics.append(line.encode())
        if self._board is not None:
            with files.explained(self._path.parent / rundir.TENSORBOARD):
                for name, value in metrics.items():
                    self._board.add_scalar(f"{kind}/{name}", value, step)


def describe(metrics: Metrics) -> str:
    """The most important metrics, in one line."""
    shown = []
    for name, value in metrics.items():
        if name == "loss":
            shown.append(f"loss {value:.4f}")
        elif name == "acceptance_length":
            shown.append(f"expected τ {value:.2f}")
        elif name.partition("/")[0] == "tau":
            shown.append(f"{name.replace('tau', 'τ')} {value:.2f}")
        elif name == "speedup_bound":
            shown.append(f"expected speed-up below {value:.2f}")
        elif name == "learning_rate":
            shown.append(f"lr {value:.2e}")
    return " · ".join(shown)


def _make_bar(console: rich.console.Console) -> rich.progress.Progress:
    whole = rich.table.Column(no_wrap=True, min_width=9)
    return rich.progress.Progress(
        rich.progress.TextColumn("{task.completed:.0f}/{task.total:.0f}", table_column=whole),
        rich.progress.BarColumn(bar_width=8),
        rich.progress.TextColumn("{task.fields[metrics]}", markup=False),
        rich.progress.TextColumn("{task.fields[left]} left"),
        console=console,
    )


def _cut(path: pathlib.Path, last_step: int) -> None:
    """Removes lines about later steps, and a line that a kill cut short."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            fields: Any = json.loads(line)
            if fields["step"] <= last_step:
                kept.append(line + "\n")
        except (ValueError, TypeError, KeyError):
            continue
    files.write_whole(path, "".join(kept))


def _tensorboard(directory: pathlib.Path, first_step: int):
    """A writer of TensorBoard events; TensorBoard then ignores earlier events of later steps."""
    import tensorboardX
    from tensorboardX import record_writer

    with files.explained(directory):
        if paths.in_bucket(directory):
            scheme, _, _ = str(directory).partition(":")
            record_writer.register_writer_factory(scheme, _BucketEvents())
        return tensorboardX.SummaryWriter(str(directory), purge_step=first_step + 1)


class _BucketEvents:
    """How tensorboardX opens its files in a bucket: its own ways need a library for each store."""

    def directory_check(self, path: str) -> None:
        """Nothing to do: a bucket has no directories."""

    def open(self, path: str) -> "_Events":
        return _Events(paths.to_path(path))


class _Events:
    """A file of events."""

    def __init__(self, path: pathlib.Path):
        self._file = growing.open_file(path)
        self.write, self.close = self._file.append, self._file.close

    def flush(self) -> None:
        """Nothing to do: the object is written at intervals."""


def _finite(value: float) -> float | None:
    """The value, or None if it is not finite: JSON has no NaN."""
    value = float(value)
    return value if math.isfinite(value) else None
