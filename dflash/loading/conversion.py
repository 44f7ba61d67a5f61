"""Conversion of checkpoints between the Hugging Face layout and the native Orbax one."""

import pathlib
import time

import jax.numpy as jnp
from flax import nnx

from dflash.checkpoints import checkpoint, files
from dflash.config import registry, schema
from dflash.loading import models
from dflash.parallel import sharding


def convert(
    source: str, destination: pathlib.Path, *, to: checkpoint.Layout, dtype: str | None = None
) -> str:
    """Converts a checkpoint; `destination` appears whole or not at all.

    Args:
      source: Directory or hf:org/name.
      destination: Directory to write, which must be empty or not exist.
      to: Layout to write.
      dtype: Dtype to write, "float32" or "bfloat16"; None keeps the stored one.
    Returns:
      One line that describes the written checkpoint.
    Raises:
      CheckpointError: The source is unusable, or the destination cannot be written.
    """
    started = time.monotonic()
    files.check_vacant(destination)  # Check before minutes of work.
    directory = checkpoint.resolve(source)
    config = checkpoint.read_config(directory)
    dtype = dtype or str(checkpoint.stored_dtype(directory))
    name, module = build_abstract(directory, dtype)
    checkpoint.load(module, directory)
    write = checkpoint.save_hf if to == "hf" else checkpoint.save_orbax
    count = write(module, destination, config, companions=directory)
    size = sum(file.stat().st_size for file in destination.rglob("*") if file.is_file())
    return (
        f"{destination}: {name}, {count} tensors, {size / 1e9:.3g} GB, {dtype}, {to} layout, "
        f"written in {time.monotonic() - started:.1f} s"
    )


def build_abstract(directory: pathlib.Path, dtype: str) -> tuple[str, nnx.Module]:
    """Builds the model that config.json describes, without weights, on one device.

    Returns:
      The registered name of its class, and the module.
    Raises:
      CheckpointError: No registered target or drafter has this architecture.
    """
    config = checkpoint.read_config(directory)
    name, cls = models.find_class(config, directory, {**registry.TARGETS, **registry.DRAFTERS})
    one_device = sharding.make_sharding(dict.fromkeys(sharding.MESH_AXES, 1), schema.SHARDING_RULES)
    architecture = cls.architecture_from_hf(config)
    return name, cls(architecture, dtype=jnp.dtype(dtype), sharding=one_device)
