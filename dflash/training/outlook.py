"""What the evaluations so far say of a run: what to expect, what is wrong, and when it is over.

An evaluation is kept as its step, its score (greater is better), and its metrics.
"""

from collections.abc import Mapping, Sequence
from typing import Any

Entry = Mapping[str, Any]

KEPT = 32  # evaluations that a checkpoint holds
_WINDOW = 4  # evaluations that are compared with each other
_FALL, _RISE = 0.01, 0.01  # shares: of a loss that falls, and of a τ that does not rise
_APART = 0.3  # share of τ that its expectation may be off


def entry(step: int, score: float, metrics: Mapping[str, float]) -> Entry:
    """An evaluation, as JSON has it."""
    names = "loss", "tau", "acceptance_length"
    kept = {name: float(metrics[name]) for name in names if name in metrics}
    return {"step": step, "score": score, "metrics": kept}


def forecast(metrics: Mapping[str, float], weights_ratio: float | None) -> dict[str, float]:
    """What decoding with these weights may bring.

    Args:
      metrics: of an evaluation.
      weights_ratio: bytes of weights that a cycle reads, over those of a plain token; None: no
        drafter is trained.
    Returns:
      "speedup_bound": τ, measured or else expected, over the ratio. That is the speed-up over plain
      decoding at batch 1 if reading weights takes all the time, so the real one is smaller.
    """
    tau = metrics.get("tau", metrics.get("acceptance_length"))
    if weights_ratio is None or tau is None:
        return {}
    return {"speedup_bound": tau / weights_ratio}


def has_stalled(history: Sequence[Entry], patience: int) -> bool:
    """Whether the last `patience` evaluations have brought no better score; 0: never."""
    if not patience or len(history) <= patience:
        return False
    scores = [one["score"] for one in history]
    return max(scores[-patience:]) <= max(scores[:-patience])


def warnings(history: Sequence[Entry]) -> list[str]:
    """What does not fit together in the latest evaluations, as sentences."""
    if not history or "tau" not in history[-1]["metrics"]:
        return []
    return [*_loss_without_tau(history[-_WINDOW:]), *_unexpected(history[-1]["metrics"])]


def _loss_without_tau(window: Sequence[Entry]) -> list[str]:
    """Said once for each window, not after every evaluation in it."""
    first, last = window[0]["metrics"], window[-1]["metrics"]
    if len(window) < _WINDOW or not {"loss", "tau"} <= first.keys() & last.keys():
        return []
    falls = last["loss"] < (1 - _FALL) * first["loss"]
    rises = max(one["metrics"]["tau"] for one in window[1:]) > (1 + _RISE) * first["tau"]
    if not falls or rises:
        return []
    return [
        f"the held-out loss falls ({first['loss']:.3f} to {last['loss']:.3f} since step "
        f"{window[0]['step']}), but τ does not rise ({first['tau']:.2f} to {last['tau']:.2f}): "
        "what the loss learns is not what gets accepted; later draft positions may weigh too much, "
        "or the answers may not be the target's own"
    ]


def _unexpected(metrics: Mapping[str, float]) -> list[str]:
    tau, expected = metrics["tau"], metrics.get("acceptance_length")
    if expected is None or abs(tau - expected) <= _APART * max(tau, expected):
        return []
    return [
        f"τ is {tau:.2f} in the decode engine, but {expected:.2f} is expected from held-out text: "
        "the held-out prompts may be of another kind than the data, or training and decoding may "
        "see different features, templates or precision"
    ]
