"""Schema of a benchmark config."""

import dataclasses
from collections.abc import Mapping
from typing import Literal

from dflash.config import schema
from dflash.config.schema import location, option


@dataclasses.dataclass(frozen=True)
class StudyConfig:
    """Measurement of costs over several values of one quantity."""

    name: Literal["verify", "load", "answers", "calibration"] = "verify"
    # Values of the quantity; an empty list uses the study's default.
    values: tuple[int, ...] = option((), minimum=1, maximum=schema.MAX_TOKENS)
    # Tokens in the cache, for the study verify.
    contexts: tuple[int, ...] = option((), minimum=1, maximum=schema.MAX_TOKENS)
    # Timings per value; the report gives the median.
    repeats: int = option(15, minimum=1, maximum=100_000)
    # JSONL of prompt_ids and output_ids, such as outputs.jsonl, for the study answers.
    answers: str | None = location("file")
    # Write the calibrations into the config.json of the drafters' checkpoints.
    store: bool = False


@dataclasses.dataclass(frozen=True)
class BenchmarkRun:
    """Config of `dflash benchmark`."""

    ALTERNATIVES = ("trace", "acceptance")

    target: schema.TargetConfig = dataclasses.field(default_factory=schema.TargetConfig)
    # Keys shared by all strategies with the same drafter; not a strategy itself.
    drafter: schema.DrafterConfig = dataclasses.field(default_factory=schema.DrafterConfig)
    strategies: Mapping[str, schema.DrafterConfig] = option({})
    # Data sets, and files of prompts (*.jsonl, lines as in prompts.file); ignored if acceptance
    # lengths are replayed.
    tasks: tuple[str, ...] = ()
    # Temperatures at which every task is decoded; an empty list takes decode.temperature.
    temperatures: tuple[float, ...] = option((), minimum=0.0)
    raw_dir: str | None = location("disk")  # Same as prompts.raw_dir.
    prompts_per_task: int = option(16, minimum=1, maximum=schema.MAX_BATCH)
    # Number of rounds; each decodes every prompt with every strategy.
    rounds: int = option(3, minimum=1, maximum=100_000)
    thinking: bool | None = None  # Same as prompts.thinking.
    # JSON file of recorded acceptance lengths, which replace the true ones.
    trace: str | None = location("file")
    trace_tasks: tuple[str, ...] = ()  # Data sets of the trace to use; an empty list uses all.
    acceptance: tuple[str, ...] = ()  # Published histograms to draw acceptance lengths from.
    # Tokens of synthetic prompts; None: as recorded.
    prompt_tokens: int | None = option(None, minimum=1, maximum=schema.MAX_TOKENS)
    # Tokens of each task's replay on the HTML page; 0: no replay.
    replay_tokens: int = option(192, minimum=0, maximum=schema.MAX_TOKENS)
    study: StudyConfig | None = None  # Runs this study instead of strategies × tasks.
    decode: schema.DecodeConfig = dataclasses.field(default_factory=schema.DecodeConfig)
    mesh: schema.MeshConfig = dataclasses.field(default_factory=schema.MeshConfig)
    sharding_rules: Mapping[str, tuple[str, ...]] = option(schema.SHARDING_RULES)
    dtype: schema.DType = "bfloat16"

    @property
    def forced(self) -> bool:
        """Returns whether acceptance lengths are replayed or drawn rather than measured."""
        return self.trace is not None or bool(self.acceptance)

    @property
    def engine_decode(self) -> schema.DecodeConfig:
        """Returns the decode group for engines that serve every one of `temperatures`."""
        highest = max(self.temperatures, default=self.decode.temperature)
        return dataclasses.replace(self.decode, temperature=highest)

    def decode_run(self, drafter: schema.DrafterConfig) -> schema.DecodeRun:
        """Returns the decode run that measures one strategy."""
        return schema.DecodeRun(
            target=self.target,
            drafter=drafter,
            decode=self.engine_decode,
            prompts=schema.PromptsConfig(thinking=self.thinking),
            mesh=self.mesh,
            sharding_rules=self.sharding_rules,
            dtype=self.dtype,
        )
