"""Output of a training run: progress bar or plain lines, metrics.jsonl, and TensorBoard."""

import contextlib
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


class TrainReport(contextlib.AbstractContextManager):
    """Progress display and metrics files of a run; only process 0 has output."""

    def __init__(
        self,
        directory: pathlib.Path | None,
        *,
        steps: int,
        first_step: int,
        tokens_per_step: int,
        evaluate_every: int = 0,
        stderr: TextIO | None = None,
    ):
        """Opens the files and the bar, and removes metrics of steps after `first_step`.

        A resumed run logs those steps again.

        Args:
          directory: Work directory; None disables all output.
          evaluate_every: Steps between evaluations, whose time counts; 0 without any.
        Raises:
          WorkdirError: The directory cannot be written.
        """
        self._silent = directory is None
        self._steps, self._tokens_per_step = steps, tokens_per_step
        self._opened = time.perf_counter()
        self._mark = (first_step, self._opened)
        self._rate: float | None = None  # Smoothed seconds per step.
        self._paused_s = 0.0
        self._evaluate_every, self._evaluated = evaluate_every, first_step
        self._evaluation_s: float | None = None  # Seconds of the last evaluation.
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
        """Excludes the time so far from the step rate, since the first step compiles."""
        self._mark, self._paused_s = (step, time.perf_counter()), 0.0

    def step(self, step: int) -> None:
        """Shows that a step is done, and the time left."""
        if self._bar is None:
            return
        since, then = self._mark
        rate = self._rate
        if rate is None and step > since:  # Nothing has been logged yet.
            rate = (time.perf_counter() - then - self._paused_s) / (step - since)
        fields = {} if rate is None else {"left": self._time_left(step, rate)}
        self._bar.update(self._task, completed=step, **fields)

    def evaluating(self, step: int) -> None:
        """Shows that an evaluation begins."""
        if self._bar is None:
            self.note(f"step {step} · evaluating")
        else:
            self._bar.update(self._task, metrics="evaluating")

    def log(self, step: int, metrics: Metrics) -> None:
        """Reports mean metrics of the steps since the last call."""
        since, then = self._mark
        now = time.perf_counter()
        self._mark = (step, now)
        seconds, self._paused_s = now - then - self._paused_s, 0.0
        if step == since:  # Only the first step is logged; use the time since the start.
            since, seconds = since - 1, now - self._opened
        rate = max(seconds, 1e-9) / (step - since)
        self._rate = rate if self._rate is None else 0.7 * self._rate + 0.3 * rate
        tokens_per_second = self._tokens_per_step / rate
        shown = describe(metrics)
        speed = f"{tokens_per_second:,.0f} tokens/s"
        eta = self._time_left(step, self._rate)
        if self._bar is not None:
            # A line of 80 characters has no room for the learning rate, which the files hold.
            shown = describe({k: v for k, v in metrics.items() if k != "learning_rate"})
            self._bar.update(self._task, completed=step, metrics=f"{shown} · {speed}", left=eta)
        else:
            self.note(f"step {step}/{self._steps} · {shown} · {speed} · {eta} left")
        self._write("train", step, {**metrics, "tokens_per_second": tokens_per_second})

    def evaluation(self, step: int, metrics: Metrics, seconds: float) -> None:
        """Reports the results of an evaluation that took `seconds`."""
        self._evaluated, self._evaluation_s = step, seconds
        self.note(f"step {step} · held out: {describe(metrics)} · {seconds:.1f} s")
        self._write("evaluation", step, {**metrics, "seconds": seconds})

    def pause(self, seconds: float) -> None:
        """Excludes `seconds` from the step rate, as time not spent on steps."""
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

    def __exit__(self, *unused):
        self.close()

    def _time_left(self, step: int, rate: float) -> str:
        """Returns the time of the remaining steps and evaluations.

        A plus sign follows it while the time of an evaluation is unknown.
        """
        interval, evaluations = self._evaluate_every, 0
        if interval and self._evaluated < self._steps:
            evaluations = self._steps // interval - self._evaluated // interval
            evaluations += self._steps % interval > 0  # The last step is always evaluated.
        seconds = rate * (self._steps - step) + evaluations * (self._evaluation_s or 0.0)
        unknown = "+" if evaluations and self._evaluation_s is None else ""
        return f"{datetime.timedelta(seconds=round(seconds))}{unknown}"

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
    """Returns the most important metrics as one line.

    Some losses are sums over a block, so the loss per token is shown where a drafter reports it.
    """
    forms = {
        "token_loss" if "token_loss" in metrics else "loss": "loss {:.4f}",
        "speedup_bound": "expected speed-up below {:.2f}",
        "learning_rate": "lr {:.2e}",
    }
    for name in metrics:
        if name.partition("/")[0] == "tau":
            forms[name] = name.replace("tau", "τ") + " {:.2f}"
    return " · ".join(forms[name].format(x) for name, x in metrics.items() if name in forms)


def _make_bar(console: rich.console.Console) -> rich.progress.Progress:
    column = rich.table.Column(no_wrap=True, min_width=9)
    return rich.progress.Progress(
        rich.progress.TextColumn("{task.completed:.0f}/{task.total:.0f}", table_column=column),
        rich.progress.BarColumn(bar_width=8),
        rich.progress.TextColumn("{task.fields[metrics]}", markup=False),
        rich.progress.TextColumn("{task.fields[left]} left"),
        console=console,
    )


def _cut(path: pathlib.Path, last_step: int) -> None:
    """Removes metrics of later steps, and a line that a killed run left incomplete."""
    if not path.exists():
        return
    lines = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            fields: Any = json.loads(line)
            if fields["step"] <= last_step:
                lines.append(line + "\n")
        except (ValueError, TypeError, KeyError):
            continue
    files.write_whole(path, "".join(lines))


def _tensorboard(directory: pathlib.Path, first_step: int):
    import tensorboardX
    from tensorboardX import record_writer

    with files.explained(directory):
        if paths.in_bucket(directory):
            scheme, _, _ = str(directory).partition(":")
            record_writer.register_writer_factory(scheme, _BucketEvents())
        return tensorboardX.SummaryWriter(str(directory), purge_step=first_step + 1)


class _BucketEvents:
    """File factory for tensorboardX in a bucket, without its per-store libraries."""

    def directory_check(self, path: str) -> None:
        """Does nothing, since a bucket has no directories."""

    def open(self, path: str) -> "_Events":
        return _Events(paths.to_path(path))


class _Events:
    def __init__(self, path: pathlib.Path):
        self._file = growing.open_file(path)
        self.write, self.close = self._file.append, self._file.close

    def flush(self) -> None:
        """Does nothing, since the growing file is written at intervals."""


def _finite(value: float) -> float | None:
    """Returns the value, or None if it is non-finite, since JSON has no NaN."""
    value = float(value)
    return value if math.isfinite(value) else None
