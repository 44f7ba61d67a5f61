"""Kinds of models in GGUF files: the families of targets, and block drafters."""

from collections.abc import Mapping
from typing import Any

from dflash.checkpoints.gguf import architecture, block_drafter, tensor_names
from dflash.checkpoints.gguf.families import Family
from dflash.checkpoints.gguf.file_header import GgufHeader

_DRAFTER = Family("", "qwen3", names=tensor_names.DRAFTER)


def config_of(header: GgufHeader) -> dict[str, Any]:
    """Returns the contents of a config.json for the model in a file."""
    is_drafter = family_of(header) is _DRAFTER
    return block_drafter.config_of(header) if is_drafter else architecture.config_of(header)


def metadata_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the metadata of a model, given its config.json as `config_to_hf` writes it."""
    is_drafter = written_family(config) is _DRAFTER
    return block_drafter.metadata_of(config) if is_drafter else architecture.metadata_of(config)


def family_of(header: GgufHeader) -> Family:
    """Returns the family of the model in a file; raises like `config_of`."""
    if header.metadata.get(architecture.ARCHITECTURE) == architecture.DRAFTER:
        return _DRAFTER
    return architecture.family_of(header)


def written_family(config: Mapping[str, Any]) -> Family:
    """Returns the family of the model that config.json describes; raises like `metadata_of`."""
    if set(config["architectures"]) & set(block_drafter.HF_CLASSES):
        return _DRAFTER
    return architecture.written_family(config)[1]
