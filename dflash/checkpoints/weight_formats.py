"""Weights in eight bits: how kernels are kept, and what checkpoints say of theirs."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from dflash import errors
from dflash.checkpoints import files, foreign, hf_config

INT8, FLOAT8 = "int8", "float8_e4m3fn"
_GROUP = "quantization_config"
_BLOCK = "weight_block_size"
_FP8, _COMPRESSED = "fp8", "compressed-tensors"
_PACKED = "pack-quantized"
_FORMATS = ("float-quantized", "int-quantized", "naive-quantized", _PACKED)
_NUM_BITS, _PACKED_BITS = 8, 4


@dataclasses.dataclass(frozen=True)
class WeightFormat:
    """How a kernel [in, out] is kept in eight bits: values, and scales that multiply them.

    Attributes:
      dtype: of the values, INT8 or FLOAT8.
      block: inputs and outputs that share a scale; None: all inputs of one output.
      int8_products: rows are turned into int8 too, each by a scale of its own, so that products are
        of integers.
    """

    dtype: str
    block: tuple[int, int] | None = None
    int8_products: bool = False


@dataclasses.dataclass(frozen=True)
class StoredFormat:
    """How a checkpoint keeps the weights that it has in eight bits.

    Attributes:
      block: outputs and inputs that share a scale, as files orient them; None: one scale an output.
      scale_suffix: what the name of a tensor of scales has in place of "weight".
      is_packed: eight values of four bits share an int32, in tensors called "weight_packed".
    """

    block: tuple[int, int] | None
    scale_suffix: str
    is_packed: bool = False


@dataclasses.dataclass(frozen=True)
class _Blocks:
    weight_block_size: tuple[int, ...] | None = None


@dataclasses.dataclass(frozen=True)
class _Weights:
    """`weights` of a group of compressed-tensors."""

    num_bits: int
    strategy: str = "tensor"
    symmetric: bool = True
    group_size: int | None = None
    block_structure: tuple[int, ...] | None = None


def stored_format(config: Mapping[str, Any]) -> StoredFormat | None:
    """What config.json says of weights in eight bits; None if all are plain.

    Raises:
      CheckpointError: another format, or a field that is missing or unusable.
    """
    text = config.get("text_config")  # the language model of one that sees as well
    stated = foreign.quantization(config)
    if stated is None and isinstance(text, Mapping):
        stated = foreign.quantization(text)
    if stated is None:
        return None
    key, method, group = stated
    if key == _GROUP and method == _FP8:
        hf_config.check_only(group, "fmt", "e4m3")
        found = hf_config.read_fields(group, _Blocks, group=_GROUP).weight_block_size
        return StoredFormat(_pair(found, _BLOCK), "weight_scale_inv")
    if key == _GROUP and method == _COMPRESSED and group.get("format") in _FORMATS:
        return _compressed(group)
    kind = method if method != _COMPRESSED else f"{method}, {str(group.get('format'))[:40]}"
    raise errors.CheckpointError(
        f"{files.CONFIG}: {key}: quantized weights ({kind or 'of an unknown kind'}) are not "
        "supported, only fp8 and compressed-tensors of 8 bits or packed 4; take the model's "
        "unquantized checkpoint"
    )


def _compressed(group: Mapping[str, Any]) -> StoredFormat:
    """The one group of compressed-tensors in which all linear layers must be."""
    groups = hf_config.read_group(group, "config_groups")
    if len(groups) != 1:
        raise errors.CheckpointError(
            f"{files.CONFIG}: {_GROUP}: config_groups: expected one group, got {len(groups)}"
        )
    (members,) = groups.values()
    where = f"{_GROUP}: weights"
    weights = hf_config.read_group(members if isinstance(members, Mapping) else {}, "weights")
    stated = hf_config.read_fields(weights, _Weights, group=where)
    bits = _PACKED_BITS if group["format"] == _PACKED else _NUM_BITS
    if stated.num_bits != bits or not stated.symmetric:
        raise errors.CheckpointError(
            f"{files.CONFIG}: {where}: expected {bits} symmetric bits, got {stated.num_bits}"
            + ("" if stated.symmetric else " asymmetric")
        )
    if bits == _PACKED_BITS:
        size = stated.group_size if stated.strategy == "group" else None
        return StoredFormat(_pair(size and (1, size), "group_size"), "weight_scale", True)
    if stated.strategy == "channel":
        return StoredFormat(None, "weight_scale")
    if stated.strategy == "block":
        return StoredFormat(_pair(stated.block_structure, "block_structure"), "weight_scale")
    raise errors.CheckpointError(
        f"{files.CONFIG}: {where}: strategy {stated.strategy!r} is not supported, only 'channel' "
        "and 'block'"
    )


def _pair(sizes: tuple[int, ...] | None, name: str) -> tuple[int, int]:
    if sizes is None or len(sizes) != 2 or min(sizes) < 1:
        raise errors.CheckpointError(
            f"{files.CONFIG}: {_GROUP}: {name}: expected two sizes of 1 or more, got "
            f"{None if sizes is None else list(sizes)}"
        )
    return sizes[0], sizes[1]
