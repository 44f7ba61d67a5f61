"""Header of a GGUF file: its metadata and the places of its tensors.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

import dataclasses
import functools
import math
import pathlib
import re
import stat
import typing
from collections.abc import Iterator
from typing import Annotated, Any, NamedTuple, TypeVar

import numpy as np

from dflash import errors
from dflash.storage import paths
from dflash.version import install_command

MAGIC = b"GGUF"

_VERSIONS, _VERSION_BYTES = (2, 3), 4
_AGAIN = "copy or download the file again"
_PART_NAME = re.compile(r"(.*)-00001-of-\d{5}\.gguf")

Values = TypeVar("Values")


class TensorEntry(NamedTuple):
    """Tensor as the header describes it.

    Attributes:
      kind: Name of its quantization type in ggml, such as "Q4_1".
      shape: Shape in the order of NumPy; ggml prints it reversed.
      begin: Offset of its first byte in the file.
      end: Offset after its last byte.
      file: The file, which is not the header's if the model is split into several files.
    """

    kind: str
    shape: tuple[int, ...]
    begin: int
    end: int
    file: pathlib.Path


@dataclasses.dataclass(frozen=True)
class GgufHeader:
    """Header of a file: numbers, booleans, strings, lists by key, and tensors by ggml's names."""

    file: pathlib.Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorEntry]

    def read(self, schema: type[Values], prefix: str) -> Values:
        """Reads the fields of a dataclass from the metadata; integers count as floats, too.

        Args:
          schema: Dataclass; the key of a field is its name, or the note of an `Annotated` type.
          prefix: Beginning of the keys.
        Raises:
          CheckpointError: A value has another type, or one without a default is missing.
        """
        types, values = typing.get_type_hints(schema), {}
        for field in dataclasses.fields(schema):
            key = prefix + key_of(field)
            value = self.metadata.get(key)
            if value is not None:
                self._check(key, value, types[field.name])
                values[field.name] = value
            elif field.default is dataclasses.MISSING:
                raise errors.CheckpointError(f"{self.file}: the metadata lacks {key}")
        return schema(**values)

    def _check(self, key: str, value: Any, kind: Any) -> None:
        kinds = [each for each in typing.get_args(kind) or (kind,) if each is not type(None)]
        accepted = {*kinds, int} if float in kinds else {*kinds}
        if type(value) not in accepted and Any not in accepted:
            expected = " or ".join(each.__name__ for each in kinds)
            raise errors.CheckpointError(
                f"{self.file}: {key}: expected {expected}, got {type(value).__name__}"
            )
        if type(value) is float and not math.isfinite(value):
            raise unsupported(self.file, f"{key} is {value}")


def key_of(field: dataclasses.Field) -> str:
    """Returns the key of a field, without the prefix: the note of its type, or its name."""
    return getattr(field.type, "__metadata__", (field.name,))[0]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Split:
    """Place of a file among those that a model is split into."""

    count: int = 1
    number: Annotated[int, "no"] = 0
    num_tensors: Annotated[int | None, "tensors.count"] = None


def read_header(file: pathlib.Path) -> GgufHeader:
    """Reads the header of a model's first file, and checks that the files hold every tensor."""
    header = _read_part(file)
    split = header.read(_Split, "split.")
    return header if split.count < 2 else _read_others(header, split)


def _read_others(header: GgufHeader, split: _Split) -> GgufHeader:
    """Returns the header of the first of several files with the tensors of all of them."""
    match, count = _PART_NAME.fullmatch(header.file.name), split.count
    if match is None or split.number:
        raise errors.CheckpointError(
            f"{header.file}: a part of a model that is split into {count} files; give the first, "
            f"…-00001-of-{count:05}.gguf, or join them with llama-gguf-split --merge"
        )
    tensors = dict(header.tensors)
    for number in range(2, count + 1):
        part = header.file.with_name(f"{match[1]}-{number:05}-of-{count:05}.gguf")
        if not part.exists():
            raise errors.CheckpointError(f"{part}: missing; the model is split into {count} files")
        tensors |= _read_part(part).tensors
    if split.num_tensors not in (None, len(tensors)):
        raise errors.CheckpointError(
            f"{header.file}: the {count} parts of the model hold {len(tensors)} tensors, not "
            f"{split.num_tensors}; {_AGAIN}"
        )
    return dataclasses.replace(header, tensors=tensors)


def _read_part(file: pathlib.Path) -> GgufHeader:
    if paths.in_bucket(file):
        raise errors.CheckpointError(f"{file}: GGUF files are read from a disk; copy it to one")
    try:
        status = file.stat()
        if not stat.S_ISREG(status.st_mode):
            raise errors.CheckpointError(f"{file}: not a regular file")
        return _read_header(file, status.st_size, status.st_mtime_ns)
    except OSError as error:
        raise errors.CheckpointError(f"{file}: cannot be read: {error.strerror}") from error


@functools.lru_cache(maxsize=64)  # A model may be split into dozens of files.
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
        raise _corrupt(file, str(error).partition("\n")[0] or type(error).__name__) from error
    return GgufHeader(file, metadata, dict(_entries(file, reader)))


def _corrupt(file: pathlib.Path, reason: str) -> errors.CheckpointError:
    return errors.CheckpointError(f"{file}: corrupt ({reason}); {_AGAIN}")


def unsupported(file: pathlib.Path, reason: str) -> errors.CheckpointError:
    """Returns the error for contents that may be damaged, or of a kind that is not read."""
    return errors.CheckpointError(f"{file}: {reason}, which is not supported")


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
            raise _corrupt(file, f"tensor {name!r} is {kind} of shape {list(shape)}")
        if begin != expected:
            raise _corrupt(file, f"tensor {name!r} begins at {begin:,}, not at {expected:,}")
        end = begin + math.prod(shape) // block * block_bytes
        if end > size:
            raise errors.CheckpointError(
                f"{file}: truncated: {size:,} bytes, but tensor {name!r} ends at {end:,}; {_AGAIN}"
            )
        yield name, TensorEntry(kind, shape, begin, end, file)
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
