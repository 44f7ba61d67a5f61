"""Every key of a training config, and which of them may change when a run is continued."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Literal

from dflash.config import schema
from dflash.config.data_schema import DataConfig
from dflash.config.loss_schema import LossConfig, OptimizerConfig
from dflash.config.schema import location, option


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Length and precision of a run, and how often it logs and saves."""

    steps: int | None = option(None, minimum=1)  # total optimizer steps; None: from `epochs`
    epochs: float | None = option(None, minimum=0.0)  # passes over the training data
    batch_size: int = option(8, minimum=1)  # packed rows per step, over all devices
    # Seed of initial weights and of anchors.
    seed: int = option(0, minimum=0, maximum=schema.MAX_SEED)
    dtype: schema.DType = "bfloat16"  # dtype of the computation; trained weights are float32
    remat: bool = False  # recompute activations in the backward pass
    # online: the target runs in every step; cached: once over the data, its features go to disk.
    features: Literal["online", "cached"] = "online"
    feature_cache: str | None = location("directory")  # None: features/ in the work directory
    log_every: int = option(10, minimum=1)  # steps between log lines
    checkpoint_every: int = option(500, minimum=1)  # steps between checkpoints
    keep_last: int = option(2, minimum=1)  # checkpoints to keep, in addition to the best
    export_dtype: schema.DType = "bfloat16"  # dtype of the weights in hf/


@dataclasses.dataclass(frozen=True)
class EvaluationConfig:
    """How checkpoints are evaluated: loss on held-out text, and τ in the decode engine."""

    every: int = option(1000, minimum=1)  # steps between evaluations
    # Evaluations without a better score after which training ends; 0: it takes all its steps.
    patience: int = option(8, minimum=0)
    batches: int = option(4, minimum=0)  # batches of held-out text; 0: no held-out loss
    prompts: int = option(12, minimum=0)  # held-out prompts to decode; 0: no τ
    prompts_file: str | None = location("file")  # JSONL, as prompts.file; None: the data's own
    decode: schema.DecodeConfig = dataclasses.field(default_factory=schema.DecodeConfig)


@dataclasses.dataclass(frozen=True)
class TrainRun:
    """Everything that `dflash train` reads from its config.

    The checkpoint of the trained model gives its initial weights; `random` starts from scratch.
    """

    task: Literal["drafter", "target"] = "drafter"  # which of the two is trained
    target: schema.TargetConfig = dataclasses.field(default_factory=schema.TargetConfig)
    drafter: schema.DrafterConfig = dataclasses.field(default_factory=schema.DrafterConfig)
    # A directory, or hf:org/name; None: the target's.
    tokenizer: str | None = location("tokenizer")
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    loss: LossConfig = dataclasses.field(default_factory=LossConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    train: TrainConfig = dataclasses.field(default_factory=TrainConfig)
    evaluation: EvaluationConfig = dataclasses.field(default_factory=EvaluationConfig)
    mesh: schema.MeshConfig = dataclasses.field(default_factory=schema.MeshConfig)
    sharding_rules: Mapping[str, tuple[str, ...]] = option(schema.SHARDING_RULES)

    @property
    def evaluation_decode(self) -> schema.DecodeConfig:
        """How held-out prompts are decoded: `evaluation.decode`, with slots for every replica."""
        return with_slots(self.evaluation.decode, self.mesh, self.sharding_rules)


def with_slots(
    decode: schema.DecodeConfig,
    mesh: schema.MeshConfig,
    sharding_rules: Mapping[str, tuple[str, ...]],
) -> schema.DecodeConfig:
    """A decode group whose number of slots is rounded up to a multiple of the mesh's replicas.

    The output does not depend on the number of slots.
    """
    replicas = math.prod(getattr(mesh, axis) for axis in sharding_rules.get("batch", ()))
    slots = math.ceil(decode.batch_size / replicas) * replicas
    return dataclasses.replace(decode, batch_size=slots)


# Keys, or groups of keys, that a continued run may change: they affect where it runs and how often
# it logs, saves and evaluates, not what it learns. (Another mesh or remat changes the order of
# sums, so the result is then the same up to rounding, not bit for bit.)
FREE_KEYS = (
    "mesh",
    "sharding_rules",
    "train.remat",
    "train.feature_cache",
    "train.log_every",
    "train.checkpoint_every",
    "train.keep_last",
    "train.export_dtype",
    "evaluation",
)


def is_free(key: str) -> bool:
    """Whether a continued run may change the dotted `key`."""
    return any(key == free or key.startswith(f"{free}.") for free in FREE_KEYS)
