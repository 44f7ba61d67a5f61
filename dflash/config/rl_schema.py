"""Config of a drafter's training on rollouts; see `rl.upkeep`."""

import dataclasses

from dflash.config.loss_schema import LossConfig, OptimizerConfig
from dflash.config.schema import MAX_SEED, location, option


@dataclasses.dataclass(frozen=True)
class UpkeepConfig:
    """Amount of training of the drafter on the policy's rollouts."""

    every: int = option(0, minimum=0)  # Updates of the policy between trainings; 0: never.
    # Train only while τ, as a mean of four steps, is below this fraction of its highest so far. A
    # drafter that still fits learns mostly noise from a few rollouts. Above 1: always train.
    below: float = option(0.8, minimum=0.0, maximum=100.0)
    steps: int = option(4, minimum=1)  # Optimizer steps per training.
    batch_size: int = option(8, minimum=1)  # Rollouts per step.
    seed: int = option(0, minimum=0, maximum=MAX_SEED)  # Seed of the order and of the anchors.
    directory: str | None = location("directory")  # Directory of the checkpoints; None: none.
    keep_last: int = option(2, minimum=1)  # Checkpoints to keep.


@dataclasses.dataclass(frozen=True)
class UpkeepRun:
    """Groups of the options that concern the training of the drafter."""

    train: UpkeepConfig = dataclasses.field(default_factory=UpkeepConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    loss: LossConfig = dataclasses.field(default_factory=LossConfig)
