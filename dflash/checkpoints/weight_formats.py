"""Formats of quantized weights that config.json declares."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from dflash import errors
from dflash.checkpoints import files, foreign, hf_config
from dflash.checkpoints.packed_values import BLOCKS, PACKED, PER_SCALE, SCALES

_GROUP = "quantization_config"
_BLOCK = "weight_block_size"
_FP8, _COMPRESSED, _MXFP4 = "fp8", "compressed-tensors", "mxfp4"
TENSOR, AWQ, GPTQ, GPTQ_V2 = "tensor", "awq", "gptq", "gptq_v2"
_PACKED = "pack-quantized"
_FORMATS = ("float-quantized", "int-quantized", "naive-quantized", _PACKED)
_NUM_BITS, _PACKED_BITS = 8, 4


@dataclasses.dataclass(frozen=True)
class StoredFormat:
    """Format of the quantized weights of a checkpoint.

    Attributes:
      block: Outputs and inputs that share a scale, in the orientation of the files; None for one
        scale per output.
      scale_suffix: Replacement of "weight" in the names of tensors that hold scales, or what is
        appended to names without it.
      packed_suffix: Counterpart of `scale_suffix` for tensors that hold packed values; see
        `packed_values`. None if values are not packed.
      layout: Layout that is read through `weight_views`: TENSOR, one scale for a whole tensor; AWQ;
        GPTQ, whose zero points are stored less 1, or GPTQ_V2. None for others.
    """

    block: tuple[int, int] | None
    scale_suffix: str
    packed_suffix: str | None = None
    layout: str | None = None

    def scales_of(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of the scales of a matrix."""
        block = self.block or (1, shape[-1])
        return tuple(-(-size // of_block) for size, of_block in zip(shape, block, strict=True))


@dataclasses.dataclass(frozen=True)
class _Blocks:
    weight_block_size: tuple[int, ...] | None = None
    group_size: int = 0  # -1 for one group of all inputs.


@dataclasses.dataclass(frozen=True)
class _Weights:
    num_bits: int
    strategy: str = "tensor"
    symmetric: bool = True
    group_size: int | None = None
    block_structure: tuple[int, ...] | None = None


def stored_format(config: Mapping[str, Any]) -> StoredFormat | None:
    """Returns the format of quantized weights in config.json; None if none are quantized."""
    text = config.get("text_config")  # Multimodal models have their language model in here.
    declaration = foreign.quantization(config)
    if declaration is None and isinstance(text, Mapping):
        declaration = foreign.quantization(text)
    if declaration is None:
        return None
    key, method, group = declaration
    if key == _GROUP and method == _FP8:
        if group.get("fmt") != "float8_e4m3fn":  # MiniMax's name for it.
            hf_config.check_only(group, "fmt", "e4m3")
        block = hf_config.read_fields(group, _Blocks, group=_GROUP).weight_block_size
        return StoredFormat(_pair(block, _BLOCK), "weight_scale_inv")
    if key == _GROUP and method == _MXFP4:
        return StoredFormat((1, PER_SCALE), SCALES, BLOCKS)
    if key == _GROUP and method == _COMPRESSED and group.get("format") in _FORMATS:
        return _compressed(group)
    if key == _GROUP and method in (AWQ, GPTQ):
        return _four_bits(method, group)
    kind = method if method != _COMPRESSED else f"{method}, {str(group.get('format'))[:40]}"
    raise errors.CheckpointError(
        f"{files.CONFIG}: {key}: quantized weights ({kind or 'of an unknown kind'}) are not "
        "supported, only fp8, mxfp4, awq, gptq, and compressed-tensors of 8 bits or packed 4; take "
        "the model's unquantized checkpoint"
    )


def _four_bits(method: str, group: Mapping[str, Any]) -> StoredFormat:
    """Returns the format of AWQ or GPTQ."""
    supported = {"bits": 4, "desc_act": False, "is_marlin_format": False, "zero_point": True}
    for name, value in supported.items():
        hf_config.check_only(group, name, value)
    layout = AWQ
    if method == AWQ:
        version = str(group.get("version", "gemm")).lower()
        hf_config.check_only({"version": version}, "version", "gemm")
    else:
        layout = group.get("checkpoint_format") or GPTQ
        if layout != GPTQ_V2:
            hf_config.check_only(group, "checkpoint_format", GPTQ)
        hf_config.check_only(group, "dynamic", {})
    size = hf_config.read_fields(group, _Blocks, group=_GROUP).group_size
    if size == 0 or size < -1:
        raise errors.CheckpointError(f"{files.CONFIG}: {_GROUP}: group_size: {size} is not a size")
    return StoredFormat(None if size == -1 else (1, size), "weight_scale", layout=layout)


def _compressed(group: Mapping[str, Any]) -> StoredFormat:
    """Returns the format of the single compressed-tensors group, which covers all linear layers."""
    groups = hf_config.read_group(group, "config_groups")
    if len(groups) != 1:
        raise errors.CheckpointError(
            f"{files.CONFIG}: {_GROUP}: config_groups: expected one group, got {len(groups)}"
        )
    (members,) = groups.values()
    where = f"{_GROUP}: weights"
    weights = hf_config.read_group(members if isinstance(members, Mapping) else {}, "weights")
    options = hf_config.read_fields(weights, _Weights, group=where)
    bits = _PACKED_BITS if group["format"] == _PACKED else _NUM_BITS
    if options.num_bits != bits or not options.symmetric:
        raise errors.CheckpointError(
            f"{files.CONFIG}: {where}: expected {bits} symmetric bits, got {options.num_bits}"
            + ("" if options.symmetric else " asymmetric")
        )
    if bits == _PACKED_BITS:
        size = options.group_size if options.strategy == "group" else None
        return StoredFormat(_pair(size and (1, size), "group_size"), "weight_scale", PACKED)
    if options.strategy == "channel":
        return StoredFormat(None, "weight_scale")
    if options.strategy == "tensor":
        return StoredFormat(None, "weight_scale", layout=TENSOR)
    if options.strategy == "block":
        return StoredFormat(_pair(options.block_structure, "block_structure"), "weight_scale")
    raise errors.CheckpointError(
        f"{files.CONFIG}: {where}: strategy {options.strategy!r} is not supported, only 'tensor', "
        "'channel' and 'block'"
    )


def _pair(sizes: tuple[int, ...] | None, name: str) -> tuple[int, int]:
    if sizes is None or len(sizes) != 2 or min(sizes) < 1:
        raise errors.CheckpointError(
            f"{files.CONFIG}: {_GROUP}: {name}: expected two sizes of 1 or more, got "
            f"{None if sizes is None else list(sizes)}"
        )
    return sizes[0], sizes[1]
