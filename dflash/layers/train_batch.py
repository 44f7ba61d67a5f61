"""Training batch, the input of every loss."""

import dataclasses

import jax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainBatch:
    """Packed rows of T tokens, with the target's outputs for them.

    Attributes:
      tokens: int32 [B, T].
      positions: int32 [B, T]; for rotary embedding, counted within each document.
      segment_ids: int32 [B, T]; tokens of one document share an id. 0 is padding.
      loss_mask: [B, T]; nonzero where the token is a training target.
      features: [B, T, C·D]; target features, for drafters that read them.
      hidden: [B, T, D]; hidden states of the target after its final norm, for losses on its
        distribution. Row t predicts token t + 1.
    """

    tokens: jax.Array
    positions: jax.Array
    segment_ids: jax.Array
    loss_mask: jax.Array
    features: jax.Array | None = None
    hidden: jax.Array | None = None
