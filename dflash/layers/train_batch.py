"""What every loss is computed from."""

import dataclasses

import jax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainBatch:
    """Packed rows of T tokens, and what the target makes of them.

    Attributes:
      tokens: int32 [B, T].
      positions: int32 [B, T]; for rotary embedding, counted within each document.
      segment_ids: int32 [B, T]; rows of one document share a number, 0 is padding.
      loss_mask: [B, T]; nonzero where the token is a training target.
      features: [B, T, C·D]; of the target's tapped layers, for drafters that read them.
      hidden: [B, T, D]; the target's after its final norm, for losses that ask for its
        distribution. Row t makes that of token t + 1.
    """

    tokens: jax.Array
    positions: jax.Array
    segment_ids: jax.Array
    loss_mask: jax.Array
    features: jax.Array | None = None
    hidden: jax.Array | None = None
