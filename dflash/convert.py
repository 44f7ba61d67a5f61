"""Converts a checkpoint between the layouts of Hugging Face, MaxText and Orbax, and a GGUF file.

dflash convert SOURCE DESTINATION --to=orbax|hf|maxtext [--dtype=float32|bfloat16] [--like=DIR]
dflash convert SOURCE DESTINATION.gguf [--tokenizer=TARGET] [--dtype=float32|bfloat16]
"""

import os
import pathlib
from collections.abc import Mapping
from typing import Any

from absl import flags

from dflash import errors
from dflash.checkpoints import checkpoint, files
from dflash.cli import preflight
from dflash.cli import subcommand as cli
from dflash.storage import paths


def _define_flags(values: flags.FlagValues) -> None:
    where = {"flag_values": values}
    flags.DEFINE_enum(
        "to",
        None,
        ["orbax", "hf", "maxtext"],
        "Layout of a directory: orbax, hf or maxtext. A name that ends in .gguf needs none.",
        **where,
    )
    flags.DEFINE_enum(
        "dtype",
        None,
        ["float32", "bfloat16"],
        "Dtype to write, float32 or bfloat16; as stored by default.",
        **where,
    )
    flags.DEFINE_string(
        "tokenizer",
        None,
        "Checkpoint whose tokenizer a GGUF file gets: the target of a drafter that has none; "
        "SOURCE by default.",
        **where,
    )
    flags.DEFINE_string(
        "like",
        None,
        "Directory or hf:org/name with config.json and tokenizer, for a source of MaxText.",
        **where,
    )
    flags.DEFINE_boolean("scan_layers", True, "Stack the layers in MaxText's layout.", **where)


SUBCOMMAND = cli.Subcommand(
    "convert",
    "Converts a checkpoint between the layouts of Hugging Face, MaxText (Qwen3, Llama 3), Orbax "
    "and a GGUF file of llama.cpp. SOURCE is a directory, a GGUF file or hf:org/name, of a target "
    "or a drafter with weights. MaxText stores no config.json, so --like names one. DESTINATION is "
    "a directory, or a file that ends in .gguf; it appears whole or not at all. Tokenizer, "
    "generation and license files are copied.",
    examples=(
        "dflash convert hf:Qwen/Qwen3-4B /data/qwen3_4b --to=orbax",
        "dflash convert /data/qwen3_4b /data/qwen3_4b_hf --to=hf --dtype=bfloat16",
        "dflash convert /data/drafter drafter.gguf --tokenizer=hf:Qwen/Qwen3-4B",
        "dflash convert gs://bucket/run /data/policy --to=hf --like=hf:Qwen/Qwen3-4B",
    ),
    arguments=("SOURCE", "DESTINATION"),
    define_flags=_define_flags,
    cpu_only=True,  # Computes nothing, and must not be limited by an accelerator's memory.
)


def run(
    source: str | os.PathLike,
    destination: str | os.PathLike,
    *,
    to: checkpoint.Layout | None = None,
    dtype: str | None = None,
    tokenizer: str | os.PathLike | None = None,
    like: str | os.PathLike | None = None,
    scan_layers: bool = True,
) -> pathlib.Path:
    """Converts a checkpoint, as `dflash convert` does, and prints a line about it.

    Args:
      source: Directory, GGUF file or hf:org/name.
      destination: Directory to write, which must be empty or not exist, or a new file that ends in
        .gguf.
      to: Layout of a directory, "hf", "orbax" or "maxtext"; None for a GGUF file.
      dtype: Dtype to write, "float32" or "bfloat16"; None keeps the stored one.
      tokenizer: Checkpoint whose tokenizer a GGUF file gets; None for that of `source`.
      like: Checkpoint with config.json and tokenizer, for a source in MaxText's layout.
      scan_layers: Stack the layers in MaxText's layout.
    Returns:
      The directory or file that was written.
    Raises:
      UserError: The command would exit with an error.
    """
    options = {"to": to, "dtype": dtype, "tokenizer": tokenizer}
    options |= {"like": like, "scan_layers": scan_layers}
    _convert(cli.parse(SUBCOMMAND, source, destination, **options))
    return paths.to_path(destination)


def _convert(command: cli.Command) -> None:
    source, destination = command.arguments
    options = command.flags | {"to": _layout(destination, command.flags)}
    for place in (source, destination):
        preflight.check_bucket(place)
    files.check_vacant(paths.to_path(destination))
    preflight.check_writable(destination)
    # Imports jax, after the arguments have been validated.
    from dflash.loading import conversion

    print(conversion.convert(source, paths.to_path(destination), **options))


def _layout(destination: str, flag_values: Mapping[str, Any]) -> checkpoint.Layout:
    usage = f"usage: {SUBCOMMAND.usage}; see --help"
    if destination.endswith(".gguf"):
        if flag_values["to"] is not None:
            raise errors.ConfigError(f"--to: {destination} is a GGUF file; {usage}")
        if paths.in_bucket(paths.to_path(destination)):
            raise errors.ConfigError(f"{destination}: GGUF files are written to a disk; {usage}")
        return "gguf"
    if flag_values["to"] is None:
        raise errors.ConfigError(f"--to is missing; {usage}")
    if flag_values["tokenizer"] is not None:
        raise errors.ConfigError(f"--tokenizer is for GGUF files; {usage}")
    return flag_values["to"]


main = cli.entry_point(SUBCOMMAND, _convert)

if __name__ == "__main__":
    main()
