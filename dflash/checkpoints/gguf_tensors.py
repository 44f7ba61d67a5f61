"""Tensors of a GGUF file under their names in Hugging Face's layout, dequantized when read."""

import dataclasses
import math
import pathlib
from collections.abc import Iterator, Mapping

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
from dflash.storage.files import view

WEIGHTS = "model.gguf"  # Name of the file, or of a link to it, in a checkpoint directory.

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
