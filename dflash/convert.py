"""Converts a checkpoint between the Hugging Face layout and the native Orbax one.

dflash convert SOURCE DESTINATION --to=orbax|hf [--dtype=float32|bfloat16]
"""

import os
import pathlib
import time
from typing import TYPE_CHECKING

from absl import flags

from dflash import errors
from dflash.checkpoints import checkpoint, files
from dflash.cli import preflight
from dflash.cli import subcommand as cli
from dflash.config import registry, schema
from dflash.storage import paths

if TYPE_CHECKING:
    from flax import nnx


def _define_flags(values: flags.FlagValues) -> None:
    where = {"flag_values": values}
    flags.DEFINE_enum("to", None, ["orbax", "hf"], "Layout to write: orbax or hf.", **where)
    flags.DEFINE_enum(
        "dtype",
        None,
        ["float32", "bfloat16"],
        "Dtype to write, float32 or bfloat16; as stored by default.",
        **where,
    )


SUBCOMMAND = cli.Subcommand(
    "convert",
    "Converts a checkpoint between the Hugging Face layout and the native Orbax one. SOURCE is a "
    "directory or hf:org/name, of a target or a drafter with weights; config.json says which. "
    "DESTINATION appears whole or not at all. Tokenizer, generation and license files are copied.",
    examples=(
        "dflash convert hf:Qwen/Qwen3-4B /data/qwen3_4b --to=orbax",
        "dflash convert /data/qwen3_4b /data/qwen3_4b_hf --to=hf --dtype=bfloat16",
    ),
    arguments=("SOURCE", "DESTINATION"),
    define_flags=_define_flags,
    cpu_only=True,  # nothing is computed, and an accelerator's memory would limit the model's size
)


def run(
    source: str | os.PathLike,
    destination: str | os.PathLike,
    *,
    to: checkpoint.Layout,
    dtype: str | None = None,
) -> pathlib.Path:
    """Converts a checkpoint, as `dflash convert` does, and prints a line about it.

    Args:
      source: directory or hf:org/name.
      destination: must not exist, or be empty.
      to: the layout to write, "hf" or "orbax".
      dtype: "float32" or "bfloat16"; None keeps what is stored.
    Returns:
      The directory that was written.
    Raises:
      UserError: The command would exit with an error.
    """
    _convert(cli.parse(SUBCOMMAND, source, destination, to=to, dtype=dtype))
    return paths.to_path(destination)


def _convert(command: cli.Command) -> None:
    source, destination = command.arguments
    if command.flags["to"] is None:
        raise errors.ConfigError(f"--to is missing; usage: {SUBCOMMAND.usage}; see --help")
    for place in (source, destination):
        preflight.check_bucket(place)
    files.check_vacant(paths.to_path(destination))
    preflight.check_writable(destination)
    print(convert(source, paths.to_path(destination), **command.flags))


def convert(
    source: str, destination: pathlib.Path, *, to: checkpoint.Layout, dtype: str | None = None
) -> str:
    """Converts a checkpoint; `destination` appears whole or not at all.

    Args:
      source: directory or hf:org/name.
      destination: must not exist, or be empty.
      to: the layout to write.
      dtype: "float32" or "bfloat16"; None keeps what is stored.
    Returns:
      One line that says what was written.
    Raises:
      CheckpointError: the source is unusable, or the destination cannot be written.
    """
    started = time.monotonic()
    files.check_vacant(destination)  # before minutes of work
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


def build_abstract(directory: pathlib.Path, dtype: str) -> tuple[str, "nnx.Module"]:
    """Builds the module that config.json describes, without weights, on one device.

    Returns:
      Its registered name, and the module.
    Raises:
      CheckpointError: no registered target or drafter has this architecture.
    """
    import jax.numpy as jnp

    from dflash.loading import models
    from dflash.parallel import sharding

    config = checkpoint.read_config(directory)
    name, cls = models.find_class(config, directory, {**registry.TARGETS, **registry.DRAFTERS})
    one_device = sharding.make_sharding(dict.fromkeys(sharding.MESH_AXES, 1), schema.SHARDING_RULES)
    architecture = cls.architecture_from_hf(config)
    return name, cls(architecture, dtype=jnp.dtype(dtype), sharding=one_device)


main = cli.entry_point(SUBCOMMAND, _convert)

if __name__ == "__main__":
    main()
