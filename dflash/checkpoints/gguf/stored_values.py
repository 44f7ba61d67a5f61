"""Tensors of a GGUF file, dequantized when read."""

import dataclasses
import math
from collections.abc import Callable

import numpy as np

from dflash.checkpoints import packed_values
from dflash.checkpoints.gguf import file_header
from dflash.checkpoints.gguf.layouts import AS_STORED, TensorLayout
from dflash.checkpoints.safetensors_header import Index, StoredTensor
from dflash.checkpoints.weight_formats import StoredFormat
from dflash.storage.files import view

Q8_0_FORMAT = StoredFormat((1, 32), "weight_scale")

_Q8_0, MXFP4 = "Q8_0", "MXFP4"
# Bytes of a block of 32 values: a float16 scale and int8 values; an exponent and halves of bytes.
_BLOCK_BYTES = {_Q8_0: 34, MXFP4: 17}
_FLOAT32_BYTES = 4
_MAX_GAP = 2  # Rows apart that are read together with the rows between them.


@dataclasses.dataclass(frozen=True)
class GgufTensor(StoredTensor):
    """Tensor of a GGUF file under its name and in the order of Hugging Face.

    Attributes:
      kind: Name of its quantization type; `code` is the dtype of the values that `read` returns.
      layout: How the file stores the tensor.
    """

    kind: str
    layout: TensorLayout = AS_STORED

    @property
    def row_bytes(self) -> int:
        """Returns the bytes that a row takes in memory, dequantized."""
        return _FLOAT32_BYTES * math.prod(self.shape[1:])

    def read(self, index: Index) -> np.ndarray:
        """Returns the values at `index`; it dequantizes whole rows, however few columns."""
        rows, *columns = index
        order = self.layout.rows
        if order is None:
            values = self._rows(rows.start, rows.stop)
        else:
            values = read_ordered(self._rows, order[rows])
        if self.layout.columns is not None:
            values, columns = values[:, self.layout.columns[columns[0]]], columns[1:]
            columns = [slice(None), *columns]
        values = values[(slice(None), *columns)]
        return values if self.layout.restore is None else self.layout.restore(values)

    def eight_bits(self) -> tuple[StoredTensor, StoredTensor] | None:
        """Returns the values and scales in `Q8_0_FORMAT`; None if the file does not hold these."""
        block = Q8_0_FORMAT.block[1]
        layout = self.layout.scales(block) if self.kind == _Q8_0 else None
        if layout is None:
            return None
        fields = vars(self)
        name = self.name.removesuffix("weight") + Q8_0_FORMAT.scale_suffix
        shape = (*self.shape[:-1], self.shape[-1] // block)
        scales = fields | {"name": name, "shape": shape, "layout": layout}
        return _Q8Values(**fields | {"code": "I8"}), _Q8Scales(**scales)

    def _rows(self, first: int, last: int) -> np.ndarray:
        """Returns rows first … last - 1 in the order of the file."""
        if len(self.shape) == 1:
            return self._dequantized(self.begin, self.end, 1).reshape(-1)[first:last]
        size = (self.end - self.begin) // (self.layout.num_rows or self.shape[0])
        begin, end = self.begin + first * size, self.begin + last * size
        return self._dequantized(begin, end, last - first).reshape(-1, *self.shape[1:])

    def _dequantized(self, begin: int, end: int, rows: int) -> np.ndarray:
        """Returns the float32 values [rows, …] of the bytes begin … end - 1 of the file."""
        gguf = file_header.package(self.file)
        stored = view(self.file, begin, end).reshape(rows, -1)
        with np.errstate(all="ignore"):  # Damaged scales may be infinite.
            return gguf.dequantize(stored, gguf.GGMLQuantizationType[self.kind])


class _Q8Values(GgufTensor):
    """Values of a tensor in Q8_0, int8."""

    def _dequantized(self, begin: int, end: int, rows: int) -> np.ndarray:
        return _blocks(self, begin, end, rows)[..., 2:].view(np.int8).reshape(rows, -1)


class _Q8Scales(GgufTensor):
    """Scales of a tensor in Q8_0, one for 32 values of a row."""

    def _dequantized(self, begin: int, end: int, rows: int) -> np.ndarray:
        scales = _blocks(self, begin, end, rows)[..., :2].copy()
        return scales.view(np.float16)[..., 0].astype(np.float32)


class Mxfp4Values(GgufTensor):
    """Values of a tensor in MXFP4, doubled to become int8; see `packed_values`."""

    def _dequantized(self, begin: int, end: int, rows: int) -> np.ndarray:
        """Returns the values; a block has the first 16 in the low halves of its bytes."""
        codes = _blocks(self, begin, end, rows)[..., 1:]
        halves = np.concatenate([codes & 0xF, codes >> 4], axis=-1)
        return packed_values.DOUBLED[halves].reshape(rows, -1)


class Mxfp4Scales(GgufTensor):
    """Halved scales of a tensor in MXFP4, one for 32 values of a row."""

    def _dequantized(self, begin: int, end: int, rows: int) -> np.ndarray:
        return packed_values.halved_scales(_blocks(self, begin, end, rows)[..., 0])


def _blocks(tensor: GgufTensor, begin: int, end: int, rows: int) -> np.ndarray:
    """Returns the bytes of the blocks, uint8 [rows, blocks, bytes]."""
    return view(tensor.file, begin, end).reshape(rows, -1, _BLOCK_BYTES[tensor.kind])


def read_ordered(read: Callable[[int, int], np.ndarray], wanted: np.ndarray) -> np.ndarray:
    """Returns rows in any order, and reads each run of neighbors at once.

    Args:
      read: Function from a first row and the row after the last to the rows.
      wanted: Numbers of the rows.
    """
    sorted_rows = np.sort(wanted)
    runs = np.split(sorted_rows, np.flatnonzero(np.diff(sorted_rows) > _MAX_GAP) + 1)
    bounds = [(int(run[0]), int(run[-1]) + 1) for run in runs]
    held = np.concatenate([np.arange(first, last) for first, last in bounds])
    rows = np.concatenate([read(first, last) for first, last in bounds])
    return rows[np.searchsorted(held, wanted)]
