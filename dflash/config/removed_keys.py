"""Keys, values of keys and commands that earlier versions had, with what to use instead."""

from typing import Any, NamedTuple

PAGE = "docs/results/tried_and_removed.md"


class Removed(NamedTuple):
    """Advice to the user of a removed key, value or command.

    Attributes:
      instead: What to use instead; empty if there is nothing. None says nothing at all.
      without_effect: Values with which a run means the same without the key; None for every value.
    """

    instead: str | None = ""
    without_effect: tuple | None = ()


_TEST_ONLY = Removed("data sets are measured on their split test", ("test",))
_ONE_SERVER = Removed("start one server")
_PARTS = Removed("a benchmark times the draft, the verification and the cycle of each strategy")
_SHAPES = Removed("use configs/sweeps/drafter_shape.yml")
_FORECAST = Removed("use experiments/forecast of the repository", None)
_TINY_FAMILY = Removed("use experiments/tiny_family of the repository")

# By dotted key, which covers all keys below it; by "key=value"; by "dflash command".
REMOVED: dict[str, Removed] = {
    "forecast": _FORECAST,
    "strategies": Removed(None, None),  # In the config of a compile report.
    "answers.tasks": Removed("give questions in answers.files", ({},)),
    "drafter.tree.top_k": Removed("use drafter.tree.width", (None,)),
    "drafter.divide_rows": Removed("only drafters with a confidence divide rows", None),
    "drafter.confidence_temperatures": Removed(
        "run study.name=calibration, which stores a calibration in the checkpoint", ((), None)
    ),
    "mesh.drafter": Removed("use drafter.devices", (None, 1)),
    "serve.traces": Removed("/metrics has the times of requests", (None,)),
    "serve.role": _ONE_SERVER,
    "serve.prefill": _ONE_SERVER,
    "serve.prefill_s": _ONE_SERVER,
    "data.math_examples": Removed(
        "experiments/tiny_family of the repository generates its data set math", None
    ),
    "prompts.split": _TEST_ONLY,
    "test.split": _TEST_ONLY,
    "split": _TEST_ONLY,
    "train.features": Removed("use train.keep_features", ("online",)),
    "train.feature_cache": Removed("use train.keep_features", None),
    "drafter.name=lookahead": Removed("use ngram"),
    "drafter.overlap=pingpong": Removed("use ssd or leave it out"),
    "decode.verify=block": Removed("use rejection"),
    "sweep.run=distill": _TINY_FAMILY,
    "study.name=cycle": _PARTS,
    "study.name=draft": _PARTS,
    "study.name=serve": Removed("vllm bench serve and AIPerf measure the server"),
    "study.name=batch": Removed("use load"),
    "study.name=block": Removed("sweep drafter.block_size"),
    "study.name=layers": _SHAPES,
    "study.name=taps": _SHAPES,
    "study.name=survival": Removed("use calibration"),
    "study.name=trees": Removed("use experiments/acceptance of the repository"),
    "dflash completion": Removed(),
    "dflash train_tokenizer": _TINY_FAMILY,
}


def is_without_effect(path: tuple[str, ...], value: Any) -> bool:
    """Returns whether the config of an earlier run means the same without a removed key."""
    values = REMOVED.get(_declared(path), Removed()).without_effect
    return values is None or value in values


def notice(path: tuple[str, ...], value: Any = None) -> str | None:
    """Returns the message for a removed key, value or command; None for others.

    Args:
      path: Names from the outermost group to the key, or ("dflash command",).
      value: Value that the key does not accept; None if the key itself is unknown.
    """
    key = _declared(path)
    removed = REMOVED.get(key if value is None else f"{key}={value}")
    if removed is None or removed.instead is None:
        return None
    subject = "" if value is None else f"{value!r} "
    return f"{subject}was removed{removed.instead and f'; {removed.instead}'} (see {PAGE})"


def _declared(path: tuple[str, ...]) -> str:
    """Returns the key, or the key that a group of a benchmark or a distillation repeats."""
    if path[0] == "strategies" and len(path) > 1:
        path = ("drafter", *path[2:])
    elif path[:2] in (("answers", "decode"), ("test", "decode")):
        path = path[1:]
    return ".".join(path)
