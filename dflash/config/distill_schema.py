"""Every key of a distillation: from a target and questions to a drafter."""

import dataclasses
import pathlib
import typing
from collections.abc import Mapping
from typing import Literal

from dflash.config import schema, train_schema
from dflash.config.data_schema import DataConfig
from dflash.config.loss_schema import LossConfig, OptimizerConfig
from dflash.config.schema import location, option


@dataclasses.dataclass(frozen=True)
class AnswersConfig:
    """The questions that the target answers, and how it answers them."""

    made: str | None = location("file")  # another distillation's answers.jsonl; nothing is asked
    tasks: Mapping[str, int] = option({}, minimum=1)  # questions of a data set's training split
    files: tuple[str, ...] = location("file", ())  # further questions: JSONL, as prompts.file
    decode: schema.DecodeConfig = dataclasses.field(default_factory=schema.DecodeConfig)


@dataclasses.dataclass(frozen=True)
class HeldOutConfig:
    """The measurement of the finished drafter, against decoding without it."""

    tasks: tuple[str, ...] = ()  # data sets; none: no measurement
    # Also measured, beside what `drafter` says: smaller blocks, and trees of so many drafts.
    block_sizes: tuple[int, ...] = option((), minimum=2, maximum=schema.MAX_BLOCK_SIZE)
    trees: tuple[int, ...] = option((), minimum=1, maximum=1024)
    split: Literal["validation", "test"] = "test"
    prompts: int = option(40, minimum=1, maximum=schema.MAX_BATCH)  # of each data set
    decode: schema.DecodeConfig = dataclasses.field(default_factory=schema.DecodeConfig)


@dataclasses.dataclass(frozen=True)
class PlanConfig:
    """What the plan is made for."""

    chip: str | None = None  # such as v5p; None: that of this machine, and no times in a dry run
    prompt_tokens: int = option(256, minimum=1, maximum=schema.MAX_TOKENS)  # of a question, about


@dataclasses.dataclass(frozen=True)
class DistillRun:
    """Everything that `dflash distill` reads from its config.

    `data`, `loss`, `optimizer`, `train` and `evaluation` are those of training; the answers are
    the data set jsonl of `data.mixture`, or all of the data where there is no mixture.
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
        """The decode runs that make the answers, by the name of their questions."""
        if self.answers.made is not None:
            return {}
        sources = {
            name: schema.PromptsConfig(dataset=name, split="train", limit=count)
            for name, count in self.answers.tasks.items()
        }
        for number, file in enumerate(self.answers.files):
            sources[f"{number}-{pathlib.Path(file).stem}"] = schema.PromptsConfig(file=file)
        return {name: self.answer_run(source) for name, source in sources.items()}

    def answer_run(self, questions: schema.PromptsConfig) -> schema.DecodeRun:
        """The decode run that answers some questions."""
        return self._decode_run(self.answers.decode, schema.DrafterConfig(), questions)

    def train_run(self, answers: str) -> train_schema.TrainRun:
        """The training run on a file of answers."""
        data = dataclasses.replace(self.data, files=(*self.data.files, answers))
        names = {field.name for field in dataclasses.fields(train_schema.TrainRun)}
        shared = {name: value for name, value in vars(self).items() if name in names}
        return train_schema.TrainRun(**{**shared, "data": data})

    def test_runs(self, checkpoint: str | None) -> dict[str, schema.DecodeRun]:
        """The decode runs that measure the drafter.

        Args:
          checkpoint: A directory with its weights; None: those that training begins with.
        Returns:
          Each by its data set, such as math, or by data set and what is drafted, such as
          math-block8 and math-tree32.
        """
        trained = self.drafter
        if checkpoint is not None:
            trained = dataclasses.replace(trained, checkpoint=checkpoint, architecture=None)
        ways = {"": trained}
        for size in self.test.block_sizes:
            ways[f"-block{size}"] = dataclasses.replace(trained, block_size=size)
        for budget in self.test.trees:
            tree = tree_group(trained)(budget=budget)
            ways[f"-tree{budget}"] = dataclasses.replace(trained, tree=tree)
        decode = dataclasses.replace(self.test.decode, baseline=True)
        return {
            task + way: self._decode_run(
                decode,
                drafter,
                schema.PromptsConfig(dataset=task, split=self.test.split, limit=self.test.prompts),
            )
            for task in self.test.tasks
            for way, drafter in ways.items()
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
    """The class of a strategy's key `tree`; None if it drafts no trees."""
    kinds = typing.get_args(typing.get_type_hints(type(drafter)).get("tree"))
    return next((kind for kind in kinds if dataclasses.is_dataclass(kind)), None)


def is_free(key: str) -> bool:
    """Whether a continued distillation may change the dotted `key`."""
    return key.startswith("plan.") or train_schema.is_free(key)
