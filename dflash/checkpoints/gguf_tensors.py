"""Tensors of a GGUF file under their names in Hugging Face's layout, dequantized when read."""

import dataclasses
import math
import pathlib
from collections.abc import Collection, Iterator, Mapping

import numpy as np

from dflash import errors
from dflash.checkpoints import (
    files,
    gguf_architecture,
    gguf_drafter,
    gguf_header,
    gguf_model,
    gguf_names,
)
from dflash.checkpoints.gguf_header import GgufHeader, TensorEntry
from dflash.checkpoints.gguf_names import TensorNames
from dflash.checkpoints.safetensors_header import (
    BUFFER_DTYPES,
    PLAIN_DTYPES,
    Index,
    StoredTensor,
)
from dflash.checkpoints.weight_formats import StoredFormat
from dflash.storage.files import view

WEIGHTS = "model.gguf"  # Name of the file, or of a link to it, in a checkpoint directory.

Q8_0_FORMAT = StoredFormat((1, 32), "weight_scale")

_Q8_0 = "Q8_0"  # Blocks of a float16 scale and 32 int8 values.
_Q8_0_BYTES = 34
_FLOAT32_BYTES = 4


@dataclasses.dataclass(frozen=True)
class GgufTensor(StoredTensor):
    """Tensor of a GGUF file under its name and in the row order of Hugging Face.

    Attributes:
      kind: Name of its quantization type; `code` is the dtype of the values that `read` returns.
      pairs: Number of heads whose rows the file stores as neighbors to be rotated together; 0 if
        rows have the order of Hugging Face.
    """

    kind: str
    pairs: int = 0

    @property
    def row_bytes(self) -> int:
        """Returns the bytes that a row takes in memory, dequantized."""
        return _FLOAT32_BYTES * math.prod(self.shape[1:])

    def read(self, index: Index) -> np.ndarray:
        """Returns the values at `index`; it dequantizes whole rows, however few columns."""
        rows, *columns = index
        if not self.pairs:
            return self._rows(rows.start, rows.stop)[(slice(None), *columns)]
        size = self.shape[0] // self.pairs
        first, last = rows.start // size * size, -(-rows.stop // size) * size
        heads = self._rows(first, last).reshape(-1, size // 2, 2, *self.shape[1:])
        halves = heads.swapaxes(1, 2).reshape(last - first, *self.shape[1:])
        return halves[(slice(rows.start - first, rows.stop - first), *columns)]

    def _rows(self, first: int, last: int) -> np.ndarray:
        """Returns rows first … last - 1 in the order of the file."""
        if len(self.shape) == 1:
            return self._dequantized(self.begin, self.end, 1).reshape(-1)[first:last]
        size = (self.end - self.begin) // self.shape[0]
        begin, end = self.begin + first * size, self.begin + last * size
        return self._dequantized(begin, end, last - first).reshape(-1, *self.shape[1:])

    def _dequantized(self, begin: int, end: int, rows: int) -> np.ndarray:
        """Returns the float32 values [rows, …] of the bytes begin … end - 1 of the file."""
        gguf = gguf_header.package(self.file)
        stored = view(self.file, begin, end).reshape(rows, -1)
        with np.errstate(all="ignore"):  # Damaged scales may be infinite.
            return gguf.dequantize(stored, gguf.GGMLQuantizationType[self.kind])


class _Q8Values(GgufTensor):
    """Values of a tensor in Q8_0, int8."""

    def _dequantized(self, begin: int, end: int, rows: int) -> np.ndarray:
        return _blocks(self.file, begin, end, rows)[..., 2:].view(np.int8).reshape(rows, -1)


class _Q8Scales(GgufTensor):
    """Scales of a tensor in Q8_0, one for 32 values of a row."""

    def _dequantized(self, begin: int, end: int, rows: int) -> np.ndarray:
        scales = _blocks(self.file, begin, end, rows)[..., :2].copy()
        return scales.view(np.float16)[..., 0].astype(np.float32)


def _blocks(file: pathlib.Path, begin: int, end: int, rows: int) -> np.ndarray:
    """Returns the bytes of the blocks, uint8 [rows, blocks, bytes]."""
    return view(file, begin, end).reshape(rows, -1, _Q8_0_BYTES)


def in_eight_bits(
    tensors: Mapping[str, StoredTensor], names: Collection[str]
) -> dict[str, StoredTensor]:
    """Returns the tensors, those in Q8_0 as values and scales, in `Q8_0_FORMAT`.

    Args:
      tensors: Tensors of a GGUF file.
      names: Names of the tensors that stay in eight bits if they are in Q8_0.
    """
    kept = dict(tensors)
    for name, tensor in tensors.items():
        if name in names and isinstance(tensor, GgufTensor) and tensor.kind == _Q8_0:
            fields = vars(tensor)
            scales = name.removesuffix("weight") + Q8_0_FORMAT.scale_suffix
            shape = (*tensor.shape[:-1], tensor.shape[-1] // Q8_0_FORMAT.block[1])
            kept[name] = _Q8Values(**fields | {"code": "I8"})
            kept[scales] = _Q8Scales(**fields | {"name": scales, "shape": shape})
    return kept


def read_tensors(directory: pathlib.Path) -> dict[str, StoredTensor]:
    """Describes every tensor of model.gguf, by its name in Hugging Face's layout.

    Raises:
      CheckpointError: The file is damaged, its architecture is unsupported, or it has tensors that
        the architecture does not have.
    """
    file = (directory / WEIGHTS).resolve()
    header = gguf_header.read_header(file)
    kind = gguf_model.of_file(header)
    config = kind.config_of(header)
    tensors = {}
    unexpected = []
    for name, entry in header.tensors.items():
        found = list(_named(header, name, entry, kind.names, config))
        tensors |= {tensor.name: tensor for tensor in found}
        if not found and name != gguf_architecture.ROPE_FACTORS:
            unexpected.append(name)
    if unexpected:
        raise errors.CheckpointError(
            f"{file}: {len(unexpected)} unexpected tensors: {files.quote_some(unexpected)}; "
            "this variant of the architecture is not supported"
        )
    return tensors


def _named(
    header: GgufHeader, name: str, entry: TensorEntry, names: TensorNames, config: Mapping
) -> Iterator[StoredTensor]:
    """Yields a tensor under its name in Hugging Face's layout, where experts are separate."""
    known = entry.kind in PLAIN_DTYPES or entry.kind in BUFFER_DTYPES
    place = (entry.kind if known else "F32", entry.shape, entry.begin, entry.end)
    hf_name = names.to_hf(name)
    if name == gguf_drafter.DRAFT_IDS and hf_name is not None:
        if entry.kind != "I64" or len(entry.shape) != 1:
            raise gguf_header.corrupt(header.file, f"tensor {name!r} is no list of token ids")
        yield _DraftIds(header.file, hf_name, *place)
        yield _Drafted(header.file, "t2d", "BOOL", (config["vocab_size"],), *place[2:])
        return
    tensor = GgufTensor(header.file, hf_name or name, *place, kind=entry.kind)
    if hf_name is not None:
        yield dataclasses.replace(tensor, pairs=_num_pairs(header, name, entry, config))
        return
    experts = names is gguf_names.TARGET and gguf_names.experts(name, entry.shape[0])
    size = (tensor.end - tensor.begin) // entry.shape[0]
    for number, expert in enumerate(experts or ()):
        begin = tensor.begin + number * size
        yield dataclasses.replace(
            tensor, name=expert, shape=entry.shape[1:], begin=begin, end=begin + size
        )


def _num_pairs(header: GgufHeader, name: str, entry: TensorEntry, config: Mapping) -> int:
    """Returns `GgufTensor.pairs`."""
    heads = gguf_architecture.num_pairs(name, config)
    if heads < 0 or (heads and entry.shape[0] % (2 * heads)):
        raise errors.CheckpointError(
            f"{header.file}: tensor {name!r} has {entry.shape[0]} rows, which do not form {heads} "
            "heads"
        )
    return heads


class _DraftIds(StoredTensor):
    """Table `d2t` of Hugging Face's layout: the difference between target and draft token."""

    def read(self, index: Index) -> np.ndarray:
        """Returns the values at `index`."""
        return super().read(index) - np.arange(index[0].start, index[0].stop)


class _Drafted(StoredTensor):
    """Table `t2d` of Hugging Face's layout: whether a target token can be drafted."""

    def read(self, index: Index) -> np.ndarray:
        """Returns the values at `index`."""
        drafted = view(self.file, self.begin, self.end).view(np.int64)
        return np.isin(np.arange(index[0].start, index[0].stop), drafted)
