"""Everything that a benchmark config may hold."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from dflash.config import schema
from dflash.config.schema import location, option


def overrides_of(group: str) -> Any:
    """A field that maps names to overrides of another group of the run; see `layers.inherit`."""
    return dataclasses.field(default_factory=dict, metadata={"overrides_of": group})


@dataclasses.dataclass(frozen=True)
class StudyConfig:
    """A measurement of costs over `values` of one quantity."""

    name: Literal["cycle", "verify", "draft", "block", "layers", "taps", "batch", "serve"] = "cycle"
    # What the study varies; none: the study's default.
    values: tuple[int, ...] = option((), minimum=1, maximum=schema.MAX_TOKENS)
    # Tokens in the cache, for the studies verify and draft.
    contexts: tuple[int, ...] = option((), minimum=1, maximum=schema.MAX_TOKENS)
    # Timings of each point; the median is reported.
    repeats: int = option(15, minimum=1, maximum=100_000)


@dataclasses.dataclass(frozen=True)
class BenchmarkRun:
    """Everything that `dflash benchmark` reads from its config."""

    ALTERNATIVES = ("trace", "acceptance")

    target: schema.TargetConfig = dataclasses.field(default_factory=schema.TargetConfig)
    # Keys that strategies with the same drafter share; not a strategy itself.
    drafter: schema.DrafterConfig = dataclasses.field(default_factory=schema.DrafterConfig)
    strategies: Mapping[str, schema.DrafterConfig] = overrides_of("drafter")
    tasks: tuple[str, ...] = ()  # data sets; ignored if acceptance lengths are given
    raw_dir: str | None = location("disk")  # as prompts.raw_dir
    split: Literal["train", "validation", "test"] = "test"  # of the tasks' data sets
    prompts_per_task: int = option(16, minimum=1, maximum=schema.MAX_BATCH)
    # Rounds; each decodes every prompt with every strategy.
    rounds: int = option(3, minimum=1, maximum=100_000)
    thinking: bool = False  # as prompts.thinking
    # JSON file of recorded acceptance lengths, which replace the true ones.
    trace: str | None = location("file")
    trace_tasks: tuple[str, ...] = ()  # data sets of the trace to keep; none: all
    acceptance: tuple[str, ...] = ()  # published histograms to draw acceptance lengths from
    # Tokens of made-up prompts; None: as recorded.
    prompt_tokens: int | None = option(None, minimum=1, maximum=schema.MAX_TOKENS)
    # Tokens of each task's replay on the page; 0: no replay.
    replay_tokens: int = option(192, minimum=0, maximum=schema.MAX_TOKENS)
    study: StudyConfig | None = None  # instead of strategies × tasks
    decode: schema.DecodeConfig = dataclasses.field(default_factory=schema.DecodeConfig)
    mesh: schema.MeshConfig = dataclasses.field(default_factory=schema.MeshConfig)
    sharding_rules: Mapping[str, tuple[str, ...]] = option(schema.SHARDING_RULES)
    dtype: schema.DType = "bfloat16"

    @property
    def forced(self) -> bool:
        """Whether acceptance lengths are given rather than measured."""
        return self.trace is not None or bool(self.acceptance)

    def decode_run(self, drafter: schema.DrafterConfig) -> schema.DecodeRun:
        """The decode run that measures one strategy."""
        return schema.DecodeRun(
            target=self.target,
            drafter=drafter,
            decode=self.decode,
            prompts=schema.PromptsConfig(thinking=self.thinking),
            mesh=self.mesh,
            sharding_rules=self.sharding_rules,
            dtype=self.dtype,
        )
