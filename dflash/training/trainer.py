"""Training loop: steps, evaluations, checkpoints, and early or signaled stops."""

import collections
import contextlib
import dataclasses
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dflash import errors
from dflash.parallel.sharding import Sharding
from dflash.training import evaluation
from dflash.training import step as steps_lib
from dflash.training.checkpoints import Checkpoints
from dflash.training.report import TrainReport
from dflash.training.state import Params, TrainState

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopSignal:
    """Context manager that records SIGTERM and SIGINT; a second signal acts as without it.

    Several processes must stop after the same step. Each step therefore all-reduces (max) the
    number of the signal that a process has received, and every process reads the result together
    with the step's metrics. A signal to one process ends all of them within two steps.

    Attributes:
      received: Signal that stops this process. With several processes, it is set only once all of
        them know of it.
    """

    def __init__(self):
        self.received: signal.Signals | None = None
        self._own = 0  # Number of the signal that this process has received; 0 for none.
        self._before = {}

    def __enter__(self):
        for number in _SIGNALS:
            self._before[number] = signal.signal(number, self._receive)
        devices = Mesh(np.array(jax.devices()), ("device",))
        self._each = NamedSharding(devices, PartitionSpec("device"))
        self._largest = jax.jit(jnp.max, out_shardings=NamedSharding(devices, PartitionSpec()))
        return self

    def __exit__(self, *unused):
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def exit_status(self) -> int:
        """Exit status as shells report it, 128 + the signal's number; 0 without a signal."""
        return 0 if self.received is None else 128 + self.received

    def all_reduce(self) -> jax.Array | None:
        """Dispatches the all-reduce of the received signals; all processes call it at each step.

        Returns:
          Argument for `record`, int32 [], not waited for; None for a single process.
        """
        if jax.process_count() == 1:
            return None
        value = np.full(1, self._own, np.int32)
        shape = (jax.device_count(),)
        return self._largest(jax.make_array_from_callback(shape, self._each, lambda _: value))

    def record(self, signals: jax.Array | None) -> None:
        """Waits for the result of `all_reduce`, and records the signal if there is one."""
        number = 0 if signals is None else int(signals)
        if number:
            self.received = signal.Signals(number)

    def _receive(self, number: int, frame) -> None:
        self._own = number
        if jax.process_count() == 1:
            self.received = signal.Signals(number)
        signal.signal(number, self._before[number])


class BatchIterator(Protocol):
    """Endless iterator over batches of this process's rows."""

    def __next__(self) -> dict[str, np.ndarray]: ...

    def state(self) -> Any:
        """Returns the position of the next batch, as JSON values."""


@dataclasses.dataclass(frozen=True)
class LoopConfig:
    """Length and cadence of a run, from the config's `train` and `evaluation` groups.

    Attributes:
      evaluate_every: Steps between two evaluations; 0 disables evaluation.
      goal: Metric that selects the best checkpoint. "loss" is minimized, all others are maximized.
      evaluation: Fingerprint of the evaluation settings and data. Scores are comparable only if
        their fingerprints are equal.
      patience: Evaluations without a better score after which training ends; 0 disables early
        stopping.
    """

    steps: int
    rows: int
    log_every: int
    checkpoint_every: int
    evaluate_every: int
    goal: str
    evaluation: str
    patience: int = 0


@dataclasses.dataclass(frozen=True)
class StepFunctions:
    """Functions that the loop calls.

    Attributes:
      train: Maps (state, batch) to (state, metrics); see `make_train_step`.
      export: Takes (params, step) and writes the weights as a checkpoint for decoding.
    """

    train: Callable[[TrainState, steps_lib.Batch], tuple[TrainState, Mapping[str, Any]]]
    evaluate: Callable[[Params], Mapping[str, float]]
    export: Callable[[Params, int], None]


@dataclasses.dataclass(frozen=True)
class TrainOutcome:
    """Result of a training run.

    Attributes:
      best: {"goal", "evaluation", "step", "score"} of the best evaluation; None without any.
      exit_status: 0 for a complete run, else 128 + the number of the signal that stopped it.
      stalled: Early stopping ended the run before its last step.
    """

    state: TrainState
    step: int
    best: Mapping[str, Any] | None
    exit_status: int
    stalled: bool = False


@dataclasses.dataclass
class _Window:
    """Sums of metrics since the last log.

    Checkpoints include it, so that a resumed run logs the same means.
    """

    count: int = 0
    sums: dict[str, float] = dataclasses.field(default_factory=dict)
    last: dict[str, float] = dataclasses.field(default_factory=dict)

    def add(self, values: Mapping[str, float]) -> None:
        self.count += 1
        self.last = dict(values)
        for name, value in values.items():
            self.sums[name] = self.sums.get(name, 0.0) + value

    def means(self) -> dict[str, float]:
        """Returns the mean of each metric, loss first, and the last learning rate."""
        names = ["loss", *sorted(self.sums.keys() - {"loss", "learning_rate"})]
        means = {name: self.sums[name] / self.count for name in names}
        return means | {"learning_rate": self.last["learning_rate"]}


class TrainingError(errors.UserError):
    """Non-finite loss or gradient; the message names the step and the last good checkpoint."""


class Trainer:
    """Training loop, from a given state to the last step or a stop signal."""

    def __init__(
        self,
        config: LoopConfig,
        functions: StepFunctions,
        *,
        state: TrainState,
        step: int,
        batches: BatchIterator,
        sharding: Sharding,
        checkpoints: Checkpoints,
        metadata: Mapping[str, Any],
        report: TrainReport,
    ):
        """Prepares the loop; `run` donates `state`.

        Args:
          step: Number of steps already done in `state`.
          batches: Training batches, beginning with the one of the next step.
          metadata: JSON values to save with each state. For a resumed run, the metadata of the
            restored checkpoint.
        """
        self._config, self._functions = config, functions
        self._state, self._step = state, step
        self._batches, self._sharding = batches, sharding
        self._checkpoints, self._metadata, self._report = checkpoints, metadata, report
        self._stop = StopSignal()
        self._pending: collections.deque[tuple[int, Any, Any]] = collections.deque()
        self._measure = {"goal": config.goal, "evaluation": config.evaluation}
        best = metadata.get("best")
        self._best = best if best and self._measure.items() <= best.items() else None
        if best and not self._best:
            report.note(
                f"evaluation settings or data have changed: the best score, of step "
                f"{best['step']}, no longer counts"
            )
        self._window = _Window(**metadata.get("window", {}))
        # Keep only earlier evaluations whose scores are comparable with new ones.
        known = metadata.get("history", {"measure": self._measure, "entries": []})
        self._history = known["entries"] if known["measure"] == self._measure else []
        self._saved = step
        self._compiled = False

    def run(self) -> TrainOutcome:
        """Trains until the last step, a stop signal, or early stopping.

        Raises:
          TrainingError: A loss or gradient is non-finite.
          WorkdirError: The state cannot be saved.
        """
        config = self._config
        with self._stop as stop:
            while self._step < config.steps and stop.received is None and not self._stalled:
                self._advance()
                self._checkpoints.poll()
                if self._due(config.log_every):
                    self._log()
                evaluated = self._due(config.evaluate_every) and self._evaluate()
                if evaluated or self._due(config.checkpoint_every):
                    self._save()
            self._settle()
            if self._saved != self._step:
                self._save()
            with self._paused():
                self._checkpoints.wait()
            early = self._stalled and self._step < config.steps
            ended = early or self._step == config.steps
        status = 0 if ended else stop.exit_status
        return TrainOutcome(self._state, self._step, self._best, status, early)

    @property
    def _stalled(self) -> bool:
        return evaluation.has_stalled(self._history, self._config.patience)

    def _due(self, interval: int) -> bool:
        last = self._step == self._config.steps
        return bool(interval) and (last or self._step % interval == 0)

    def _advance(self) -> None:
        """Dispatches a step, then checks the previous one while the device is busy."""
        batch = steps_lib.place(next(self._batches), self._sharding, self._config.rows)
        self._state, metrics = self._functions.train(self._state, batch)
        self._step += 1
        self._pending.append((self._step, metrics, self._stop.all_reduce()))
        while len(self._pending) > 1:
            self._check_oldest()
        if not self._compiled:
            self._settle()
            self._report.start_clock(self._step)
            self._compiled = True
        self._report.step(self._step)

    def _check_oldest(self) -> None:
        """Checks the metrics of the oldest pending step and adds them to the window."""
        step, metrics, signals = self._pending.popleft()
        self._stop.record(signals)
        values = {name: float(value) for name, value in jax.device_get(metrics).items()}
        for name in ("loss", "grad_norm"):
            if not np.isfinite(values[name]):
                self._checkpoints.wait()
                good_step = self._checkpoints.good_step
                checkpoint = f"the last good checkpoint is that of step {good_step}"
                if good_step is None:
                    checkpoint = "there is no earlier checkpoint"
                raise TrainingError(
                    f"step {step}: {name.replace('_', ' ')} is {values[name]}; training has "
                    f"stopped, and {checkpoint}; try a lower optimizer.learning_rate in "
                    "another --workdir"
                )
        values.pop(steps_lib.WEIGHT)
        self._window.add(values)

    def _settle(self) -> None:
        while self._pending:
            self._check_oldest()

    def _log(self) -> None:
        self._settle()
        window, self._window = self._window, _Window()
        self._report.log(self._step, window.means())

    def _evaluate(self) -> bool:
        """Evaluates, exports the weights if they are the best so far, and returns if scored.

        An evaluation without a finite value of the goal metric has no score.
        """
        self._settle()
        self._report.evaluating(self._step)
        with self._paused() as clock:
            metrics = self._functions.evaluate(self._state.params)
            self._report.evaluation(self._step, metrics, clock())
            value = metrics.get(self._config.goal)
            if value is None or not np.isfinite(value):
                return False
            score = float(-value if self._config.goal == "loss" else value)
            self._history.append(evaluation.entry(self._step, score, metrics))
            self._history = self._history[-max(evaluation.KEPT, self._config.patience + 1) :]
            for warning in evaluation.warnings(self._history):
                self._report.note(f"step {self._step} · {warning}")
            if self._best is None or score > self._best["score"]:
                self._best = {**self._measure, "step": self._step, "score": score}
                self._functions.export(self._state.params, self._step)
        return True

    def _save(self) -> None:
        self._settle()
        with self._paused():
            metadata = {
                **self._metadata,
                "best": self._best,
                "history": {"measure": self._measure, "entries": self._history},
                "window": dataclasses.asdict(self._window),
                "data": self._batches.state(),
            }
            best = self._best["step"] if self._best else None
            self._checkpoints.save(self._step, self._state, metadata, best=best)
        self._saved = self._step

    @contextlib.contextmanager
    def _paused(self) -> Iterator[Callable[[], float]]:
        """Excludes a block's time from the step rate; yields a function of its seconds so far."""
        begin = time.perf_counter()
        yield lambda: time.perf_counter() - begin
        self._report.pause(time.perf_counter() - begin)
