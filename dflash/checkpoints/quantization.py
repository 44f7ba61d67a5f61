"""Which kernels of a model are kept in eight bits: as a config asks, or as its checkpoint has them.

Only projections within layers: routers, norms, embeddings, output heads and the projection of
features are small, or too sensitive, and stay as they are.
"""

import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from flax import nnx

from dflash import errors
from dflash.checkpoints import files, tensor_map
from dflash.checkpoints.safetensors_header import StoredTensor, read_headers
from dflash.checkpoints.weight_formats import FLOAT8, INT8, StoredFormat, WeightFormat

W8A8 = "w8a8"
_BY_CODE = {"I8": INT8, "F8_E4M3": FLOAT8}


def quantize(model: nnx.Module, wanted: str | None) -> None:
    """Has an abstract model keep its projections in eight bits.

    Args:
      model: weights that it is to get are plain.
      wanted: of a config: INT8, FLOAT8 or W8A8; None leaves the model as it is.
    """
    if wanted is None:
        return
    form = WeightFormat(INT8, int8_products=True) if wanted == W8A8 else WeightFormat(wanted)
    for _, kernel in projections(model):
        kernel.quantize(form)


def follow(model: nnx.Module, directory: pathlib.Path, stored: StoredFormat) -> None:
    """Has an abstract model keep in eight bits what its checkpoint has in eight bits.

    Args:
      model: reads the checkpoint.
      directory: holds the checkpoint.
      stored: what its config.json says of such weights.
    Raises:
      CheckpointError: a tensor has no scales, or is in eight bits in part.
    """
    model.scale_suffix = stored.scale_suffix
    tensors, packed = read_headers(directory), set()
    # Files have [out, in].
    block = stored.block and (stored.block[1], stored.block[0])
    for path, kernel in projections(model):
        dtype = _dtype_of(model, f"{path}.kernel", kernel, tensors, stored)
        if dtype is not None:
            kernel.quantize(WeightFormat(dtype, block), stored=True)
            packed |= {f"{path}.kernel"} if stored.is_packed else set()
    model.packed = frozenset(packed)


def projections(model: nnx.Module) -> Iterator[tuple[str, Any]]:
    """Dotted path and module of every kernel that may be kept in eight bits."""
    for path, module in nnx.iter_modules(model):
        if hasattr(module, "quantize") and path and "_proj" in str(path[-1]):
            yield ".".join(map(str, path)), module


def _dtype_of(
    model: nnx.Module,
    path: str,
    kernel: Any,
    tensors: Mapping[str, StoredTensor],
    stored: StoredFormat,
) -> str | None:
    """The dtype of a kernel's stored values; None if they are plain, or missing."""
    shape = tensor_map.stored_shape(path, kernel.kernel.get_value().shape)
    names = {piece.name for piece in tensor_map.pieces(tensor_map.source_of(model, path), shape)}
    if stored.is_packed:
        found = any(name.removesuffix("weight") + tensor_map.PACKED in tensors for name in names)
        return INT8 if found else None
    present = [tensors[name] for name in sorted(names) if name in tensors]
    codes = {tensor.code for tensor in present if tensor.code in _BY_CODE}
    if not codes:
        return None
    if len({tensor.code for tensor in present}) > 1:
        raise errors.CheckpointError(
            f"{present[0].file}: {files.quote_some(names)}: some are in eight bits and some are not"
        )
    for tensor in present:
        scales = tensor.name.removesuffix("weight") + stored.scale_suffix
        if scales not in tensors:
            raise errors.CheckpointError(
                f"{tensor.file}: tensor {tensor.name!r} is {tensor.code}, but {scales!r} is missing"
            )
    return _BY_CODE[codes.pop()]
