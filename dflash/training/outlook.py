"""Forecasts, warnings and early stopping from the history of a run's evaluations.

An entry of the history holds an evaluation's step, its score (greater is better) and its metrics.
"""

from collections.abc import Mapping, Sequence
from typing import Any

Entry = Mapping[str, Any]

KEPT = 32  # Number of evaluations that a checkpoint stores.
_WINDOW = 4  # Number of latest evaluations that are compared with each other.
_FALL, _RISE = 0.01, 0.01  # Smallest relative changes that count as a falling loss or a rising τ.
_APART = 0.3  # Largest relative difference between measured and expected τ without a warning.


def entry(step: int, score: float, metrics: Mapping[str, float]) -> Entry:
    """Returns an evaluation as an entry of the history, in JSON values."""
    names = "loss", "tau", "acceptance_length"
    kept = {name: float(metrics[name]) for name in names if name in metrics}
    return {"step": step, "score": score, "metrics": kept}


def forecast(metrics: Mapping[str, float], weights_ratio: float | None) -> dict[str, float]:
    """Returns an upper bound of the speed-up that decoding with the evaluated weights can reach.

    Args:
      weights_ratio: Bytes of weights read per decode cycle over bytes read per token of plain
        decoding; None if no drafter is trained.
    Returns:
      {"speedup_bound": mean acceptance length (τ), measured if possible, else expected, over the
      ratio}. It is the speed-up at batch size 1 if reading weights took all the time, so the real
      one is smaller. Empty without a drafter or without τ.
    """
    tau = metrics.get("tau", metrics.get("acceptance_length"))
    if weights_ratio is None or tau is None:
        return {}
    return {"speedup_bound": tau / weights_ratio}


def has_stalled(history: Sequence[Entry], patience: int) -> bool:
    """Returns whether the last `patience` evaluations brought no better score; never for 0."""
    if not patience or len(history) <= patience:
        return False
    scores = [entry["score"] for entry in history]
    return max(scores[-patience:]) <= max(scores[:-patience])


def warnings(history: Sequence[Entry]) -> list[str]:
    """Returns warnings about contradictions in the latest evaluations, as sentences."""
    if not history or "tau" not in history[-1]["metrics"]:
        return []
    return [*_loss_without_tau(history[-_WINDOW:]), *_unexpected(history[-1]["metrics"])]


def _loss_without_tau(window: Sequence[Entry]) -> list[str]:
    first, last = window[0]["metrics"], window[-1]["metrics"]
    if len(window) < _WINDOW or not {"loss", "tau"} <= first.keys() & last.keys():
        return []
    falls = last["loss"] < (1 - _FALL) * first["loss"]
    rises = max(entry["metrics"]["tau"] for entry in window[1:]) > (1 + _RISE) * first["tau"]
    if not falls or rises:
        return []
    return [
        f"the held-out loss falls ({first['loss']:.3f} to {last['loss']:.3f} since step "
        f"{window[0]['step']}), but τ does not rise ({first['tau']:.2f} to {last['tau']:.2f}): "
        "the loss does not train what gets accepted; later draft positions may have too much "
        "weight, or the target may not have generated the answers"
    ]


def _unexpected(metrics: Mapping[str, float]) -> list[str]:
    tau, expected = metrics["tau"], metrics.get("acceptance_length")
    if expected is None or abs(tau - expected) <= _APART * max(tau, expected):
        return []
    return [
        f"τ is {tau:.2f} in the decode engine, but {expected:.2f} is expected from held-out text: "
        "the held-out prompts may differ in kind from the data, or training and decoding may "
        "use different features, templates or precision"
    ]
