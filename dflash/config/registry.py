"""Registry of the names that a config may choose, with references to their code.

A target's or drafter's name selects two things: the class that runs, and the schema of its config
group. Both are stored as "module:Class" and imported on demand, so that reading a config never
imports jax.

Installed distributions add targets and drafters through entry points, whose values are `Entry`s:

    [project.entry-points."dflash.drafters"]
    repeat = "my_package.registered:REPEAT"
"""

import dataclasses
import difflib
import functools
import importlib
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dflash import errors
from dflash.config import schema

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

_MAX_COMPARED = 200  # Limit of characters, since the comparison takes quadratic time.


@dataclasses.dataclass(frozen=True)
class Entry:
    """Implementation and config schema of a registered name, each as "module:Class".

    The schema of a target may also be the class of its architecture.
    """

    implementation: str
    schema: str


class Entries(Mapping[str, Entry]):
    """Registered entries by name, built-in ones and those of installed distributions.

    Distributions are searched when a name that is not built in is first looked up. Their code is
    imported only when one of their own names is looked up.
    """

    def __init__(self, group: str, built_in: Mapping[str, Entry]):
        """Creates the mapping of a group of entry points."""
        self._group, self._built_in = group, built_in

    def __getitem__(self, name: str) -> Entry:
        """Returns the entry called `name`.

        Raises:
          KeyError: No entry has this name.
          ConfigError: The entry of a distribution cannot be loaded, or two distributions, or one
            and dflash itself, register the same name.
        """
        added = self._added()
        return self._built_in[name] if name in self._built_in else _load_entry(added[name])

    def __contains__(self, name: object) -> bool:
        return name in self._built_in or name in self._added()

    def __iter__(self) -> Iterator[str]:
        yield from self._built_in
        yield from self._added()

    def __len__(self) -> int:
        return len(self._built_in) + len(self._added())

    def _added(self) -> "Mapping[str, EntryPoint]":
        """Returns the entry points of installed distributions by name."""
        points = _entry_points(self._group, tuple(sys.path))
        owners = dict.fromkeys(self._built_in, "dflash")
        for point in points:
            if point.name in owners:
                raise errors.ConfigError(
                    f"{_where(point)}: the name {point.name!r} is taken by {owners[point.name]}: "
                    "rename the entry point, or uninstall the distribution"
                )
            owners[point.name] = _distribution(point)
        return {point.name: point for point in points}


@functools.lru_cache(maxsize=8)
def _entry_points(group: str, path: tuple[str, ...]) -> "tuple[EntryPoint, ...]":
    """Returns the entry points of a group in the distributions on `path`, the value of sys.path."""
    from importlib import metadata  # Imported late: it takes longer than the rest of this module.

    return tuple(metadata.entry_points(group=group))


def _load_entry(point: "EntryPoint") -> Entry:
    """Imports the entry that a distribution registers."""
    try:
        entry = point.load()
    except Exception as error:  # Foreign code can raise anything.
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise errors.ConfigError(
            f"{_where(point)}: cannot be loaded: {reason}; fix or uninstall the distribution"
        ) from error
    if not isinstance(entry, Entry):
        raise errors.ConfigError(
            f"{_where(point)}: expected a dflash.config.registry.Entry, got "
            f"{type(entry).__name__}; fix or uninstall the distribution"
        )
    return entry


def _where(point: "EntryPoint") -> str:
    return f"{_distribution(point)}: entry point {point.group}: {point.name} = {point.value}"


def _distribution(point: "EntryPoint") -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist else "a distribution"


def _target(implementation: str, architecture: str = "") -> Entry:
    keys = f"models.config:{architecture}" if architecture else "config.schema:TargetConfig"
    return Entry(f"dflash.models.{implementation}", f"dflash.{keys}")


def _drafter(implementation: str, keys: str) -> Entry:
    return Entry(f"dflash.drafters.{implementation}", f"dflash.drafters.{keys}")


TARGETS: Mapping[str, Entry] = Entries(
    "dflash.targets",
    {
        "qwen3": _target("dense:Qwen3"),
        "qwen3_moe": _target("qwen3_moe:Qwen3Moe", "Qwen3MoeArchitecture"),
        "deepseek_v3": _target("deepseek_v3:DeepseekV3", "DeepseekV3Architecture"),
        "kimi_k25": _target("deepseek_v3:KimiK25", "DeepseekV3Architecture"),
        "llama3": _target("dense:Llama3"),
        "qwen3_next": _target("qwen3_next:Qwen3Next", "Qwen3NextArchitecture"),
        "qwen3_5": _target("qwen3_next:Qwen35", "Qwen3NextArchitecture"),
        "qwen3_5_text": _target("qwen3_next:Qwen35Text", "Qwen3NextArchitecture"),
        "gpt_oss": _target("gpt_oss:GptOss", "GptOssArchitecture"),
        "qwen2": _target("dense:Qwen2"),
        "mistral": _target("dense:Mistral", "WindowedArchitecture"),
        "gemma3": _target("gemma3:Gemma3", "Gemma3Architecture"),
        "gemma3_text": _target("gemma3:Gemma3Text", "Gemma3Architecture"),
        "gemma4": _target("gemma4:Gemma4", "Gemma4Architecture"),
        "gemma4_text": _target("gemma4:Gemma4Text", "Gemma4Architecture"),
        "smollm3": _target("dense:SmolLM3", "SmolLM3Architecture"),
        "minimax_m2": _target("minimax_m2:MiniMaxM2", "MiniMaxM2Architecture"),
        "muse_glimmer": _target("muse_glimmer:MuseGlimmer", "MuseGlimmerArchitecture"),
        "muse_glimmer_text": _target("muse_glimmer:MuseGlimmerText", "MuseGlimmerArchitecture"),
    },
)

DRAFTERS: Mapping[str, Entry] = Entries(
    "dflash.drafters",
    {
        "none": Entry("dflash.drafters.none:NoDrafter", "dflash.config.schema:DrafterConfig"),
        "dflash": _drafter("dflash:DFlash", "dflash_config:DFlashConfig"),
        "eagle3": _drafter("eagle3.drafter:Eagle3", "eagle3_config:Eagle3Config"),
        "autoregressive": _drafter(
            "autoregressive:Autoregressive", "autoregressive_config:AutoregressiveConfig"
        ),
        "dflash2": _drafter("dflash2:DFlash2", "dflash2_config:DFlash2Config"),
        "ubtree": _drafter("ubtree:UBTree", "ubtree_config:UBTreeConfig"),
        "dflare": _drafter("dflare:DFlare", "dflare_config:DFlareConfig"),
        "lilicorr": _drafter("lilicorr:LiLiCorr", "lilicorr_config:LiLiCorrConfig"),
        "dspark": _drafter("dspark:DSpark", "dspark_config:DSparkConfig"),
        "medusa": _drafter("medusa:Medusa", "medusa_config:MedusaConfig"),
        "ngram": _drafter("ngram:Ngram", "ngram_config:NgramConfig"),
    },
)

# Data sets have no schema of their own; their keys are in dflash/config/train_schema.py.
DATASETS: dict[str, str] = {
    "math": "dflash.data.datasets:Math",
    "code": "dflash.data.datasets:Code",
    "chat": "dflash.data.datasets:Chat",
    "jsonl": "dflash.data.datasets:Jsonl",
    "tfds": "dflash.data.tfds_source:Tfds",
    # Published sets, for testing only.
    "math500": "dflash.data.published.benchmarks:Math500",
    "aime24": "dflash.data.published.benchmarks:Aime24",
    "aime25": "dflash.data.published.benchmarks:Aime25",
    "gsm8k": "dflash.data.published.benchmarks:Gsm8k",
    "humaneval": "dflash.data.published.benchmarks:HumanEval",
    "mbpp": "dflash.data.published.benchmarks:Mbpp",
    "mt-bench": "dflash.data.published.benchmarks:MtBench",
    "alpaca": "dflash.data.published.benchmarks:Alpaca",
    "swe-bench": "dflash.data.published.benchmarks:SweBench",
    "spec-bench": "dflash.data.published.benchmarks:SpecBench",
    "speed-bench": "dflash.data.published.speed_bench:SpeedBench",
    "speed-bench-1k": "dflash.data.published.speed_bench:SpeedBench1k",
    "speed-bench-2k": "dflash.data.published.speed_bench:SpeedBench2k",
    "speed-bench-8k": "dflash.data.published.speed_bench:SpeedBench8k",
    "speed-bench-16k": "dflash.data.published.speed_bench:SpeedBench16k",
    "speed-bench-32k": "dflash.data.published.speed_bench:SpeedBench32k",
}


# Commands that a sweep can run at each point: a `Runner` of dflash/runs/sweeps.py, and the schema
# of its config.
RUNS: dict[str, Entry] = {
    "decode": Entry("dflash.offline.decode_sweep:DecodePoints", "dflash.config.schema:DecodeRun"),
    "benchmark": Entry(
        "dflash.measure.benchmark_run:BenchmarkPoints",
        "dflash.config.benchmark_schema:BenchmarkRun",
    ),
}

# Schemas of each command's configs. They identify a config that belongs to another command.
CONFIGS: Mapping[str, tuple[str, ...]] = {
    "decode": ("dflash.config.schema:DecodeRun",),
    "serve": ("dflash.config.serve_schema:ServeRun",),
    "train": ("dflash.config.train_schema:TrainRun",),
    "distill": ("dflash.config.distill_schema:DistillRun",),
    "benchmark": ("dflash.config.benchmark_schema:BenchmarkRun",),
    "compile": (
        "dflash.config.tpu_schema:CompileDecode",
        "dflash.config.tpu_schema:CompileTrain",
    ),
}


def load(reference: str) -> Any:
    """Imports "module:Class" and returns the object; raises ConfigError if it cannot."""
    module, _, attribute = reference.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise errors.ConfigError(f"{reference}: cannot be imported: {error}") from error


def load_schema(entry: Entry) -> type:
    """Imports the schema of a target or drafter; see `load` for the errors."""
    loaded = load(entry.schema)
    is_architecture = issubclass(loaded, schema.TargetArchitecture)
    return schema.target_config(loaded) if is_architecture else loaded


def find(entries: Mapping[str, Entry], name: str, what: str) -> Entry:
    """Returns the entry called `name`; raises ConfigError, which suggests the nearest one."""
    if name in entries:
        return entries[name]
    raise errors.ConfigError(f"{what}: unknown name {name!r}{suggest(name, entries)}")


def suggest(name: str, known: Iterable[str], *, prefix: str = "", exhaustive: bool = True) -> str:
    """Returns "; did you mean 'x'?" if a known name is similar, else "; expected one of …".

    Args:
      known: Valid names; sorted unless they are a sequence.
      prefix: Text before the suggested name, such as the name of its group and a dot.
      exhaustive: List all valid names if none is similar; otherwise return an empty string.
    """
    names = list(known) if isinstance(known, Sequence) else sorted(known)
    near = difflib.get_close_matches(str(name)[:_MAX_COMPARED], names, n=1)
    if near:
        return f"; did you mean {prefix + near[0]!r}?"
    return f"; expected one of {', '.join(names)}" if exhaustive else ""
