"""Headers of safetensors checkpoints, read without the tensors."""

import dataclasses
import json
import math
import pathlib
from collections.abc import Mapping
from typing import Any, Self

import ml_dtypes
import numpy as np

from dflash import errors
from dflash.checkpoints import files
from dflash.checkpoints.packed_values import PACKINGS, Index, ValuePacking
from dflash.storage import files as run_files

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
PLAIN_DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
PACKED_CODE = "U8"  # Of values of fewer bits; see `packed_values`.
BUFFER_DTYPES = {"I64": np.int64, "I32": np.int32, "BOOL": np.bool_}

_QUANTIZED_DTYPES = {"I8": np.int8, "F8_E4M3": ml_dtypes.float8_e4m3fn}
_DTYPES = PLAIN_DTYPES | BUFFER_DTYPES | _QUANTIZED_DTYPES | {PACKED_CODE: np.uint8}


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """Location, dtype and shape of a stored tensor, from the header of its file."""

    file: pathlib.Path
    name: str
    code: str  # Dtype in the notation of safetensors, such as "BF16".
    shape: tuple[int, ...]
    begin: int  # Offset of the first byte in the file.
    end: int  # Offset after the last byte.

    @property
    def packing(self) -> ValuePacking | None:
        """Returns the packing of the values, by the tensor's name and dtype; None for none."""
        for packing in PACKINGS:
            if self.name.endswith(packing.suffix) and self.code == packing.code:
                return packing
        return None

    @property
    def row_bytes(self) -> int:
        """Returns the bytes that a row takes in memory; those of all for no dimensions."""
        return max(1, (self.end - self.begin) // max(1, math.prod(self.shape[:1])))

    def read(self, index: Index) -> np.ndarray:
        """Returns the values at `index`, unpacked; it reads whole rows, however few columns."""
        packing = self.packing
        return self._stored(index) if packing is None else packing.read(self._stored, index)

    def _stored(self, index: Index) -> np.ndarray:
        """Returns the stored values at `index`.

        The file is memory-mapped only for this call, since touched pages count as memory of this
        process for as long as they are mapped.
        """
        rows, columns = index[:1], index[1:]
        first, last = (rows[0].start, rows[0].stop) if rows else (0, 1)
        data = run_files.view(
            self.file, self.begin + first * self.row_bytes, self.begin + last * self.row_bytes
        )
        shape = (last - first, *self.shape[1:]) if rows else ()
        return data.view(_DTYPES[self.code]).reshape(shape)[(slice(None), *columns) if rows else ()]


@dataclasses.dataclass(frozen=True)
class ScaledTensor(StoredTensor):
    """Matrix in eight bits that is read as the numbers that it stands for.

    Attributes:
      values: Tensor of the values.
      scales: Tensor of the scales, one row per block of rows.
      block: Rows and columns that share a scale.
    """

    values: StoredTensor
    scales: StoredTensor
    block: tuple[int, int]

    @classmethod
    def of(cls, values: StoredTensor, scales: StoredTensor, block: tuple[int, int] | None) -> Self:
        """Returns the numbers of stored values; None as the block is one scale per row."""
        place = (getattr(values, field.name) for field in dataclasses.fields(StoredTensor))
        return cls(*place, values, scales, block or (1, values.shape[-1]))

    def read(self, index: Index) -> np.ndarray:
        index = (*index, slice(0, self.shape[-1]))[:2]
        places = [
            np.arange(part.start, part.stop) // size
            for part, size in zip(index, self.block, strict=True)
        ]
        scales = self.scales.read(tuple(slice(0, size) for size in self.scales.shape))
        scales = scales.astype(np.float32)[np.ix_(*places)]
        return self.values.read(index).astype(np.float32) * scales


def source_of(directory: pathlib.Path) -> pathlib.Path:
    """Returns the file that holds or lists the weights of a checkpoint.

    A single file takes precedence over an index, as in transformers: an index beside it is left
    over from an earlier version of the checkpoint.
    """
    single, index = directory / WEIGHTS, directory / INDEX
    return index if index.exists() and not single.exists() else single


def read_headers(directory: pathlib.Path) -> dict[str, StoredTensor]:
    """Describes every tensor of a checkpoint, by name, without reading any."""
    index = source_of(directory)
    if index.name == WEIGHTS:
        return {tensor.name: tensor for tensor in read_file(index)}
    weight_map = files.read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise errors.CheckpointError(f"{index}: has no weight_map")
    for name, shard in weight_map.items():
        if not isinstance(shard, str):
            raise errors.CheckpointError(
                f"{index}: weight_map: {name!r}: expected the name of a file, got {shard!r}"
            )
    tensors = {}
    for shard in sorted(set(weight_map.values())):
        expected = [name for name in weight_map if weight_map[name] == shard]
        file = directory / shard
        if pathlib.PurePath(shard).name != shard:
            raise errors.CheckpointError(f"{index}: {shard!r} is not the name of a file beside it")
        if not _is_file(file):
            raise errors.CheckpointError(
                f"{file}: missing; {INDEX} says it holds {files.quote_some(expected)}"
            )
        in_file = {tensor.name: tensor for tensor in read_file(file)}
        lacking = [name for name in expected if name not in in_file]
        if lacking:
            raise errors.CheckpointError(
                f"{file}: lacks {files.quote_some(lacking)}, which {INDEX} says it holds"
            )
        tensors.update(in_file)
    return tensors


def read_file(file: pathlib.Path) -> list[StoredTensor]:
    """Reads the header of one file and checks that the file is complete.

    Source: https://huggingface.co/docs/safetensors, "Format".
    """
    again = "copy or download the file again"
    try:
        size = file.stat().st_size
        length = int.from_bytes(run_files.view(file, 0, min(size, 8)).tobytes(), "little")
        if size < 8 or length > size - 8:
            raise errors.CheckpointError(
                f"{file}: truncated or corrupt: {size:,} bytes do not hold its header; {again}"
            )
        head = run_files.view(file, 0, 8 + length).tobytes()
        header = json.loads(head[8:])
        header.pop("__metadata__", None)
        tensors = [_stored_tensor(file, name, len(head), entry) for name, entry in header.items()]
    except OSError as error:
        raise errors.CheckpointError(f"{file}: cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise errors.CheckpointError(f"{file}: corrupt header; {again}") from error
    for tensor in sorted(tensors, key=lambda tensor: tensor.begin):
        if tensor.end > size:
            raise errors.CheckpointError(
                f"{file}: truncated: {size:,} bytes, but tensor {tensor.name!r} ends at "
                f"{tensor.end:,}; {again}"
            )
    return tensors


def _stored_tensor(
    file: pathlib.Path, name: str, start: int, entry: Mapping[str, Any]
) -> StoredTensor:
    """Parses one header entry; raises ValueError, KeyError or TypeError if it is malformed."""
    begin, end = entry["data_offsets"]
    shape = tuple(entry["shape"])
    if not all(type(number) is int for number in (begin, end, *shape)):
        raise ValueError("shape and data_offsets are integers")
    code, num_bytes = str(entry["dtype"]), end - begin
    if code in _DTYPES:  # Buffers that are ignored may have another one.
        num_bytes = math.prod(shape) * np.dtype(_DTYPES[code]).itemsize
    if min(begin, end - begin, *shape, 0) < 0 or end - begin != num_bytes:
        raise ValueError("data_offsets do not fit shape and dtype")
    return StoredTensor(file, name, code, shape, start + begin, start + end)


def _is_file(path: pathlib.Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # No file can have this name.
        return False
