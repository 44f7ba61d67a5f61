"""Schema of a training config, and the keys that may change when a run is resumed."""

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
    """Length, precision, logging and checkpoints of a training run."""

    steps: int | None = option(None, minimum=1)  # Total optimizer steps; None: from `epochs`.
    epochs: float | None = option(None, minimum=0.0)  # Passes over the training data.
    batch_size: int = option(8, minimum=1)  # Packed rows per step, over all devices.
    # Seed of the initial weights and of the anchors.
    seed: int = option(0, minimum=0, maximum=schema.MAX_SEED)
    dtype: schema.DType = "bfloat16"  # Compute dtype; trained weights are float32.
    remat: bool = False  # Recompute activations in the backward pass.
    # online: the target runs in every step. cached: the target runs once over the data and its
    # features are stored on disk.
    features: Literal["online", "cached"] = "online"
    feature_cache: str | None = location("directory")  # None: features/ in the work directory.
    log_every: int = option(10, minimum=1)  # Steps between log lines.
    checkpoint_every: int = option(500, minimum=1)  # Steps between checkpoints.
    keep_last: int = option(2, minimum=1)  # Checkpoints to keep, besides the best.
    export_dtype: schema.DType = "bfloat16"  # Dtype of the weights in hf/.


@dataclasses.dataclass(frozen=True)
class EvaluationConfig:
    """Evaluation of the weights: held-out loss, and mean acceptance length (τ) by decoding."""

    every: int = option(1000, minimum=1)  # Steps between evaluations.
    # Evaluations without a better score after which training ends; 0: no early stopping.
    patience: int = option(8, minimum=0)
    batches: int = option(4, minimum=0)  # Batches of held-out text; 0: no held-out loss.
    prompts: int = option(12, minimum=0)  # Held-out prompts to decode; 0: no τ.
    prompts_file: str | None = location("file")  # JSONL like prompts.file; None: held-out data.
    decode: schema.DecodeConfig = dataclasses.field(default_factory=schema.DecodeConfig)


@dataclasses.dataclass(frozen=True)
class TrainRun:
    """Config of `dflash train`.

    The trained model starts from the weights of its `checkpoint`; `random` starts from scratch.
    """

    task: Literal["drafter", "target"] = "drafter"  # Model to train.
    target: schema.TargetConfig = dataclasses.field(default_factory=schema.TargetConfig)
    drafter: schema.DrafterConfig = dataclasses.field(default_factory=schema.DrafterConfig)
    # Directory, or hf:org/name; None: the target's tokenizer.
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
        """`evaluation.decode`, with the batch size rounded up to a multiple of the replicas."""
        return with_slots(self.evaluation.decode, self.mesh, self.sharding_rules)


def with_slots(
    decode: schema.DecodeConfig,
    mesh: schema.MeshConfig,
    sharding_rules: Mapping[str, tuple[str, ...]],
) -> schema.DecodeConfig:
    """Rounds a decode group's batch size up to a multiple of the mesh's data replicas.

    The output does not depend on the batch size.
    """
    replicas = math.prod(getattr(mesh, axis) for axis in sharding_rules.get("batch", ()))
    slots = math.ceil(decode.batch_size / replicas) * replicas
    return dataclasses.replace(decode, batch_size=slots)


# Keys and groups that a resumed run may change. They affect where a run executes and how often it
# logs, saves and evaluates, but not what it learns. Another mesh or remat changes the order of
# sums, so that results agree up to rounding, not bit for bit.
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
    """Returns whether a resumed run may change the dotted `key`."""
    return any(key == free or key.startswith(f"{free}.") for free in FREE_KEYS)
