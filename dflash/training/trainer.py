"""The loop: steps, evaluations, checkpoints, and an end that loses nothing."""

import collections
import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import jax
import numpy as np

from dflash import errors
from dflash.training import step as steps_lib
from dflash.training.checkpoints import Checkpoints
from dflash.training.report import Report
from dflash.training.signals import StopSignal
from dflash.training.state import Params, TrainState


class Batches(Protocol):
    """Batches of this process's rows, without end; `state` is where the next one begins."""

    def __next__(self) -> dict[str, np.ndarray]: ...

    def state(self) -> Any:
        """As JSON has it."""


@dataclasses.dataclass(frozen=True)
class Course:
    """How a run goes; see the config's `train` and `evaluation`.

    Attributes:
      steps: of the whole run.
      rows: of a batch, of all processes together.
      log_every: steps.
      checkpoint_every: steps.
      evaluate_every: steps; 0 for never.
      goal: the metric that makes a checkpoint the best; with "loss", less is better.
    """

    steps: int
    rows: int
    log_every: int
    checkpoint_every: int
    evaluate_every: int
    goal: str


@dataclasses.dataclass(frozen=True)
class Tools:
    """What the loop calls, and does not know.

    Attributes:
      step: (state, frozen, batch) -> state, metrics; see `make_train_step`.
      frozen: parameters that do not learn.
      evaluate: params -> metrics on what is held out.
      export: writes the weights of (params, step) for others to use.
    """

    step: Callable[[TrainState, Params, steps_lib.Batch], tuple[TrainState, Mapping[str, Any]]]
    frozen: Params
    evaluate: Callable[[Params], Mapping[str, float]]
    export: Callable[[Params, int], None]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
      state: the last.
      step: steps done.
      best: {"goal", "step", "score"} of the best evaluation, if there was any.
      exit_status: 0 when all steps are done, else 128 + the signal that asked to stop.
    """

    state: TrainState
    step: int
    best: Mapping[str, Any] | None
    exit_status: int


@dataclasses.dataclass
class _Window:
    """Metrics of the steps since the last log; saved along, so that a restart tells the same."""

    count: int = 0
    sums: dict[str, float] = dataclasses.field(default_factory=dict)
    last: dict[str, float] = dataclasses.field(default_factory=dict)

    def add(self, values: Mapping[str, float]) -> None:
        self.count += 1
        self.last = dict(values)
        for name, value in values.items():
            self.sums[name] = self.sums.get(name, 0.0) + value

    def means(self) -> dict[str, float]:
        """The loss first; the learning rate as it is now."""
        names = ["loss", *sorted(self.sums.keys() - {"loss", "learning_rate"})]
        means = {name: self.sums[name] / self.count for name in names}
        return means | {"learning_rate": self.last["learning_rate"]}


class TrainingError(errors.UserError):
    """The numbers have gone wrong; the message says at which step, and what is left."""


class Trainer:
    """One run of the loop, from wherever the state stands."""

    def __init__(
        self,
        course: Course,
        tools: Tools,
        *,
        state: TrainState,
        step: int,
        batches: Batches,
        sharding,
        checkpoints: Checkpoints,
        facts: Mapping[str, Any],
        report: Report,
    ):
        """Takes over `state`, which is donated.

        Args:
          course: how the run goes.
          tools: what the loop calls.
          state: to begin with.
          step: its number.
          batches: from that step on.
          sharding: where batches go.
          checkpoints: where states go.
          facts: are saved along; those of the checkpoint that `state` is of, if it is of one.
          report: is told everything.
        """
        self._course, self._tools = course, tools
        self._state, self._step = state, step
        self._batches, self._sharding = batches, sharding
        self._checkpoints, self._facts, self._report = checkpoints, facts, report
        self._pending: collections.deque[tuple[int, Any]] = collections.deque()
        best = facts.get("best")
        # What was best by another measure says nothing about this one.
        self._best = best if best and best["goal"] == course.goal else None
        self._window = _Window(**facts.get("window", {}))
        self._saved = step
        self._under_way = False

    def run(self) -> Outcome:
        """Goes on to the last step, or until a signal asks to stop.

        Raises:
          TrainingError: a loss or gradient is not a number.
          CheckpointError: the state cannot be saved.
        """
        course = self._course
        with StopSignal() as stop:
            while self._step < course.steps and not self._asked(stop):
                self._advance()
                self._checkpoints.poll()
                if self._due(course.log_every):
                    self._log()
                score = self._evaluate() if self._due(course.evaluate_every) else None
                if score is not None or self._due(course.checkpoint_every):
                    self._save(score)
            self._settle()
            if self._saved != self._step:
                self._save(None)
            with self._paused():
                self._checkpoints.wait()
            finished = self._step == course.steps
        return Outcome(self._state, self._step, self._best, 0 if finished else stop.exit_status)

    def _asked(self, stop: StopSignal) -> bool:
        # Several processes agree now and then only: it costs a round trip.
        together = jax.process_count() > 1 and self._step % self._course.log_every
        return not together and stop.agreed()

    def _due(self, every: int) -> bool:
        last = self._step == self._course.steps
        return bool(every) and (last or self._step % every == 0)

    def _advance(self) -> None:
        """Dispatches a step, and looks at the one before it while the device is busy."""
        batch = steps_lib.place(next(self._batches), self._sharding, self._course.rows)
        self._state, metrics = self._tools.step(self._state, self._tools.frozen, batch)
        self._step += 1
        self._pending.append((self._step, metrics))
        while len(self._pending) > 1:
            self._take()
        if not self._under_way:
            self._settle()
            self._report.start_clock(self._step)
            self._under_way = True
        self._report.step(self._step)

    def _take(self) -> None:
        """Looks at the oldest step that nobody has looked at."""
        step, metrics = self._pending.popleft()
        values = {name: float(value) for name, value in jax.device_get(metrics).items()}
        for name in ("loss", "grad_norm"):
            if not np.isfinite(values[name]):
                self._checkpoints.wait()
                kept = self._checkpoints.good_step
                left = f"the last good checkpoint is of step {kept}"
                if kept is None:
                    left = "nothing was saved before"
                raise TrainingError(
                    f"step {step}: {name.replace('_', ' ')} is {values[name]}; stopped, and "
                    f"{left}; a lower optimizer.learning_rate may help, in another --workdir"
                )
        values.pop(steps_lib.WEIGHT)
        self._window.add(values)

    def _settle(self) -> None:
        """Waits until every dispatched step is known to be good."""
        while self._pending:
            self._take()

    def _log(self) -> None:
        self._settle()
        window, self._window = self._window, _Window()
        self._report.log(self._step, window.means())

    def _evaluate(self) -> float | None:
        """Evaluates; exports the weights if they are the best so far. Returns the score."""
        self._settle()
        with self._paused() as clock:
            metrics = self._tools.evaluate(self._state.params)
            self._report.evaluation(self._step, metrics, clock())
            value = metrics.get(self._course.goal)
            if value is None or not np.isfinite(value):
                return None
            score = -value if self._course.goal == "loss" else value
            if self._best is None or score > self._best["score"]:
                self._best = {
                    "goal": self._course.goal,
                    "step": self._step,
                    "score": float(score),
                }
                self._tools.export(self._state.params, self._step)
        return float(score)

    def _save(self, score: float | None) -> None:
        self._settle()
        with self._paused():
            facts = {
                **self._facts,
                "best": self._best,
                "window": dataclasses.asdict(self._window),
                "data": self._batches.state(),
            }
            self._checkpoints.save(self._step, self._state, facts, score=score)
        self._saved = self._step

    @contextlib.contextmanager
    def _paused(self) -> Iterator[Callable[[], float]]:
        """Keeps the block's time out of the speed of the steps; yields a clock, in seconds."""
        begin = time.perf_counter()
        yield lambda: time.perf_counter() - begin
        self._report.pause(time.perf_counter() - begin)
