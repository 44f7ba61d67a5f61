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

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

_MAX_COMPARED = 200  # Limit of characters, since the comparison takes quadratic time.


@dataclasses.dataclass(frozen=True)
class Entry:
    """Implementation and config schema of a registered name, each as "module:Class"."""

    implementation: str
    schema: str


class Entries(Mapping[str, Entry]):
    """Registered entries by name, built-in ones and those of installed distributions.

    Distributions are searched when a name that is not built in is first looked up. Their code is
    imported only when one of their own names is looked up.
    """

    def __init__(self, group: str, built_in: Mapping[str, Entry]):
        """Creates the mapping.

        Args:
          group: Name of the group of entry points.
          built_in: Entries of dflash itself.
        """
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


TARGETS: Mapping[str, Entry] = Entries(
    "dflash.targets",
    {
        "qwen3": Entry("dflash.models.dense:Qwen3", "dflash.config.schema:TargetConfig"),
        "qwen3_moe": Entry(
            "dflash.models.qwen3_moe:Qwen3Moe", "dflash.models.config:Qwen3MoeConfig"
        ),
        "deepseek_v3": Entry(
            "dflash.models.deepseek_v3:DeepseekV3",
            "dflash.models.config:DeepseekV3Config",
        ),
        "kimi_k25": Entry(
            "dflash.models.deepseek_v3:KimiK25", "dflash.models.config:DeepseekV3Config"
        ),
        "llama3": Entry("dflash.models.dense:Llama3", "dflash.config.schema:TargetConfig"),
        "qwen3_next": Entry(
            "dflash.models.qwen3_next:Qwen3Next", "dflash.models.config:Qwen3NextConfig"
        ),
        "qwen3_5": Entry("dflash.models.qwen3_5:Qwen35", "dflash.models.config:Qwen3NextConfig"),
        "qwen3_5_text": Entry(
            "dflash.models.qwen3_5:Qwen35Text", "dflash.models.config:Qwen3NextConfig"
        ),
        "gpt_oss": Entry("dflash.models.gpt_oss:GptOss", "dflash.models.config:GptOssConfig"),
        "qwen2": Entry("dflash.models.dense:Qwen2", "dflash.config.schema:TargetConfig"),
        "mistral": Entry("dflash.models.dense:Mistral", "dflash.models.config:MistralConfig"),
        "gemma3": Entry("dflash.models.gemma3:Gemma3", "dflash.models.config:Gemma3Config"),
        "gemma3_text": Entry(
            "dflash.models.gemma3:Gemma3Text", "dflash.models.config:Gemma3Config"
        ),
        "gemma4": Entry("dflash.models.gemma4:Gemma4", "dflash.models.config:Gemma4Config"),
        "gemma4_text": Entry(
            "dflash.models.gemma4:Gemma4Text", "dflash.models.config:Gemma4Config"
        ),
        "smollm3": Entry("dflash.models.dense:SmolLM3", "dflash.models.config:SmolLM3Config"),
    },
)

DRAFTERS: Mapping[str, Entry] = Entries(
    "dflash.drafters",
    {
        "none": Entry("dflash.drafters.none:NoDrafter", "dflash.config.schema:DrafterConfig"),
        "dflash": Entry(
            "dflash.drafters.dflash:DFlash", "dflash.drafters.dflash_config:DFlashConfig"
        ),
        "eagle3": Entry(
            "dflash.drafters.eagle3.drafter:Eagle3", "dflash.drafters.eagle3_config:Eagle3Config"
        ),
        "autoregressive": Entry(
            "dflash.drafters.autoregressive:Autoregressive",
            "dflash.drafters.autoregressive_config:AutoregressiveConfig",
        ),
        "dflash2": Entry(
            "dflash.drafters.dflash2:DFlash2", "dflash.drafters.dflash2_config:DFlash2Config"
        ),
        "dflare": Entry(
            "dflash.drafters.dflare:DFlare", "dflash.drafters.dflare_config:DFlareConfig"
        ),
        "lilicorr": Entry(
            "dflash.drafters.lilicorr:LiLiCorr", "dflash.drafters.lilicorr_config:LiLiCorrConfig"
        ),
        "dspark": Entry(
            "dflash.drafters.dspark:DSpark", "dflash.drafters.dspark_config:DSparkConfig"
        ),
        "lookahead": Entry(
            "dflash.drafters.lookahead:Lookahead",
            "dflash.drafters.lookahead_config:LookaheadConfig",
        ),
        "medusa": Entry(
            "dflash.drafters.medusa:Medusa", "dflash.drafters.medusa_config:MedusaConfig"
        ),
        "ngram": Entry("dflash.drafters.ngram:Ngram", "dflash.drafters.ngram_config:NgramConfig"),
    },
)

# Data sets have no schema of their own; their keys are in dflash/config/data_schema.py.
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
RUNS: Mapping[str, Entry] = {
    "decode": Entry("dflash.offline.decode_sweep:DecodePoints", "dflash.config.schema:DecodeRun"),
    "benchmark": Entry(
        "dflash.measure.benchmark_sweep:BenchmarkPoints",
        "dflash.config.benchmark_schema:BenchmarkRun",
    ),
    "distill": Entry(
        "dflash.distillation.distill_sweep:DistillPoints", "dflash.config.distill_schema:DistillRun"
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
    """Imports `reference` ("module:Class") and returns the object.

    Raises:
      ConfigError: The module cannot be imported, or it has no such class.
    """
    module, _, attribute = reference.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise errors.ConfigError(f"{reference}: cannot be imported: {error}") from error


def find(entries: Mapping[str, Entry], name: str, what: str) -> Entry:
    """Returns the entry called `name`.

    Raises:
      ConfigError: No entry has this name; the message suggests the nearest one.
    """
    if name in entries:
        return entries[name]
    raise errors.ConfigError(f"{what}: unknown name {name!r}{suggest(name, entries)}")


def suggest(name: str, known: Iterable[str], *, prefix: str = "", exhaustive: bool = True) -> str:
    """Returns "; did you mean 'x'?" if a known name is similar, else "; expected one of …".

    Args:
      name: Unknown name.
      known: Valid names; sorted unless they are a sequence.
      prefix: Text before the suggested name, such as the name of its group and a dot.
      exhaustive: List all valid names if none is similar; otherwise return an empty string.
    """
    names = list(known) if isinstance(known, Sequence) else sorted(known)
    near = difflib.get_close_matches(str(name)[:_MAX_COMPARED], names, n=1)
    if near:
        return f"; did you mean {prefix + near[0]!r}?"
    return f"; expected one of {', '.join(names)}" if exhaustive else ""
