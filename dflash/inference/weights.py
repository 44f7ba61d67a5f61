"""The weights of models that do nothing but decode."""

from flax import nnx

from dflash.checkpoints import assembly
from dflash.checkpoints.assembly import Source
from dflash.layers.transformer import join_projections
from dflash.parallel.sharding import Sharding


def load(model: nnx.Module, source: Source, sharding: Sharding) -> None:
    """Fills an abstract target or drafter, and arranges its weights for decoding.

    Args:
      model: see `assembly.load_weights`.
      source: where the weights come from.
      sharding: what they run on.
    Raises:
      CheckpointError: the checkpoint is damaged, or does not fit the model.
    """
    assembly.load_weights(model, source)
    arrange(model, sharding)


def arrange(model: nnx.Module, sharding: Sharding) -> None:
    """Puts weights, or abstract ones, as the platform reads them fastest, in place.

    On a TPU projections of the same rows are joined; see docs/results/tpu_compile.md.
    """
    if sharding.platform == "tpu":
        join_projections(model)
