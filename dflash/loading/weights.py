"""The weights of models that do nothing but decode."""

from flax import nnx

from dflash.layers.transformer import join_projections
from dflash.loading import models
from dflash.loading.models import Source
from dflash.parallel.sharding import Sharding


def load(model: nnx.Module, source: Source, sharding: Sharding) -> None:
    """Fills an abstract target or drafter, and arranges its weights for decoding.

    Args:
      model: see `models.load_weights`.
      source: where the weights come from.
      sharding: what they run on.
    Raises:
      CheckpointError: the checkpoint is damaged, or does not fit the model.
    """
    models.load_weights(model, source)
    arrange(model, sharding)


def arrange(model: nnx.Module, sharding: Sharding) -> None:
    """Puts weights, or abstract ones, as the platform reads them fastest, in place.

    On a TPU projections of the same rows are joined; see docs/results/tpu_compile.md.
    """
    if sharding.platform == "tpu":
        join_projections(model)
