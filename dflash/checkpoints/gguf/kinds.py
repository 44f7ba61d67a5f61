"""Kinds of models in GGUF files: the families of targets, and block drafters."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from dflash.checkpoints.gguf import architecture, block_drafter, tensor_names
from dflash.checkpoints.gguf.families import Family
from dflash.checkpoints.gguf.file_header import GgufHeader


class Kind(NamedTuple):
    """Kind of a model, with functions from a header to config.json, and from that to metadata."""

    family: Family
    config_of: Callable[[GgufHeader], dict[str, Any]] = architecture.config_of
    metadata_of: Callable[[Mapping[str, Any]], dict[str, Any]] = architecture.metadata_of


_DRAFTER = Kind(
    Family("", "qwen3", names=tensor_names.DRAFTER),
    block_drafter.config_of,
    block_drafter.metadata_of,
)


def of_file(header: GgufHeader) -> Kind:
    """Returns the kind of the model in a file."""
    if header.metadata.get(architecture.ARCHITECTURE) == architecture.DRAFTER:
        return _DRAFTER
    return Kind(architecture.family_of(header))


def of_config(config: Mapping[str, Any]) -> Kind:
    """Returns the kind of the model that config.json describes; raises if it is not written."""
    if set(config["architectures"]) & set(block_drafter.HF_CLASSES):
        return _DRAFTER
    return Kind(architecture.written_family(config)[1])
