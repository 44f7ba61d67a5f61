"""Config groups of the loss and the optimizer, for training and distillation."""

import dataclasses
from typing import Literal

from dflash.config.schema import option


@dataclasses.dataclass(frozen=True)
class LossConfig:
    """Loss of a drafter, and the number of blocks per sequence."""

    # cross_entropy: cross-entropy with the data's tokens, with less weight on later draft
    # positions. dpace: cross-entropy with each position weighted by how much of the block depends
    # on it. kl: KL divergence from the target's distribution.
    name: Literal["cross_entropy", "dpace", "kl"] = "cross_entropy"
    # Draft positions over which the weight decays by a factor of e. None: derived from the block
    # size; 0: equal weights.
    gamma: float | None = option(None, minimum=0.0)
    # Smoothing of acceptance probabilities in dpace.
    alpha: float = option(0.5, minimum=0.0, maximum=1.0)
    # Weight of the KL divergence in kl; cross-entropy has the remaining weight.
    kl_weight: float = option(1.0, minimum=0.0, maximum=1.0)
    # Temperature at which the drafter and the target are compared: that of decoding.
    temperature: float = option(1.0, minimum=1e-3)
    num_anchors: int = option(512, minimum=1)  # Blocks per sequence, fewer in shorter rows.
    # Positions per sequence whose logits exist at once. Smaller chunks save memory, but read the
    # output head more often.
    chunk_tokens: int = option(128, minimum=1)

    @property
    def uses_target_hidden(self) -> bool:
        """Returns whether batches need the target's final hidden states."""
        return self.name == "kl"


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """Update rule and learning-rate schedule."""

    name: Literal["adamw", "muon"] = "adamw"  # muon updates matrices, and AdamW all else.
    learning_rate: float = option(6e-4, minimum=0.0)
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
