"""Conversion of checkpoints between the layouts of Hugging Face, MaxText, Orbax and GGUF files."""

import functools
import pathlib
import time
from collections.abc import Callable

import jax.numpy as jnp
from flax import nnx

from dflash import errors
from dflash.checkpoints import checkpoint, files, maxtext_io
from dflash.checkpoints.gguf import kinds
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
    like: str | None = None,
    scan_layers: bool = True,
) -> str:
    """Converts a checkpoint; `destination` appears whole or not at all.

    Args:
      source: Directory, GGUF file or hf:org/name; for MaxText's layout the directory of a run, of a
        step, or items/ in it.
      destination: Directory to write, which must be empty or not exist, or a new GGUF file.
      to: Layout to write.
      dtype: Dtype to write, "float32" or "bfloat16"; None keeps the stored one.
      tokenizer: Checkpoint whose tokenizer a GGUF file gets; None for that of `source`.
      like: Checkpoint with the config.json and tokenizer of a source in MaxText's layout.
      scan_layers: Stack the layers in MaxText's layout.
    Returns:
      One line that describes the written checkpoint.
    Raises:
      CheckpointError: The source is unusable, or the destination cannot be written.
    """
    started = time.monotonic()
    files.check_vacant(destination)  # Check before minutes of work.
    directory = checkpoint.resolve(source)
    items = maxtext_io.find_items(directory)
    described = _find_description(directory, items, like)
    if dtype is None and items is None:
        dtype = str(checkpoint.stored_dtype(directory))
    elif dtype is None:
        dtype = str(checkpoint.narrowest(maxtext_io.stored_dtypes(items)))
    name, module = build_abstract(described, dtype)
    write = _writer(to, module, described, tokenizer, scan_layers)
    if items is None:
        checkpoint.load(module, directory)
    else:
        maxtext_io.load(module, items)
    count = write(module, destination)
    written = [destination, *destination.rglob("*")]
    size = sum(file.stat().st_size for file in written if file.is_file())
    return (
        f"{destination}: {name}, {count} tensors, {size / 1e9:.3g} GB, {dtype}, {to} layout, "
        f"written in {time.monotonic() - started:.1f} s"
    )


def _find_description(
    directory: pathlib.Path, items: pathlib.Path | None, like: str | None
) -> pathlib.Path:
    """Returns the directory with config.json and tokenizer: `like` for MaxText's layout alone."""
    if items is None and like is None:
        return directory
    if items is None:
        raise errors.CheckpointError(
            f"--like: {directory} has no items/ of MaxText, and a config.json of its own; leave "
            "--like out"
        )
    if like is not None:
        return checkpoint.resolve(like)
    if (items.parents[1] / files.CONFIG).is_file():  # Written by this command.
        return items.parents[1]
    raise errors.CheckpointError(
        f"{items}: MaxText stores neither config.json nor tokenizer; give --like=DIRECTORY or "
        "--like=hf:org/name of the same model"
    )


def _writer(
    to: checkpoint.Layout,
    module: nnx.Module,
    directory: pathlib.Path,
    tokenizer: str | None,
    scan_layers: bool,
) -> Callable[[nnx.Module, pathlib.Path], int]:
    """Returns the function that writes a layout and returns the number of tensors.

    Whatever the metadata of a GGUF file lack is found before weights are read.
    """
    if to != "gguf":
        options = {"scan_layers": scan_layers} if to == "maxtext" else {}
        config = checkpoint.read_config(directory)
        return functools.partial(
            checkpoint.save, layout=to, config=config, companions=directory, **options
        )
    from dflash.checkpoints.gguf import tokenizer_metadata, writer  # They need further packages.

    architecture = type(module).architecture_from_hf(checkpoint.read_config(directory))
    config = type(module).config_to_hf(architecture)
    holder = directory if tokenizer is None else checkpoint.resolve(tokenizer)
    metadata = tokenizer_metadata.values_of(holder, config["vocab_size"])
    metadata |= kinds.of_config(config).metadata_of(config)
    return functools.partial(writer.save, config=config, metadata=metadata)


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
    architecture = cls.architecture_from_hf(
        models.described(cls, models.Source(directory, config, 0))
    )
    return name, cls(architecture, dtype=jnp.dtype(dtype), sharding=one_device)
