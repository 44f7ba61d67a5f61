"""Conversion of checkpoints between Hugging Face's layout, the native Orbax one and GGUF files."""

import functools
import pathlib
import time
from collections.abc import Callable

import jax.numpy as jnp
from flax import nnx

from dflash.checkpoints import checkpoint, files, gguf_model
from dflash.config import registry, schema
from dflash.loading import models
from dflash.parallel import sharding


def convert(
    source: str,
    destination: pathlib.Path,
    *,
    to: checkpoint.Layout,
    dtype: str | None = None,
    tokenizer: str | None = None,
) -> str:
    """Converts a checkpoint; `destination` appears whole or not at all.

    Args:
      source: Directory, GGUF file or hf:org/name.
      destination: Directory to write, which must be empty or not exist, or a new GGUF file.
      to: Layout to write.
      dtype: Dtype to write, "float32" or "bfloat16"; None keeps the stored one.
      tokenizer: Checkpoint whose tokenizer a GGUF file gets; None for that of `source`.
    Returns:
      One line that describes the written checkpoint.
    Raises:
      CheckpointError: The source is unusable, or the destination cannot be written.
    """
    started = time.monotonic()
    files.check_vacant(destination)  # Check before minutes of work.
    directory = checkpoint.resolve(source)
    dtype = dtype or str(checkpoint.stored_dtype(directory))
    name, module = build_abstract(directory, dtype)
    write = _writer(to, module, directory, tokenizer)
    checkpoint.load(module, directory)
    count = write(module, destination)
    written = [destination, *destination.rglob("*")]
    size = sum(file.stat().st_size for file in written if file.is_file())
    return (
        f"{destination}: {name}, {count} tensors, {size / 1e9:.3g} GB, {dtype}, {to} layout, "
        f"written in {time.monotonic() - started:.1f} s"
    )


def _writer(
    to: checkpoint.Layout, module: nnx.Module, directory: pathlib.Path, tokenizer: str | None
) -> Callable[[nnx.Module, pathlib.Path], int]:
    """Returns the function that writes a layout and returns the number of tensors.

    Whatever the metadata of a GGUF file lack is found before weights are read.
    """
    if to != "gguf":
        save = checkpoint.save_hf if to == "hf" else checkpoint.save_orbax
        config = checkpoint.read_config(directory)
        return functools.partial(save, config=config, companions=directory)
    from dflash.checkpoints import gguf_vocabulary, gguf_writer  # They need further packages.

    architecture = type(module).architecture_from_hf(checkpoint.read_config(directory))
    config = type(module).config_to_hf(architecture)
    holder = directory if tokenizer is None else checkpoint.resolve(tokenizer)
    metadata = gguf_vocabulary.values_of(holder, config["vocab_size"])
    metadata |= gguf_model.of_config(config).metadata_of(config)
    return functools.partial(gguf_writer.save, config=config, metadata=metadata)


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
