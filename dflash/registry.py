"""Names that a config may choose, and where their code lives.

A target's or drafter's name picks two things: the class that runs, and the schema of its config
group. Both are kept as "module:Class" and imported on demand, so that reading a config never
imports jax.
"""

import dataclasses
import difflib
import importlib
from collections.abc import Mapping
from typing import Any

from dflash import errors


@dataclasses.dataclass(frozen=True)
class Entry:
    """Where a registered name's class and config schema live, each as "module:Class"."""

    implementation: str
    schema: str


TARGETS: Mapping[str, Entry] = {
    "qwen3": Entry("dflash.models.qwen3:Qwen3", "dflash.config.schema:TargetConfig"),
    "llama3": Entry("dflash.models.llama3:Llama3", "dflash.config.schema:TargetConfig"),
}

DRAFTERS: Mapping[str, Entry] = {
    "none": Entry("dflash.drafters.none:NoDrafter", "dflash.config.schema:DrafterConfig"),
    "dflash": Entry("dflash.drafters.dflash:DFlash", "dflash.config.schema:DFlashConfig"),
}

# Data sets have no schema of their own: what they need stands in dflash/config/data_schema.py.
DATASETS: Mapping[str, str] = {
    "math": "dflash.data.datasets:Math",
    "code": "dflash.data.datasets:Code",
    "chat": "dflash.data.datasets:Chat",
    "jsonl": "dflash.data.datasets:Jsonl",
}


def load(reference: str) -> Any:
    """Imports `reference` ("module:Class") and returns the object."""
    module, _, attribute = reference.partition(":")
    return getattr(importlib.import_module(module), attribute)


def find(entries: Mapping[str, Entry], name: str, what: str) -> Entry:
    """Returns the entry called `name`.

    Raises:
      ConfigError: no such name; the message offers the nearest one.
    """
    if name in entries:
        return entries[name]
    raise errors.ConfigError(f"{what}: unknown name {name!r}{suggest(name, entries)}")


def suggest(name: str, known) -> str:
    """Returns "; did you mean 'x'?" for a near miss, else "; expected one of …"."""
    near = difflib.get_close_matches(str(name), list(known), n=1)
    if near:
        return f"; did you mean {near[0]!r}?"
    return f"; expected one of {', '.join(sorted(known))}"
