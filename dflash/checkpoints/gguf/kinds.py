"""Kinds of models in GGUF files: targets and block drafters."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from dflash.checkpoints.gguf import architecture, block_drafter, joined, layouts, tensor_names
from dflash.checkpoints.gguf.families import Family
from dflash.checkpoints.gguf.file_header import GgufHeader
from dflash.checkpoints.gguf.joined import Tensors
from dflash.checkpoints.gguf.layouts import LayoutOf
from dflash.checkpoints.gguf.tensor_names import TensorNames


class Kind(NamedTuple):
    """Conversion of a kind of model.

    Attributes:
      config_of: Function from a header to the contents of config.json.
      metadata_of: Function from config.json, as `config_to_hf` writes it, to metadata.
      names: Names of the tensors.
      layout: Function from a tensor's name, its shape and config.json to its `TensorLayout`.
      join: Function that joins tensors that Hugging Face's layout does not separate.
    """

    config_of: Callable[[GgufHeader], dict[str, Any]]
    metadata_of: Callable[[Mapping[str, Any]], dict[str, Any]]
    names: TensorNames
    layout: LayoutOf = layouts.as_stored
    join: Callable[[Tensors, Mapping[str, Any]], Tensors] = joined.unchanged


_DRAFTER = Kind(block_drafter.config_of, block_drafter.metadata_of, tensor_names.DRAFTER)


def of_file(header: GgufHeader) -> Kind:
    """Returns the kind of the model in a file.

    Raises:
      CheckpointError: The file states no architecture, or an unsupported one.
    """
    stated = header.metadata.get(architecture.ARCHITECTURE)
    if stated == architecture.DRAFTER:
        return _DRAFTER
    return _target(architecture.family_of(header))


def of_config(config: Mapping[str, Any]) -> Kind:
    """Returns the kind of the model that config.json describes.

    Raises:
      CheckpointError: Models of its architecture are not written.
    """
    if set(config["architectures"]) & set(block_drafter.HF_CLASSES):
        return _DRAFTER
    _, family = architecture.written_family(config)
    return _target(family)


def _target(family: Family) -> Kind:
    return Kind(
        architecture.config_of,
        architecture.metadata_of,
        family.names,
        family.layout,
        family.join,
    )
