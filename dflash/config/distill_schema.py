"""Schema of a distillation config: from a target and questions to a drafter."""

import dataclasses
import pathlib
import typing
from collections.abc import Mapping

from dflash.config import schema, train_schema
from dflash.config.schema import location, option
from dflash.config.train_schema import DataConfig, LossConfig, OptimizerConfig


@dataclasses.dataclass(frozen=True)
class AnswersConfig:
    """Questions that the target answers, and the decoding of the answers.

    Of `made` and `files`, one given on the command line replaces the config's other.
    """

    ALTERNATIVES = ("made", "files")

    # Existing answers.jsonl of another distillation. Replaces files; nothing is decoded.
    made: str | None = location("file")
    files: tuple[str, ...] = location("file", ())  # JSONL files like prompts.file.
    # Format each text in `files` as a message of the chat template. None: if there is one.
    chat: bool | None = None
    decode: schema.DecodeConfig = dataclasses.field(default_factory=schema.DecodeConfig)


@dataclasses.dataclass(frozen=True)
class HeldOutConfig:
    """Measurement of the finished drafter against plain decoding."""

    # Data sets, and files of prompts (*.jsonl); an empty list skips the measurement.
    tasks: tuple[str, ...] = ()
    # Block sizes and tree budgets (in drafts) to measure in addition to the `drafter` group's.
    block_sizes: tuple[int, ...] = option((), minimum=2, maximum=schema.MAX_BLOCK_SIZE)
    trees: tuple[int, ...] = option((), minimum=1, maximum=1024)
    prompts: int = option(40, minimum=1, maximum=schema.MAX_BATCH)  # Prompts per data set.
    decode: schema.DecodeConfig = dataclasses.field(default_factory=schema.DecodeConfig)


@dataclasses.dataclass(frozen=True)
class PlanConfig:
    """Assumptions of the plan."""

    # Chip, such as v5p. None: this machine's; a dry run then estimates no times.
    chip: str | None = None
    # Estimated tokens per question.
    prompt_tokens: int = option(256, minimum=1, maximum=schema.MAX_TOKENS)


@dataclasses.dataclass(frozen=True)
class DistillRun:
    """Config of `dflash distill`.

    The groups `data`, `loss`, `optimizer`, `train` and `evaluation` are those of a training config.
    The answers are the data set jsonl of `data.mixture`, or all of the data without a mixture.
    """

    target: schema.TargetConfig = dataclasses.field(default_factory=schema.TargetConfig)
    drafter: schema.DrafterConfig = dataclasses.field(default_factory=schema.DrafterConfig)
    answers: AnswersConfig = dataclasses.field(default_factory=AnswersConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    loss: LossConfig = dataclasses.field(default_factory=LossConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    train: train_schema.TrainConfig = dataclasses.field(default_factory=train_schema.TrainConfig)
    evaluation: train_schema.EvaluationConfig = dataclasses.field(
        default_factory=train_schema.EvaluationConfig
    )
    test: HeldOutConfig = dataclasses.field(default_factory=HeldOutConfig)
    plan: PlanConfig = dataclasses.field(default_factory=PlanConfig)
    mesh: schema.MeshConfig = dataclasses.field(default_factory=schema.MeshConfig)
    sharding_rules: Mapping[str, tuple[str, ...]] = option(schema.SHARDING_RULES)

    def answer_runs(self) -> dict[str, schema.DecodeRun]:
        """Returns the decode runs that generate the answers, by the name of their questions."""
        if self.answers.made is not None:
            return {}
        return {
            f"{number}-{pathlib.Path(file).stem}": self.answer_run(
                schema.PromptsConfig(file=file, chat=self.answers.chat)
            )
            for number, file in enumerate(self.answers.files)
        }

    def answer_run(self, questions: schema.PromptsConfig) -> schema.DecodeRun:
        """Returns the decode run that answers the given questions."""
        return self._decode_run(self.answers.decode, schema.DrafterConfig(), questions)

    def train_run(self, answers: str) -> train_schema.TrainRun:
        """Returns the training run on a file of answers."""
        data = dataclasses.replace(self.data, files=(*self.data.files, answers))
        names = {field.name for field in dataclasses.fields(train_schema.TrainRun)}
        shared = {name: value for name, value in vars(self).items() if name in names}
        return train_schema.TrainRun(**{**shared, "data": data})

    def test_runs(self, checkpoint: str | None) -> dict[str, schema.DecodeRun]:
        """Returns the decode runs that measure the drafter.

        Args:
          checkpoint: Directory of the drafter's weights; None uses those before training.
        Returns:
          Decode runs by data set, such as math, or by data set and variant, such as math-block8
          and math-tree32.
        """
        trained = self.drafter
        if checkpoint is not None:
            trained = dataclasses.replace(trained, checkpoint=checkpoint, architecture=None)
        variants = {"": trained}
        for size in self.test.block_sizes:
            variants[f"-block{size}"] = dataclasses.replace(trained, block_size=size)
        for budget in self.test.trees:
            tree = tree_group(trained)(budget=budget)
            variants[f"-tree{budget}"] = dataclasses.replace(trained, tree=tree)
        decode = dataclasses.replace(self.test.decode, baseline=True)
        return {
            name + variant: self._decode_run(
                decode,
                drafter,
                schema.task_prompts(task, self.test.prompts),
            )
            for name, task in schema.named_tasks(self.test.tasks).items()
            for variant, drafter in variants.items()
        }

    def _decode_run(
        self,
        decode: schema.DecodeConfig,
        drafter: schema.DrafterConfig,
        prompts: schema.PromptsConfig,
    ) -> schema.DecodeRun:
        return schema.DecodeRun(
            target=self.target,
            drafter=drafter,
            decode=train_schema.with_slots(decode, self.mesh, self.sharding_rules),
            prompts=dataclasses.replace(
                prompts, thinking=self.data.thinking, raw_dir=self.data.raw_dir
            ),
            mesh=self.mesh,
            sharding_rules=self.sharding_rules,
            dtype=self.train.dtype,
        )


def tree_group(drafter: schema.DrafterConfig) -> type | None:
    """Returns the schema of a strategy's `tree` key, or None if it drafts no trees."""
    kinds = typing.get_args(typing.get_type_hints(type(drafter)).get("tree"))
    return next((kind for kind in kinds if dataclasses.is_dataclass(kind)), None)


def is_free(key: str) -> bool:
    """Returns whether a resumed distillation may change the dotted `key`."""
    return key.startswith("plan.") or train_schema.is_free(key)
