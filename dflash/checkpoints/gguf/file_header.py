"""Header of a GGUF file: its metadata and the places of its tensors.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

import dataclasses
import functools
import math
import pathlib
import stat
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from dflash import errors
from dflash.storage import paths
from dflash.version import install_command

MAGIC = b"GGUF"

_VERSIONS, _VERSION_BYTES = (2, 3), 4
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
      metadata: Values by key: numbers, booleans, strings and lists of these.
      tensors: Entries by the names of ggml.
    """

    file: pathlib.Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorEntry]

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        """Returns the value of a key; `default` if the file lacks it.

        Args:
          kind: Expected type: int, float (also for integers), bool, str or list.
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
    """Reads the header of a GGUF file, and checks that the file holds every tensor."""
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
    package(file)
    from dflash.checkpoints.gguf import checked_reader  # Imported late: it derives from gguf's.

    try:
        _check_beginning(file)
        reader = checked_reader.CheckedReader(file)
        metadata = checked_reader.values_of(reader)
    except (OSError, errors.CheckpointError):
        raise
    except EOFError as error:
        raise errors.CheckpointError(
            f"{file}: truncated or corrupt: {size:,} bytes do not hold its header; {_AGAIN}"
        ) from error
    except Exception as error:  # The package raises any exception for a damaged file.
        raise corrupt(file, str(error.args[0])) from error
    return GgufHeader(file, metadata, dict(_entries(file, reader)))


def corrupt(file: pathlib.Path, reason: str) -> errors.CheckpointError:
    """Returns the error for a damaged file."""
    return errors.CheckpointError(f"{file}: corrupt ({reason}); {_AGAIN}")


def _check_beginning(file: pathlib.Path) -> None:
    """Raises unless the file begins as a GGUF file of a known version."""
    with file.open("rb") as stream:
        magic, version = stream.read(len(MAGIC)), stream.read(_VERSION_BYTES)
    if len(version) < _VERSION_BYTES:
        raise EOFError
    if magic != MAGIC:
        raise errors.CheckpointError(
            f"{file}: not a GGUF file: it begins with {magic!r}, not {MAGIC!r}"
        )
    number = int.from_bytes(version, "little")
    if number not in _VERSIONS:
        swapped = int.from_bytes(version, "big") in _VERSIONS
        what = "big-endian" if swapped else f"GGUF version {number}"
        raise errors.CheckpointError(
            f"{file}: {what} is not supported, only little-endian files of version "
            f"{' or '.join(map(str, _VERSIONS))}"
        )


def _entries(file: pathlib.Path, reader: Any) -> Iterator[tuple[str, TensorEntry]]:
    """Yields each tensor's name and place; raises unless one follows the other."""
    size, alignment = len(reader.data), int(reader.alignment)
    expected = int(reader.data_offset)
    for name, described in sorted(reader.described.items(), key=lambda item: item[1][2]):
        shape, number, begin = described
        kind, block, block_bytes = _block_of(file, name, number)
        if not shape or shape[-1] % block or 0 in shape:
            raise corrupt(file, f"tensor {name!r} is {kind} of shape {list(shape)}")
        if begin != expected:
            raise corrupt(file, f"tensor {name!r} begins at {begin:,}, not at {expected:,}")
        end = begin + math.prod(shape) // block * block_bytes
        if end > size:
            raise errors.CheckpointError(
                f"{file}: truncated: {size:,} bytes, but tensor {name!r} ends at {end:,}; {_AGAIN}"
            )
        yield name, TensorEntry(kind, shape, begin, end)
        expected = -(-end // alignment) * alignment


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
    """Returns the module `gguf`."""
    try:
        import gguf  # Imported late, since only these files need it.
    except ImportError as error:
        raise errors.CheckpointError(
            f"{file}: needs gguf; {install_command('gguf')}, or give safetensors"
        ) from error
    return gguf
