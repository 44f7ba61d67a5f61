"""Tensors of Hugging Face's layout that GGUF files hold in parts."""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from dflash.checkpoints.gguf import layouts, stored_values
from dflash.checkpoints.gguf.stored_values import MXFP4, GgufTensor, Mxfp4Scales, Mxfp4Values
from dflash.checkpoints.packed_values import BLOCKS, PER_SCALE, SCALES
from dflash.checkpoints.safetensors_header import PACKED_CODE, Index, StoredTensor

Tensors = Mapping[str, StoredTensor]

_QKV, _Z, _QKVZ = "in_proj_qkv.weight", "in_proj_z.weight", "in_proj_qkvz.weight"
_GATE, _UP, _DOWN = "gate_proj", "up_proj", "down_proj"
_JOINED = {_GATE: "gate_up_proj", _DOWN: _DOWN}
_FLOAT32_BYTES = 4


def unchanged(tensors: Tensors, config: Mapping[str, Any]) -> Tensors:
    """Returns the tensors of families that join none."""
    return tensors


@dataclasses.dataclass(frozen=True)
class _JoinedRows(StoredTensor):
    """Rows of several tensors.

    Attributes:
      parts: The tensors.
      order: Row of the parts, one after another, that holds each row.
    """

    parts: tuple[GgufTensor, ...]
    order: np.ndarray

    @property
    def row_bytes(self) -> int:
        """Returns the bytes that a row takes in memory, dequantized."""
        return self.parts[0].row_bytes

    def read(self, index: Index) -> np.ndarray:
        """Returns the values at `index`."""
        rows, *columns = index
        return stored_values.read_ordered(self._rows, self.order[rows])[(slice(None), *columns)]

    def eight_bits(self) -> tuple[StoredTensor, StoredTensor] | None:
        """Returns values and scales; see `GgufTensor.eight_bits`."""
        pairs = [part.eight_bits() for part in self.parts]
        if None in pairs:
            return None
        joined = (_join_rows(self.name, parts, self.order) for parts in zip(*pairs, strict=True))
        values, scales = joined
        name = self.name.removesuffix("weight") + stored_values.Q8_0_FORMAT.scale_suffix
        return values, dataclasses.replace(scales, name=name)

    def _rows(self, first: int, last: int) -> np.ndarray:
        """Returns rows first … last - 1 of the parts, one after another."""
        read, begin = [], 0
        for part in self.parts:
            count, *others = part.shape
            rows = slice(max(first - begin, 0), min(last - begin, count))
            if rows.start < rows.stop:
                read.append(part.read((rows, *(slice(0, size) for size in others))))
            begin += count
        return np.concatenate(read)


def _join_rows(name: str, parts: Sequence[GgufTensor], order: np.ndarray) -> _JoinedRows:
    first = parts[0]
    shape = (sum(part.shape[0] for part in parts), *first.shape[1:])
    return _JoinedRows(
        first.file, name, first.code, shape, first.begin, first.end, tuple(parts), order
    )


def qkvz(tensors: Tensors, config: Mapping[str, Any]) -> Tensors:
    """Joins the projections of Qwen3-Next's gated DeltaNet, by key head.

    Args:
      tensors: Tensors by the names of Hugging Face.
      config: Contents of config.json.
    Raises:
      ValueError: The shapes do not fit the config.
    """
    joined = dict(tensors)
    for name in [name for name in tensors if name.endswith(_QKV)]:
        parts = [joined.pop(part) for part in (name, name.replace(_QKV, _Z)) if part in joined]
        whole = name.replace(_QKV, _QKVZ)
        order = layouts.grouped_by_key_head(config)
        if len(order) != sum(part.shape[0] for part in parts):
            raise ValueError(f"{whole!r}: {len(order)} rows expected in attn_qkv and attn_gate")
        joined[whole] = _join_rows(whole, parts, order)
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
        whole = f"{head}.experts.{_JOINED[stem]}"
        found = [_biases(f"{whole}_bias", parts)] if tail != stem else _weights(whole, parts)
        joined |= {tensor.name: tensor for tensor in found}
    return joined


def _biases(name: str, parts: tuple[GgufTensor, ...]) -> _Experts:
    experts, size = _shape(parts, 2)
    return _experts(name, parts, (experts, len(parts) * size))


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
    """Returns the shape of all parts.

    Raises:
      ValueError: Their shapes differ, or have another rank.
    """
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
