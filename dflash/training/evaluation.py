"""Evaluation of a run: held-out loss and, for drafters, mean acceptance length (τ).

Forecasts, warnings and early stopping follow from the history of evaluations. Each entry holds a
step, a score (greater is better) and metrics.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax

from dflash import errors
from dflash.config import loader
from dflash.training import state as states
from dflash.training import step as steps_lib
from dflash.training.state import Params
from dflash.training.train_job import DraftingTest, TrainJob

Entry = Mapping[str, Any]

KEPT = 32  # Number of evaluations that a checkpoint stores.
_WINDOW = 4  # Number of latest evaluations that are compared with each other.
_FALL, _RISE = 0.01, 0.01  # Smallest relative changes that count as a falling loss or a rising τ.


def entry(step: int, score: float, metrics: Mapping[str, float]) -> Entry:
    """Returns an evaluation as an entry of the history, in JSON values."""
    chosen = {name: float(metrics[name]) for name in ("loss", "tau") if name in metrics}
    return {"step": step, "score": score, "metrics": chosen}


def forecast(metrics: Mapping[str, float], weights_ratio: float | None) -> dict[str, float]:
    """Returns an upper bound of the speed-up that decoding with the evaluated weights can reach.

    It is the speed-up at batch size 1 if reading weights took all the time: τ over the ratio. Empty
    without a drafter or without τ.

    Args:
      weights_ratio: Bytes of weights read per decode cycle over bytes read per token of plain
        decoding; None if no drafter is trained.
    """
    if weights_ratio is None or "tau" not in metrics:
        return {}
    return {"speedup_bound": metrics["tau"] / weights_ratio}


def has_stalled(history: Sequence[Entry], patience: int) -> bool:
    """Returns whether the last `patience` evaluations brought no better score; never for 0."""
    if not patience or len(history) <= patience:
        return False
    scores = [entry["score"] for entry in history]
    return max(scores[-patience:]) <= max(scores[:-patience])


def warnings(history: Sequence[Entry]) -> list[str]:
    """Returns warnings about contradictions in the latest evaluations, as sentences."""
    window = history[-_WINDOW:]
    if len(window) < _WINDOW:
        return []
    first, last = window[0]["metrics"], window[-1]["metrics"]
    if not {"loss", "tau"} <= first.keys() & last.keys():
        return []
    falls = last["loss"] < (1 - _FALL) * first["loss"]
    rises = max(entry["metrics"]["tau"] for entry in window[1:]) > (1 + _RISE) * first["tau"]
    if not falls or rises:
        return []
    return [
        f"the held-out loss falls ({first['loss']:.3f} to {last['loss']:.3f} since step "
        f"{window[0]['step']}), but τ does not rise ({first['tau']:.2f} to {last['tau']:.2f}): "
        "the loss does not train what gets accepted; later draft positions may have too much "
        "weight, the target may not have generated the answers, or training and decoding may use "
        "different templates or precision"
    ]


class Evaluation:
    """Callable that maps parameters to metrics on held-out data and compiles its programs once."""

    def __init__(self, job: TrainJob, frozen: Params, drafting_test: DraftingTest | None):
        self._job, self._frozen, self._drafting_test = job, frozen, drafting_test
        # Read the data before the first step, so that unusable data fail at once.
        self._rows, self._held_out = _held_out_batches(job)
        self._step = steps_lib.make_evaluation_step(
            job.task.loss, dtype=job.task.dtype, sharding=job.sharding
        )

    @property
    def goal(self) -> str:
        """Metric that selects the best weights: "tau" if it is measured, else "loss"."""
        return "loss" if self._drafting_test is None else "tau"

    @property
    def measures_something(self) -> bool:
        """Returns whether a call returns any metrics."""
        return bool(self._held_out) or self._drafting_test is not None

    @property
    def fingerprint(self) -> str:
        """Hash of everything that the metrics depend on, except the weights."""
        settings = loader.non_defaults(self._job.config.evaluation)
        settings.pop("every", None)
        prompts = {} if self._drafting_test is None else self._job.held_out_prompts
        return loader.digest([settings, self._rows, prompts])

    def __call__(self, params: Params) -> dict[str, float]:
        metrics = self._held_out_loss(params) if self._held_out else {}
        if self._drafting_test is not None:
            metrics |= self._drafting_test(optax.tree.cast(params, self._job.task.dtype))
        return metrics | forecast(metrics, self._job.task.weights_ratio)

    def _held_out_loss(self, params: Params) -> dict[str, float]:
        job = self._job
        totals: dict[str, float] = {}
        total_weight = 0.0
        for number, arrays in enumerate(self._held_out):
            batch = steps_lib.place(arrays, job.sharding, self._rows)
            key = jax.random.fold_in(states.step_key_base(0), number)
            values = jax.device_get(self._step(params, self._frozen, batch, key))
            weight = float(values.pop(steps_lib.WEIGHT))
            total_weight += weight
            for name, value in values.items():
                totals[name] = totals.get(name, 0.0) + weight * float(value)
        return {name: total / max(total_weight, 1e-9) for name, total in totals.items()}


def _held_out_batches(job: TrainJob) -> tuple[int, list[dict[str, np.ndarray]]]:
    """Returns the number of rows per held-out batch, and the batches.

    A held-out batch has at most as many rows as a microbatch in training.
    """
    config = job.config
    num_batches = config.evaluation.batches
    if not num_batches:
        return 0, []
    replicas = job.sharding.size("batch")
    held_out = job.held_out_rows
    if held_out.num_rows < replicas:
        raise errors.InputError(
            f"data.held_out_percent: {config.data.held_out_percent:g} leaves "
            f"{held_out.num_rows} rows of {config.data.length} tokens for validation, but "
            f"each of {replicas} devices needs one: raise it, or set evaluation.batches=0"
        )
    microbatch_rows = config.train.batch_size // config.optimizer.accumulate_steps
    rows = min(microbatch_rows, held_out.num_rows) // replicas * replicas
    source = job.batches(held_out, batch_size=rows)
    return rows, [next(source) for _ in range(num_batches)]
