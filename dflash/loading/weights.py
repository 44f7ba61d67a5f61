"""Weights of models, arranged for decoding."""

from flax import nnx

from dflash.kernels import library_cpu
from dflash.layers.transformer import join_projections, use_panels
from dflash.loading import models
from dflash.loading.models import Source
from dflash.parallel.sharding import Sharding


def load(model: nnx.Module, source: Source, sharding: Sharding) -> None:
    """Fills an abstract target or drafter, and arranges its weights for decoding.

    Args:
      model: Abstract target or drafter; see `models.load_weights`.
      source: Source of the weights.
      sharding: Sharding of the models.
    Raises:
      CheckpointError: The checkpoint is damaged, or does not fit the model.
    """
    models.load_weights(model, source)
    arrange(model, sharding)


def arrange(model: nnx.Module, sharding: Sharding) -> None:
    """Arranges weights, abstract or not, in the layout that the platform reads fastest, in place.

    On a TPU, and where a CPU has kernels in C++, projections of the same rows are joined; see
    docs/results/tpu_compile.md. These kernels read matrices in panels; see
    docs/results/decode_cpu.md.
    """
    if sharding.platform == "tpu" or library_cpu.serves(sharding):
        join_projections(model)
    use_panels(model)
