"""Tensors of a GGUF file, dequantized when read; some hold one of Hugging Face's in parts."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from dflash.checkpoints import packed_values
from dflash.checkpoints.gguf import file_header, layouts
from dflash.checkpoints.gguf.layouts import AS_STORED, TensorLayout
from dflash.checkpoints.packed_values import BLOCKS, PER_SCALE, SCALES
from dflash.checkpoints.safetensors_header import PACKED_CODE, Index, StoredTensor
from dflash.checkpoints.weight_formats import StoredFormat
from dflash.storage.files import view

Q8_0_FORMAT = StoredFormat((1, 32), "weight_scale")

Tensors = Mapping[str, StoredTensor]

_QKV, _Z, _QKVZ = "in_proj_qkv.weight", "in_proj_z.weight", "in_proj_qkvz.weight"
_GATE, _UP, _DOWN = "gate_proj", "up_proj", "down_proj"
_JOINED = {_GATE: "gate_up_proj", _DOWN: _DOWN}

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


def read_ordered(read: Callable[[int, int], np.ndarray], numbers: np.ndarray) -> np.ndarray:
    """Returns the rows `numbers`, and reads each run of neighbors, [first, last), at once."""
    sorted_rows = np.sort(numbers)
    runs = np.split(sorted_rows, np.flatnonzero(np.diff(sorted_rows) > _MAX_GAP) + 1)
    bounds = [(int(run[0]), int(run[-1]) + 1) for run in runs]
    read_numbers = np.concatenate([np.arange(first, last) for first, last in bounds])
    rows = np.concatenate([read(first, last) for first, last in bounds])
    return rows[np.searchsorted(read_numbers, numbers)]


def unchanged(tensors: Tensors, config: Mapping[str, Any]) -> Tensors:
    """Returns the tensors of families that join none."""
    return tensors


@dataclasses.dataclass(frozen=True)
class _JoinedRows(StoredTensor):
    """Rows of several tensors; `order` has the row of the joined parts that holds each row."""

    parts: tuple[GgufTensor, ...]
    order: np.ndarray

    @property
    def row_bytes(self) -> int:
        return self.parts[0].row_bytes

    def read(self, index: Index) -> np.ndarray:
        rows, *columns = index
        return read_ordered(self._rows, self.order[rows])[(slice(None), *columns)]

    def eight_bits(self) -> tuple[StoredTensor, StoredTensor] | None:
        pairs = [part.eight_bits() for part in self.parts]
        if None in pairs:
            return None
        joined = (_join_rows(self.name, parts, self.order) for parts in zip(*pairs, strict=True))
        values, scales = joined
        name = self.name.removesuffix("weight") + Q8_0_FORMAT.scale_suffix
        return values, dataclasses.replace(scales, name=name)

    def _rows(self, first: int, last: int) -> np.ndarray:
        """Returns rows first … last - 1 of the parts, one after another."""
        read, begin = [], 0
        for part in self.parts:
            count, *inner = part.shape
            rows = slice(max(first - begin, 0), min(last - begin, count))
            if rows.start < rows.stop:
                read.append(part.read((rows, *(slice(0, size) for size in inner))))
            begin += count
        return np.concatenate(read)


def _join_rows(name: str, parts: Sequence[GgufTensor], order: np.ndarray) -> _JoinedRows:
    first = parts[0]
    shape = (sum(part.shape[0] for part in parts), *first.shape[1:])
    return _JoinedRows(
        first.file, name, first.code, shape, first.begin, first.end, tuple(parts), order
    )


def qkvz(tensors: Tensors, config: Mapping[str, Any]) -> Tensors:
    """Joins the projections of Qwen3-Next's gated DeltaNet by key head, or raises ValueError."""
    joined = dict(tensors)
    for name in [name for name in tensors if name.endswith(_QKV)]:
        parts = [joined.pop(part) for part in (name, name.replace(_QKV, _Z)) if part in joined]
        joined_name = name.replace(_QKV, _QKVZ)
        order = layouts.grouped_by_key_head(config)
        if len(order) != sum(part.shape[0] for part in parts):
            raise ValueError(
                f"{joined_name!r}: {len(order)} rows expected in attn_qkv and attn_gate"
            )
        joined[joined_name] = _join_rows(joined_name, parts, order)
    return joined


@dataclasses.dataclass(frozen=True)
class _Experts(StoredTensor):
    """Projections of all experts, whose outputs alternate if there are several.

    Attributes:
      parts: Projections [E, out, in], or biases [E, out].
      transposed: Whether the tensor is [E, in, out].
    """

    parts: tuple[GgufTensor, ...]
    transposed: bool

    @property
    def row_bytes(self) -> int:
        """Returns the bytes that an expert takes in memory, dequantized."""
        return _FLOAT32_BYTES * math.prod(self.shape[1:])

    def read(self, index: Index) -> np.ndarray:
        """Returns the values at `index`; it dequantizes whole experts."""
        experts, *columns = index
        read = [
            part.read((experts, *(slice(0, size) for size in part.shape[1:])))
            for part in self.parts
        ]
        shape = (len(read[0]), -1, *read[0].shape[2:])
        values = np.stack(read, axis=2).reshape(shape)
        if self.transposed:
            values = values.swapaxes(1, 2)
        return values[(slice(None), *columns)]


def alternating_experts(tensors: Tensors, config: Mapping[str, Any]) -> Tensors:
    """Joins the gate and up projections of gpt-oss's experts; see `qkvz`."""
    joined = dict(tensors)
    for name in tensors:
        head, _, tail = name.rpartition(".experts.")
        stem = tail.removesuffix("_bias")
        if not head or stem not in _JOINED:
            continue
        names = [name] if stem == _DOWN else [name, name.replace(_GATE, _UP)]
        if any(part not in joined for part in names):
            continue  # The loader names what is missing.
        parts = tuple(joined.pop(part) for part in names)
        joined_name = f"{head}.experts.{_JOINED[stem]}"
        if tail != stem:
            experts, size = _shape(parts, 2)
            stacks = [_experts(f"{joined_name}_bias", parts, (experts, len(parts) * size))]
        else:
            stacks = _weights(joined_name, parts)
        joined |= {tensor.name: tensor for tensor in stacks}
    return joined


def _weights(name: str, parts: tuple[GgufTensor, ...]) -> Iterator[_Experts]:
    """Yields the projections, or their values and scales if all of them are in MXFP4."""
    experts, outputs, inputs = _shape(parts, 3)
    outputs *= len(parts)
    if any(part.kind != MXFP4 for part in parts):
        yield _experts(name, parts, (experts, inputs, outputs), transposed=True)
        return
    values, scales = [], []
    for part in parts:
        fields, shape = vars(part), (*part.shape[:-1], inputs // PER_SCALE)
        values.append(Mxfp4Values(**fields))
        scales.append(Mxfp4Scales(**fields | {"shape": shape}))
    groups = experts, outputs, inputs // PER_SCALE
    yield _experts(name + BLOCKS, tuple(values), (*groups, PER_SCALE // 2), code=PACKED_CODE)
    yield _experts(name + SCALES, tuple(scales), groups, code=PACKED_CODE)


def _shape(parts: tuple[GgufTensor, ...], rank: int) -> tuple[int, ...]:
    """Returns the shape that all parts have; raises ValueError unless it is of this rank."""
    shape = parts[0].shape
    if len(shape) != rank or any(part.shape != shape for part in parts):
        shapes = " and ".join(str(list(part.shape)) for part in parts)
        raise ValueError(f"{parts[0].name!r}: shapes {shapes} are no stack of experts")
    return shape


def _experts(
    name: str,
    parts: tuple[GgufTensor, ...],
    shape: tuple[int, ...],
    *,
    code: str = "",
    transposed: bool = False,
) -> _Experts:
    first = parts[0]
    place = (code or first.code, shape, first.begin, first.end)
    return _Experts(first.file, name, *place, parts, transposed)
