"""Schema of a training config: data, loss, optimizer; and the keys that may change on resuming."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Literal

from dflash.config import schema
from dflash.config.schema import location, option


@dataclasses.dataclass(frozen=True)
class TfdsConfig:
    """Data set of tensorflow-datasets, and how its rows become conversations.

    Either `messages` names a field, or `prompt` and `response` do.
    """

    name: str | None = None  # As in tfds.data_source: "name", "name/config:1.0.0".
    data_dir: str | None = location("disk")  # None stands for ~/tensorflow_datasets.
    # Split of tfds for train, validation and test, such as {validation: "train[:1%]"}. Without one,
    # validation and test are held_out_percent of the questions of train.
    splits: Mapping[str, str] = option({})
    messages: str | None = None  # Field with a list of messages, each with role and content.
    prompt: str | None = None  # Field with a question.
    response: str | None = None  # Field with its answer.


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Data of a training run; dflash/config/registry.py lists the names of data sets."""

    mixture: Mapping[str, float] = option({}, minimum=0.0)  # Share of the rows, by data set.
    # Files of the data set jsonl, which is the only one if no other has a share.
    files: tuple[str, ...] = location("file", ())
    tfds: TfdsConfig = dataclasses.field(default_factory=TfdsConfig)  # The data set tfds.
    # Percentage of jsonl and tfds for each of validation and test.
    held_out_percent: float = option(1.0, minimum=0.0, maximum=40.0)
    # Tokens per row; longer conversations are truncated.
    length: int = option(1024, minimum=2, maximum=schema.MAX_TOKENS)
    seed: int = option(0, minimum=0, maximum=2**31 - 1)  # Seed of the order of rows.
    thinking: bool | None = None  # Same as prompts.thinking.
    data_dir: str | None = location("disk")  # None: ~/.cache/dflash/datasets.
    raw_dir: str | None = location("disk")  # Files of published sets; None: raw/ in data_dir.

    @property
    def shares(self) -> dict[str, float]:
        """Mixture without data sets of share 0; shares need not add up to 1."""
        shares = {name: share for name, share in self.mixture.items() if share}
        if not shares and self.files and "jsonl" not in self.mixture:
            return {"jsonl": 1.0}
        return shares


CANDIDATE_KL = "candidate_kl"


@dataclasses.dataclass(frozen=True)
class LossConfig:
    """Loss of a drafter, and the number of blocks per sequence."""

    # cross_entropy: cross-entropy with the data's tokens, with less weight on later draft
    # positions. dpace: cross-entropy with each position weighted by how much of the block depends
    # on it. kl: KL divergence from the target's distribution. candidate_kl: for drafters that
    # choose among likely tokens (dflash2, ubtree), KL divergence among these, given the true token
    # before them.
    name: Literal["cross_entropy", "dpace", "kl", "candidate_kl"] = "cross_entropy"
    # Draft positions over which the weight decays by a factor of e. None: derived from the block
    # size; 0: equal weights.
    gamma: float | None = option(None, minimum=0.0)
    # Smoothing of acceptance probabilities in dpace.
    alpha: float = option(0.5, minimum=0.0, maximum=1.0)
    # Weight of the KL divergence in kl; cross-entropy has the remaining weight.
    kl_weight: float = option(1.0, minimum=0.0, maximum=1.0)
    # Likely tokens of each draft position in candidate_kl, at most as many as the drafter has.
    num_candidates: int = option(256, minimum=2, maximum=65536)
    # Weight of the cross-entropy of base logits in candidate_kl.
    base_weight: float = option(0.1, minimum=0.0)
    # Temperature at which the drafter and the target are compared: that of decoding.
    temperature: float = option(1.0, minimum=1e-3)
    num_anchors: int = option(512, minimum=1)  # Blocks per sequence, fewer in shorter rows.
    # Positions per sequence whose logits exist at once. Smaller chunks save memory, but read the
    # output head more often.
    chunk_tokens: int = option(128, minimum=1)

    @property
    def uses_target_hidden(self) -> bool:
        """Returns whether batches need the target's final hidden states."""
        return self.name in ("kl", CANDIDATE_KL)


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """Update rule and learning-rate schedule."""

    name: Literal["adamw", "muon"] = "adamw"  # muon updates matrices, and AdamW all else.
    learning_rate: float = option(6e-4, minimum=0.0)
    # Learning rates of parts of the model with one of their own, by the beginning of their
    # parameters' names, such as {candidate_selector: 6e-4}.
    learning_rates: Mapping[str, float] = option({}, minimum=0.0)
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    warmup_fraction: float = option(0.04, minimum=0.0, maximum=1.0)  # Fraction of all steps.
    # Final learning rate, as a fraction of learning_rate.
    final_fraction: float = option(0.0, minimum=0.0, maximum=1.0)
    weight_decay: float = option(0.01, minimum=0.0)  # Not applied to norms and embeddings.
    beta1: float = option(0.9, minimum=0.0, maximum=0.9999)
    beta2: float = option(0.95, minimum=0.0, maximum=0.99999)
    epsilon: float = option(1e-8, minimum=0.0)
    momentum: float = option(0.95, minimum=0.0, maximum=0.9999)  # Momentum of muon.
    clip_norm: float = option(1.0, minimum=0.0)  # Maximum global gradient norm; 0: no clipping.
    accumulate_steps: int = option(1, minimum=1)  # Microbatches per step.


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
    # Directory that keeps the target's features of all rows, for later epochs and runs. A drafter
    # then trains without its target, except for rows that are new. None: compute them every time.
    keep_features: str | None = location("disk")
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
    "train.keep_features",
    "train.log_every",
    "train.checkpoint_every",
    "train.keep_last",
    "train.export_dtype",
    "evaluation",
)


def is_free(key: str) -> bool:
    """Returns whether a resumed run may change the dotted `key`."""
    return any(key == free or key.startswith(f"{free}.") for free in FREE_KEYS)


@dataclasses.dataclass(frozen=True)
class UpkeepConfig:
    """Amount of training of the drafter on the policy's rollouts."""

    every: int = option(0, minimum=0)  # Updates of the policy between trainings; 0: never.
    # Train only while τ, as a mean of four steps, is below this fraction of its highest so far. A
    # drafter that still fits learns mostly noise from a few rollouts. Above 1: always train.
    below: float = option(0.8, minimum=0.0, maximum=100.0)
    steps: int = option(4, minimum=1)  # Optimizer steps per training.
    batch_size: int = option(8, minimum=1)  # Rollouts per step.
    seed: int = option(
        0, minimum=0, maximum=schema.MAX_SEED
    )  # Seed of the order and of the anchors.
    directory: str | None = location("directory")  # Directory of the checkpoints; None: none.
    keep_last: int = option(2, minimum=1)  # Checkpoints to keep.


@dataclasses.dataclass(frozen=True)
class UpkeepRun:
    """Groups of the options that concern the training of the drafter."""

    train: UpkeepConfig = dataclasses.field(default_factory=UpkeepConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    loss: LossConfig = dataclasses.field(default_factory=LossConfig)
