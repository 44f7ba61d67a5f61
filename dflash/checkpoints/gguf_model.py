"""Kinds of models in GGUF files: targets and block drafters."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from dflash.checkpoints import gguf_architecture, gguf_drafter, gguf_names
from dflash.checkpoints.gguf_header import GgufHeader
from dflash.checkpoints.gguf_names import TensorNames


class Kind(NamedTuple):
    """Conversion of a kind of model.

    Attributes:
      config_of: Function from a header to the contents of config.json.
      metadata_of: Function from config.json, as `config_to_hf` writes it, to metadata.
      names: Names of the tensors.
    """

    config_of: Callable[[GgufHeader], dict[str, Any]]
    metadata_of: Callable[[Mapping[str, Any]], dict[str, Any]]
    names: TensorNames


_TARGET = Kind(gguf_architecture.config_of, gguf_architecture.metadata_of, gguf_names.TARGET)
_DRAFTER = Kind(gguf_drafter.config_of, gguf_drafter.metadata_of, gguf_names.DRAFTER)


def of_file(header: GgufHeader) -> Kind:
    """Returns the kind of the model in a file."""
    stated = header.metadata.get(gguf_architecture.ARCHITECTURE)
    return _DRAFTER if stated == gguf_architecture.DRAFTER else _TARGET


def of_config(config: Mapping[str, Any]) -> Kind:
    """Returns the kind of the model that config.json describes."""
    return _DRAFTER if set(config["architectures"]) & set(gguf_drafter.HF_CLASSES) else _TARGET
