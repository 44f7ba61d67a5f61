"""Kinds of models in GGUF files: targets and block drafters."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from dflash.checkpoints import (
    gguf_architecture,
    gguf_drafter,
    gguf_joined,
    gguf_layout,
    gguf_names,
)
from dflash.checkpoints.gguf_families import Family
from dflash.checkpoints.gguf_header import GgufHeader
from dflash.checkpoints.gguf_joined import Tensors
from dflash.checkpoints.gguf_layout import LayoutOf
from dflash.checkpoints.gguf_names import TensorNames


class Kind(NamedTuple):
    """Conversion of a kind of model.

    Attributes:
      config_of: Function from a header to the contents of config.json.
      metadata_of: Function from config.json, as `config_to_hf` writes it, to metadata.
      names: Names of the tensors.
      layout: Function from a tensor's name, its shape and config.json to its `Layout`.
      join: Function that joins tensors that Hugging Face's layout does not separate.
    """

    config_of: Callable[[GgufHeader], dict[str, Any]]
    metadata_of: Callable[[Mapping[str, Any]], dict[str, Any]]
    names: TensorNames
    layout: LayoutOf = gguf_layout.as_stored
    join: Callable[[Tensors, Mapping[str, Any]], Tensors] = gguf_joined.unchanged


_DRAFTER = Kind(gguf_drafter.config_of, gguf_drafter.metadata_of, gguf_names.DRAFTER)


def of_file(header: GgufHeader) -> Kind:
    """Returns the kind of the model in a file.

    Raises:
      CheckpointError: The file states no architecture, or an unsupported one.
    """
    stated = header.metadata.get(gguf_architecture.ARCHITECTURE)
    if stated == gguf_architecture.DRAFTER:
        return _DRAFTER
    return _target(gguf_architecture.family_of(header))


def of_config(config: Mapping[str, Any]) -> Kind:
    """Returns the kind of the model that config.json describes.

    Raises:
      CheckpointError: Models of its architecture are not written.
    """
    if set(config["architectures"]) & set(gguf_drafter.HF_CLASSES):
        return _DRAFTER
    _, family = gguf_architecture.written_family(config)
    return _target(family)


def _target(family: Family) -> Kind:
    return Kind(
        gguf_architecture.config_of,
        gguf_architecture.metadata_of,
        family.names,
        family.layout,
        family.join,
    )
