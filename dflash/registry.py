"""Names that a config may choose, and where their code is.

A target's or drafter's name selects two things: the class that runs, and the schema of its config
group. Both are kept as "module:Class" and imported on demand, so that reading a config never
imports jax.
"""

import dataclasses
import difflib
import importlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dflash import errors

_MAX_COMPARED = 200  # characters of a name; comparing takes time quadratic in them


@dataclasses.dataclass(frozen=True)
class Entry:
    """The class and the config schema of a registered name, each as "module:Class"."""

    implementation: str
    schema: str


TARGETS: Mapping[str, Entry] = {
    "qwen3": Entry("dflash.models.qwen3:Qwen3", "dflash.config.schema:TargetConfig"),
    "llama3": Entry("dflash.models.llama3:Llama3", "dflash.config.schema:TargetConfig"),
}

DRAFTERS: Mapping[str, Entry] = {
    "none": Entry("dflash.drafters.none:NoDrafter", "dflash.config.schema:DrafterConfig"),
    "dflash": Entry("dflash.drafters.dflash.drafter:DFlash", "dflash.config.schema:DFlashConfig"),
    "eagle3": Entry("dflash.drafters.eagle3.drafter:Eagle3", "dflash.config.schema:Eagle3Config"),
    "autoregressive": Entry(
        "dflash.drafters.autoregressive.drafter:Autoregressive",
        "dflash.config.schema:AutoregressiveConfig",
    ),
    "dflash2": Entry(
        "dflash.drafters.dflash2.drafter:DFlash2", "dflash.config.schema:DFlash2Config"
    ),
    "dspark": Entry("dflash.drafters.dspark.drafter:DSpark", "dflash.config.schema:DSparkConfig"),
    "lookahead": Entry(
        "dflash.drafters.lookahead:Lookahead", "dflash.config.schema:LookaheadConfig"
    ),
    "medusa": Entry("dflash.drafters.medusa.drafter:Medusa", "dflash.config.schema:MedusaConfig"),
    "ngram": Entry("dflash.drafters.ngram:Ngram", "dflash.config.schema:NgramConfig"),
}

# Data sets have no schema of their own; their keys are in dflash/config/data_schema.py.
DATASETS: Mapping[str, str] = {
    "math": "dflash.data.datasets:Math",
    "code": "dflash.data.datasets:Code",
    "chat": "dflash.data.datasets:Chat",
    "jsonl": "dflash.data.datasets:Jsonl",
    # Published sets, for testing only.
    "math500": "dflash.data.benchmarks:Math500",
    "aime24": "dflash.data.benchmarks:Aime24",
    "aime25": "dflash.data.benchmarks:Aime25",
    "gsm8k": "dflash.data.benchmarks:Gsm8k",
    "humaneval": "dflash.data.benchmarks:HumanEval",
    "mbpp": "dflash.data.benchmarks:Mbpp",
    "mt-bench": "dflash.data.benchmarks:MtBench",
    "alpaca": "dflash.data.benchmarks:Alpaca",
    "swe-bench": "dflash.data.benchmarks:SweBench",
    "spec-bench": "dflash.data.benchmarks:SpecBench",
}


# What the points of a sweep can run: a `Runner` of dflash/runs/sweeps.py, and a run's schema.
RUNS: Mapping[str, Entry] = {
    "decode": Entry("dflash.offline.points:DecodePoints", "dflash.config.schema:DecodeRun"),
    "benchmark": Entry(
        "dflash.measure.points:BenchmarkPoints", "dflash.config.benchmark_schema:BenchmarkRun"
    ),
}

# The schemas of each command's configs, by which a config that is given to another one is known.
CONFIGS: Mapping[str, tuple[str, ...]] = {
    "decode": ("dflash.config.schema:DecodeRun",),
    "train": ("dflash.config.train_schema:TrainRun",),
    "benchmark": ("dflash.config.benchmark_schema:BenchmarkRun",),
    "compile": (
        "dflash.config.tpu_schema:CompileDecode",
        "dflash.config.tpu_schema:CompileTrain",
    ),
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


def suggest(name: str, known: Iterable[str], *, prefix: str = "", exhaustive: bool = True) -> str:
    """Returns "; did you mean 'x'?" for a near miss, else "; expected one of …".

    Args:
      name: what was given.
      known: what may be given; the order of a list is kept.
      prefix: goes before the suggested name, such as that of its group.
      exhaustive: whether to list everything known when nothing is near, rather than nothing.
    """
    names = list(known) if isinstance(known, Sequence) else sorted(known)
    near = difflib.get_close_matches(str(name)[:_MAX_COMPARED], names, n=1)
    if near:
        return f"; did you mean {prefix + near[0]!r}?"
    return f"; expected one of {', '.join(names)}" if exhaustive else ""
