"""Header of a GGUF file: its metadata and the places of its tensors.

The reader of the `gguf` package trusts the lengths in a file, so that a damaged one makes it loop
or read past the end. This one checks each length against the size of the file.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

import dataclasses
import functools
import math
import pathlib
import stat
import struct
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from dflash import errors
from dflash.storage import paths
from dflash.version import install_command

MAGIC = b"GGUF"

_VERSIONS = 2, 3
_ALIGNMENT = "general.alignment"
_DEFAULT_ALIGNMENT = 32
_MAX_DIMENSIONS = 4
_MAX_ITEMS = 2**24  # Values of an array; vocabularies have a few hundred thousand.
_MAX_TEXT_BYTES = 2**24  # Bytes of a string; chat templates have some thousands.
_SCALARS = {  # Value type in the file -> its format for `struct`.
    **{0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?"},
    **{10: "Q", 11: "q", 12: "d"},
}
_STRING, _ARRAY = 8, 9
_LEAST_BYTES = {"value": 13, "tensor": 24}  # Smallest entry: empty name, type, and so on.
_AGAIN = "copy or download the file again"


class TensorEntry(NamedTuple):
    """Tensor as the header describes it.

    Attributes:
      kind: Name of its quantization type in ggml, such as "Q4_1".
      shape: Shape in the order of NumPy; ggml prints it reversed.
      begin: Offset of its first byte in the file.
      end: Offset after its last byte.
    """

    kind: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclasses.dataclass(frozen=True)
class GgufHeader:
    """Contents of a file's header.

    Attributes:
      file: The file.
      metadata: Values by key: numbers, booleans, strings and lists of these.
      tensors: Entries by the names of ggml.
    """

    file: pathlib.Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorEntry]

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        """Returns the value of a key; `default` if the file lacks it.

        Args:
          key: Key of the metadata.
          kind: Expected type: int, float (also for integers), bool, str or list.
          default: Value of a missing key.
        Raises:
          CheckpointError: The value has another type.
        """
        value = self.metadata.get(key)
        if value is None:
            return default
        if type(value) is not kind and not (kind is float and type(value) is int):
            raise errors.CheckpointError(
                f"{self.file}: {key}: expected {kind.__name__}, got {type(value).__name__}"
            )
        if kind is float and not math.isfinite(value):
            raise corrupt(self.file, f"{key} is {value}")
        return value

    def require(self, key: str, kind: type) -> Any:
        """Returns the value of a key that the file must have; see `get`."""
        value = self.get(key, kind)
        if value is None:
            raise errors.CheckpointError(f"{self.file}: the metadata lacks {key}")
        return value


def read_header(file: pathlib.Path) -> GgufHeader:
    """Reads the header of a GGUF file, and checks that the file holds every tensor.

    Raises:
      CheckpointError: The file is no GGUF file, damaged or truncated, has tensors of unsupported
        types, or the `gguf` package is not installed.
    """
    if paths.in_bucket(file):
        raise errors.CheckpointError(f"{file}: GGUF files are read from a disk; copy it to one")
    try:
        status = file.stat()
        if not stat.S_ISREG(status.st_mode):
            raise errors.CheckpointError(f"{file}: not a regular file")
        return _read_header(file, status.st_size, status.st_mtime_ns)
    except OSError as error:
        raise errors.CheckpointError(f"{file}: cannot be read: {error.strerror}") from error


@functools.lru_cache(maxsize=4)
def _read_header(file: pathlib.Path, size: int, mtime_ns: int) -> GgufHeader:
    """Reads the header of a file in this state; a run looks at it several times."""
    with file.open("rb") as stream:
        fields = _Fields(file, stream, size)
        num_tensors, num_values = _read_preamble(fields)
        metadata = _read_metadata(fields, num_values)
        placed = _read_entries(fields, num_tensors)
        start = _aligned(fields.position, metadata, file)
    return GgufHeader(file, metadata, _place(file, placed, start, metadata, size))


class _Fields:
    """Reads fields one after another, none beyond the end of the file."""

    def __init__(self, file: pathlib.Path, stream: BinaryIO, size: int):
        self.file = file
        self._stream = stream
        self._size = size
        self.position = 0

    def take(self, num_bytes: int) -> bytes:
        """Returns the next bytes."""
        self.check_room(num_bytes)
        self.position += num_bytes
        return self._stream.read(num_bytes)

    def check_room(self, num_bytes: int) -> None:
        """Raises if fewer bytes are left."""
        if num_bytes > self._size - self.position:
            raise errors.CheckpointError(
                f"{self.file}: truncated or corrupt: {self._size:,} bytes do not hold its header; "
                f"{_AGAIN}"
            )

    def number(self, code: str) -> Any:
        """Returns the next number, of a format of `struct`."""
        return struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))[0]

    def text(self) -> str:
        """Returns the next string."""
        num_bytes = self.number("Q")
        self.check_room(num_bytes)
        if num_bytes > _MAX_TEXT_BYTES:
            raise corrupt(self.file, f"a string of {num_bytes:,} bytes")
        try:
            return self.take(num_bytes).decode()
        except UnicodeDecodeError as error:
            raise corrupt(self.file, "a string is not UTF-8") from error

    def array(self) -> list[Any]:
        """Returns the next array, of numbers, booleans or strings."""
        kind, count = self.number("I"), self.number("Q")
        self.check_room(count)
        if count > _MAX_ITEMS:
            raise corrupt(self.file, f"an array of {count:,} values")
        if kind == _STRING:
            return [self.text() for _ in range(count)]
        if kind not in _SCALARS:
            raise corrupt(self.file, f"an array of values of type {kind}")
        code = np.dtype(_SCALARS[kind]).newbyteorder("<")
        return np.frombuffer(self.take(count * code.itemsize), code).tolist()

    def value(self) -> Any:
        """Returns the next value with its type."""
        kind = self.number("I")
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            return self.array()
        if kind not in _SCALARS:
            raise corrupt(self.file, f"a value of type {kind}")
        return self.number(_SCALARS[kind])


def corrupt(file: pathlib.Path, reason: str) -> errors.CheckpointError:
    """Returns the error for a damaged file."""
    return errors.CheckpointError(f"{file}: corrupt ({reason}); {_AGAIN}")


def _read_preamble(fields: _Fields) -> tuple[int, int]:
    """Returns the numbers of tensors and of metadata values."""
    magic = fields.take(len(MAGIC))
    if magic != MAGIC:
        raise errors.CheckpointError(
            f"{fields.file}: not a GGUF file: it begins with {magic!r}, not {MAGIC!r}"
        )
    version = fields.number("I")
    if version not in _VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        what = "big-endian" if swapped in _VERSIONS else f"GGUF version {version}"
        raise errors.CheckpointError(
            f"{fields.file}: {what} is not supported, only little-endian files of version "
            f"{' or '.join(map(str, _VERSIONS))}"
        )
    num_tensors, num_values = fields.number("Q"), fields.number("Q")
    fields.check_room(num_tensors * _LEAST_BYTES["tensor"] + num_values * _LEAST_BYTES["value"])
    return num_tensors, num_values


def _read_metadata(fields: _Fields, count: int) -> dict[str, Any]:
    metadata = {}
    for _ in range(count):
        key = fields.text()
        if key in metadata:
            raise corrupt(fields.file, f"two values of {key!r}")
        metadata[key] = fields.value()
    return metadata


def _read_entries(fields: _Fields, count: int) -> dict[str, tuple[tuple[int, ...], int, int]]:
    """Returns the shape, type number and offset of each tensor."""
    entries: dict[str, tuple[tuple[int, ...], int, int]] = {}
    for _ in range(count):
        name, rank = fields.text(), fields.number("I")
        if name in entries:
            raise corrupt(fields.file, f"two tensors {name!r}")
        if not 1 <= rank <= _MAX_DIMENSIONS:
            raise corrupt(fields.file, f"tensor {name!r} has {rank} dimensions")
        shape = tuple(fields.number("Q") for _ in range(rank))[::-1]
        entries[name] = shape, fields.number("I"), fields.number("Q")
    return entries


def _aligned(position: int, metadata: dict[str, Any], file: pathlib.Path) -> int:
    """Returns the first multiple of the file's alignment from `position` on."""
    alignment = metadata.get(_ALIGNMENT, _DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment <= 0 or alignment & (alignment - 1):
        raise corrupt(file, f"{_ALIGNMENT} is {alignment!r}")
    return -(-position // alignment) * alignment


def _place(file, entries, start: int, metadata, size: int) -> dict[str, TensorEntry]:
    """Checks each tensor's type, size and offset, and returns its place in the file."""
    tensors = {}
    expected = start
    for name, (shape, number, offset) in sorted(entries.items(), key=lambda entry: entry[1][2]):
        kind, block, block_bytes = _block_of(file, name, number)
        if shape[-1] % block or 0 in shape:
            raise corrupt(file, f"tensor {name!r} is {kind} of shape {list(shape)}")
        begin, end = start + offset, start + offset + math.prod(shape) // block * block_bytes
        if begin != expected:
            raise corrupt(file, f"tensor {name!r} begins at {begin:,}, not at {expected:,}")
        if end > size:
            raise errors.CheckpointError(
                f"{file}: truncated: {size:,} bytes, but tensor {name!r} ends at {end:,}; {_AGAIN}"
            )
        tensors[name] = TensorEntry(kind, shape, begin, end)
        expected = _aligned(end, metadata, file)
    return tensors


def _block_of(file: pathlib.Path, name: str, number: int) -> tuple[str, int, int]:
    """Returns the name of a type, the numbers per block and the bytes per block."""
    gguf = package(file)
    kinds = block_sizes(gguf)
    known = {kind.value: kind for kind in kinds}
    if number not in known:
        names = {kind.value: kind.name for kind in gguf.GGMLQuantizationType}
        raise errors.CheckpointError(
            f"{file}: tensor {name!r} has type {names.get(number, number)}, which is not "
            f"supported, only {', '.join(kind.name for kind in kinds)}"
        )
    return known[number].name, *kinds[known[number]]


@functools.cache
def block_sizes(gguf: Any) -> dict[Any, tuple[int, int]]:
    """Returns (numbers, bytes) per block of each type that is read.

    These are the types that the module `gguf` can dequantize, and the ids of tokens.
    """
    sizes = {}
    for kind, (block, num_bytes) in gguf.GGML_QUANT_SIZES.items():
        try:
            gguf.dequantize(np.zeros((1, num_bytes), np.uint8), kind)
        except (NotImplementedError, ValueError):
            continue
        sizes[kind] = block, num_bytes
    return sizes | {gguf.GGMLQuantizationType.I64: (1, 8)}


def package(file: pathlib.Path) -> Any:
    """Returns the module `gguf`.

    Raises:
      CheckpointError: It is not installed.
    """
    try:
        import gguf  # Imported late, since only these files need it.
    except ImportError as error:
        raise errors.CheckpointError(
            f"{file}: needs gguf; {install_command('gguf')}, or give safetensors"
        ) from error
    return gguf
