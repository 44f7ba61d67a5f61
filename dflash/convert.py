"""Converts a checkpoint between the Hugging Face layout and the native Orbax one.

    python -m dflash.convert SOURCE DESTINATION --to=orbax|hf [--dtype=float32|bfloat16]

SOURCE is a directory or hf:org/name, of a target or a drafter with weights; config.json says which.
Weights keep their dtype unless --dtype is given. Tokenizer, generation and license files are
copied.
"""

import os
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from absl import flags

from dflash import cli, errors, registry
from dflash.checkpoints import checkpoint, files
from dflash.config import schema

if TYPE_CHECKING:
    from flax import nnx

USAGE = (
    "usage: python -m dflash.convert SOURCE DESTINATION --to=orbax|hf [--dtype=float32|bfloat16]"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit status: 0, or that of the error printed on stderr."""
    return cli.status_of(lambda: _run(sys.argv[1:] if argv is None else argv))


def _run(argv: Sequence[str]) -> None:
    values, positional = _parse(argv)
    if values.help:
        print(__doc__)
        return
    source, destination = positional
    print(convert(source, pathlib.Path(destination), to=values.to, dtype=values.dtype))


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

    from dflash.checkpoints import assembly
    from dflash.parallel import sharding

    config = checkpoint.read_config(directory)
    name, cls = assembly.find_class(config, directory, {**registry.TARGETS, **registry.DRAFTERS})
    one_device = sharding.make_sharding(dict.fromkeys(sharding.MESH_AXES, 1), schema.SHARDING_RULES)
    architecture = cls.architecture_from_hf(config)
    return name, cls(architecture, dtype=jnp.dtype(dtype), sharding=one_device)


def _parse(argv: Sequence[str]) -> tuple[flags.FlagValues, list[str]]:
    """Reads the command line.

    Raises:
      ConfigError: wrong usage.
    """
    values = flags.FlagValues()
    where = {"flag_values": values}
    flags.DEFINE_enum("to", None, ["orbax", "hf"], "Layout to write.", **where)
    flags.DEFINE_enum("dtype", None, ["float32", "bfloat16"], "Default: as stored.", **where)
    positional = cli.parse_arguments(values, argv, ("SOURCE", "DESTINATION"), USAGE)
    if not values.help and values.to is None:
        raise errors.ConfigError(f"--to is missing; {USAGE}")
    return values, positional


if __name__ == "__main__":
    # Nothing is computed, and an accelerator's memory would limit the model's size.
    os.environ["JAX_PLATFORMS"] = "cpu"
    sys.exit(main())
