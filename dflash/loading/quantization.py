"""Quantization of a model's kernels, as its config or its checkpoint declares.

Only projections within layers are quantized. Routers, norms, embeddings, output heads and the
projection of features are small or sensitive to quantization, and keep their dtype.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from flax import nnx

from dflash import errors
from dflash.checkpoints import files, tensor_map, weight_views
from dflash.checkpoints.safetensors_header import StoredTensor
from dflash.checkpoints.weight_formats import StoredFormat
from dflash.layers.linear import FLOAT8, INT8, WeightFormat

W8A8, Q8_0 = "w8a8", "q8_0"
_BY_CODE = {"I8": INT8, "F8_E4M3": FLOAT8}


def quantize(model: nnx.Module, scheme: str | None) -> None:
    """Declares projections of an unquantized model as quantized; None changes nothing."""
    if scheme is None:
        return
    form = WeightFormat(INT8, int8_products=True) if scheme == W8A8 else WeightFormat(scheme)
    for _, kernel in projections(model):
        kernel.quantize(form)


def follow(model: nnx.Module, tensors: Mapping[str, StoredTensor], stored: StoredFormat) -> None:
    """Declares as quantized those projections of an abstract model that its checkpoint quantizes.

    Projections that share a block of scales with others stay plain, and so do other quantized
    tensors; they are read as the numbers that they stand for.

    Args:
      model: Abstract model that the checkpoint belongs to.
    Raises:
      CheckpointError: A tensor has no scales, or only some tensors of a kernel are quantized.
    """
    model.stored_format = stored
    tensors = weight_views.views(tensors, stored)
    packed = set()
    # Files store kernels as [out, in].
    block = stored.block and (stored.block[1], stored.block[0])
    shared = _shared(model, stored)
    for path, kernel in projections(model):
        dtype = _dtype_of(model, f"{path}.kernel", kernel, tensors, stored, shared)
        if dtype is not None:
            kernel.quantize(WeightFormat(dtype, block), stored=True)
            packed |= {f"{path}.kernel"} if stored.packed_suffix else set()
    model.packed = frozenset(packed)


def projections(model: nnx.Module) -> Iterator[tuple[str, Any]]:
    """Yields the dotted path and module of every kernel that can be quantized."""
    for path, module in nnx.iter_modules(model):
        if hasattr(module, "quantize") and path and "_proj" in str(path[-1]):
            yield ".".join(map(str, path)), module


def _shared(model: nnx.Module, stored: StoredFormat) -> set[str]:
    """Returns the names of tensors in which projections share a block of scales."""
    rows = 1 if stored.block is None else stored.block[0]
    names = set()
    for path, kernel in projections(model):
        source = tensor_map.source_of(model, f"{path}.kernel")
        if not tensor_map.is_divided(source, rows):
            shape = kernel.kernel.get_value().shape
            parts = tensor_map.pieces(source, f"{path}.kernel", shape)
            names |= {piece.name for piece in parts}
    return names


def _dtype_of(
    model: nnx.Module,
    path: str,
    kernel: Any,
    tensors: Mapping[str, StoredTensor],
    stored: StoredFormat,
    shared: Collection[str],
) -> str | None:
    """Returns the dtype of a kernel's stored values; None if not quantized, or missing.

    Kernels of the `shared` tensors count as not quantized.
    """
    shape = kernel.kernel.get_value().shape
    parts = tensor_map.pieces(tensor_map.source_of(model, path), path, shape)
    names = {piece.name for piece in parts}
    if not names.isdisjoint(shared):
        return None
    if stored.packed_suffix:
        beside = {name.removesuffix("weight") + stored.packed_suffix for name in names}
        packed = [tensors[name] for name in sorted(beside) if name in tensors]
        for tensor in packed:
            _check_scales(tensor, stored.packed_suffix, stored, tensors)
        return INT8 if packed else None
    present = [tensors[name] for name in sorted(names) if name in tensors]
    codes = {tensor.code for tensor in present if tensor.code in _BY_CODE}
    if not codes:
        return None
    if len({tensor.code for tensor in present}) > 1:
        raise errors.CheckpointError(
            f"{present[0].file}: {files.quote_some(names)}: some are in eight bits and some are not"
        )
    for tensor in present:
        _check_scales(tensor, "weight", stored, tensors)
    return _BY_CODE[codes.pop()]


def _check_scales(
    tensor: StoredTensor, suffix: str, stored: StoredFormat, tensors: Mapping[str, StoredTensor]
) -> None:
    """Raises if the scales of quantized values, in a tensor named with `suffix`, are missing."""
    scales = tensor.name.removesuffix(suffix) + stored.scale_suffix
    if scales not in tensors:
        raise errors.CheckpointError(
            f"{tensor.file}: tensor {tensor.name!r} is {tensor.code}, but {scales!r} is missing; "
            "copy or download the checkpoint again"
        )
