"""Keys and values of keys that earlier versions had, with what to use instead."""

from collections.abc import Mapping
from typing import Any

PAGE = "docs/results/tried_and_removed.md"

_TEST_ONLY = "data sets are measured on their split test"

# What to use instead, by dotted key; empty if there is nothing. A group covers all keys below it.
KEYS: dict[str, str] = {
    "forecast.acceptance": "compare τ with the column “× plain”",
    "answers.tasks": "give questions in answers.files",
    "drafter.divide_rows": "only drafters with a confidence divide rows",
    "mesh.drafter": "use drafter.devices",
    "serve.role": "start one server",
    "serve.prefill": "start one server",
    "serve.prefill_s": "start one server",
    "data.math_examples": "experiments/tiny_family of the repository generates its data set math",
    "prompts.split": _TEST_ONLY,
    "test.split": _TEST_ONLY,
    "split": _TEST_ONLY,
}
# The same by "key=value", for a value of a key that remains.
VALUES: dict[str, str] = {
    "drafter.overlap=pingpong": "use ssd or leave it out",
    "sweep.run=distill": "use experiments/tiny_family of the repository",
    "study.name=batch": "use load",
    "study.name=block": "sweep drafter.block_size",
    "study.name=layers": "use configs/sweeps/drafter_shape.yml",
    "study.name=taps": "use configs/sweeps/drafter_shape.yml",
    "study.name=survival": "use experiments/acceptance of the repository",
    "study.name=trees": "use experiments/acceptance of the repository",
}
# Values with which a run means the same without the key; None if it does with every value.
_WITHOUT_EFFECT: Mapping[str, tuple | None] = {
    "forecast.acceptance": (None,),
    "answers.tasks": ({},),
    "drafter.divide_rows": None,
    "mesh.drafter": (None, 1),
    "data.math_examples": None,
    "prompts.split": ("test",),
    "test.split": ("test",),
    "split": ("test",),
}


def is_without_effect(path: tuple[str, ...], value: Any) -> bool:
    """Returns whether the config of an earlier run means the same without a removed key."""
    key = ".".join(_declared(path))
    if key not in _WITHOUT_EFFECT:
        return False
    values = _WITHOUT_EFFECT[key]
    return values is None or value in values


def notice(path: tuple[str, ...], value: Any = None) -> str | None:
    """Returns the message for a removed key, or for a removed value of a key; None for others.

    Args:
      path: Names from the outermost group to the key.
      value: Value that the key does not accept; None if the key itself is unknown.
    """
    key = ".".join(_declared(path))
    instead = KEYS.get(key) if value is None else VALUES.get(f"{key}={value}")
    if instead is None:
        return None
    subject = "" if value is None else f"{value!r} "
    return f"{subject}was removed{instead and f'; {instead}'} (see {PAGE})"


def _declared(path: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the path of the group that a group of a benchmark or a distillation repeats."""
    if path[0] == "strategies":
        return ("drafter", *path[2:])
    return path[1:] if path[:2] in (("answers", "decode"), ("test", "decode")) else path
