"""Converts a checkpoint between the Hugging Face layout and the native Orbax one.

dflash convert SOURCE DESTINATION --to=orbax|hf [--dtype=float32|bfloat16]
"""

import os
import pathlib

from absl import flags

from dflash import errors
from dflash.checkpoints import checkpoint, files
from dflash.cli import preflight
from dflash.cli import subcommand as cli
from dflash.storage import paths


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
    cpu_only=True,  # Computes nothing, and must not be limited by an accelerator's memory.
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
      source: Directory or hf:org/name.
      destination: Directory to write, which must be empty or not exist.
      to: Layout to write, "hf" or "orbax".
      dtype: Dtype to write, "float32" or "bfloat16"; None keeps the stored one.
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
    # Imports jax, after the arguments have been validated.
    from dflash.loading import conversion

    print(conversion.convert(source, paths.to_path(destination), **command.flags))


main = cli.entry_point(SUBCOMMAND, _convert)

if __name__ == "__main__":
    main()
