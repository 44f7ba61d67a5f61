"""Config groups of the loss and of the optimizer, shared by everything that trains."""

import dataclasses
from typing import Literal

from dflash.config.schema import option


@dataclasses.dataclass(frozen=True)
class LossConfig:
    """The loss of a drafter, and the number of blocks per sequence."""

    # cross_entropy: on the data's tokens, later draft positions weighted less; dpace: likewise,
    # each position weighted by how much of the block depends on it; kl: divergence from the
    # target's distribution.
    name: Literal["cross_entropy", "dpace", "kl"] = "cross_entropy"
    # Draft positions over which the weight falls by e. None: by block size; 0: equal weights.
    gamma: float | None = option(None, minimum=0.0)
    # Smoothing of acceptance probabilities in dpace.
    alpha: float = option(0.5, minimum=0.0, maximum=1.0)
    # Weight of the divergence in kl; the rest is cross-entropy.
    kl_weight: float = option(1.0, minimum=0.0, maximum=1.0)
    num_anchors: int = option(512, minimum=1)  # blocks per sequence
    # Positions of a sequence whose logits exist at once. Fewer read the output head more often.
    chunk_tokens: int = option(128, minimum=1)

    @property
    def uses_target_hidden(self) -> bool:
        """Whether batches need the target's final hidden states."""
        return self.name == "kl"


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """The update rule and its learning rate over time."""

    name: Literal["adamw", "muon"] = "adamw"  # muon: for matrices; AdamW for the rest
    learning_rate: float = option(6e-4, minimum=0.0)
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    warmup_fraction: float = option(0.04, minimum=0.0, maximum=1.0)  # fraction of all steps
    # Final learning rate, as a fraction of learning_rate.
    final_fraction: float = option(0.0, minimum=0.0, maximum=1.0)
    weight_decay: float = option(0.01, minimum=0.0)  # not applied to norms and embeddings
    beta1: float = option(0.9, minimum=0.0, maximum=0.9999)
    beta2: float = option(0.95, minimum=0.0, maximum=0.99999)
    epsilon: float = option(1e-8, minimum=0.0)
    momentum: float = option(0.95, minimum=0.0, maximum=0.9999)  # of muon
    clip_norm: float = option(1.0, minimum=0.0)  # maximum global gradient norm; 0: off
    accumulate_steps: int = option(1, minimum=1)  # microbatches per step
