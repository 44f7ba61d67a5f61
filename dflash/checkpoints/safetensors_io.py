"""The Hugging Face layout: model.safetensors, or shards of it listed in an index.

Reading goes tensor by tensor and, within a tensor, piece by piece into a buffer that is laid out as
the device wants it, so that the host never holds more than one such buffer beside the weights.
"""

import contextlib
import dataclasses
import fnmatch
import functools
import json
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
from flax import nnx

from dflash import errors
from dflash.checkpoints import files
from dflash.parallel import parameters

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_SHARD_BYTES = 5 * 2**30
# Computed from the config here, but stored as a buffer by some older checkpoints.
IGNORED = ("*.rotary_emb.inv_freq", "rotary_emb.inv_freq")

_PIECE_BYTES = 8 * 2**20
_ALIGNMENT_BYTES = 64  # what lets a CPU device use a host buffer as it is
_DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": jnp.bfloat16}  # of weights
_TABLE_DTYPES = {"I64": np.int64, "I32": np.int32, "BOOL": np.bool_}
_CODES = {np.dtype(dtype): code for code, dtype in (_DTYPES | _TABLE_DTYPES).items()}


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies and what it is, as the header of its file says."""

    file: pathlib.Path
    name: str
    code: str  # dtype as safetensors spells it: "BF16"
    shape: tuple[int, ...]
    begin: int  # bytes after the header
    end: int


def load(module: nnx.Module, directory: pathlib.Path) -> None:
    """Fills the abstract parameters of `module`, each directly sharded and in its own dtype.

    Peak host memory stays within one tensor (its local shards, in the module's dtype) of what ends
    up resident; on a CPU device, whose arrays take over the buffers, within `_PIECE_BYTES` or so.

    Args:
      module: offers `checkpoint_name(path)`, and where it likes `ignored_checkpoint_names` and
        `ignored_checkpoint_suffixes`. Parameters at a path that ends in ".kernel" are stored
        transposed. Tables are filled too.
      directory: holds model.safetensors or an index with its shards.
    Raises:
      CheckpointError: a file is missing or damaged, or the tensors are not those of the module.
    """
    tensors = read_headers(directory)
    wanted = {path: leaf.get_value() for path, leaf in parameters.named_arrays(module)}
    _check(tensors, wanted, module, directory)
    in_file_order = sorted(
        ((tensors[module.checkpoint_name(path)], path) for path in wanted),
        key=lambda pair: (pair[0].file.name, pair[0].begin),
    )
    sized = [(pair, pair[0].end - pair[0].begin) for pair in in_file_order]
    total = sum(size for _, size in sized)
    values = {}
    for tensor, path in files.track(sized, total, f"reading {directory.name}"):
        values[path] = _read(tensor, wanted[path], transposed=path.endswith(".kernel"))
    parameters.assign(module, values)


def read_headers(directory: pathlib.Path) -> dict[str, StoredTensor]:
    """Describes every tensor of a checkpoint, by name, without reading any.

    Raises:
      CheckpointError: a file is missing, truncated or corrupt, or the index lies.
    """
    index = directory / INDEX
    if not index.exists():
        return {tensor.name: tensor for tensor in _read_header(directory / WEIGHTS)}
    weight_map = files.read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise errors.CheckpointError(f"{index}: no weight_map in it")
    tensors = {}
    for shard in sorted({str(shard) for shard in weight_map.values()}):
        expected = [name for name in weight_map if weight_map[name] == shard]
        file = directory / shard
        if pathlib.PurePath(shard).name != shard:
            raise errors.CheckpointError(f"{index}: {shard!r} is not the name of a file beside it")
        if not file.is_file():
            raise errors.CheckpointError(
                f"{file}: missing; {INDEX} says it holds {files.quote_some(expected)}"
            )
        found = {tensor.name: tensor for tensor in _read_header(file)}
        lacking = [name for name in expected if name not in found]
        if lacking:
            raise errors.CheckpointError(
                f"{file}: lacks {files.quote_some(lacking)}, which {INDEX} says it holds"
            )
        tensors.update(found)
    return tensors


def stored_dtypes(directory: pathlib.Path) -> set[np.dtype]:
    """Dtypes among the stored weights; tables do not count.

    Raises:
      CheckpointError: the checkpoint cannot be read, or a tensor is not of these floating points.
    """
    tensors = read_headers(directory).values()
    weights = [
        tensor
        for tensor in tensors
        if not _matches(tensor.name, IGNORED) and tensor.code not in _TABLE_DTYPES
    ]
    for tensor in weights:
        _check_code(tensor, _DTYPES)
    return {np.dtype(_DTYPES[tensor.code]) for tensor in weights}


def save(
    module: nnx.Module, directory: pathlib.Path, dtype=None, max_shard_bytes: int = MAX_SHARD_BYTES
) -> int:
    """Writes what `module` holds under its checkpoint names, one tensor in memory at a time.

    All processes of a multi-host run call this; process 0 writes.

    Args:
      module: offers `checkpoint_name(path)`; its parameters and tables hold arrays.
      directory: exists already.
      dtype: of the stored weights; None keeps each parameter's own.
      max_shard_bytes: a larger model is split into several files and an index.
    Returns:
      Number of tensors written.
    """
    shards = _pack(
        [_Outgoing(module, path, leaf, dtype) for path, leaf in parameters.named_arrays(module)],
        max_shard_bytes,
    )
    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        file = WEIGHTS
        if len(shards) > 1:
            file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write(directory / file, shard)
        weight_map |= {tensor.name: file for tensor in shard}
    if len(shards) > 1 and jax.process_index() == 0:
        total = sum(tensor.num_bytes for shard in shards for tensor in shard)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        files.write_json(directory / INDEX, index)
    return len(weight_map)


def _read_header(file: pathlib.Path) -> list[StoredTensor]:
    """Reads the header of one file and checks that the file is all there.

    The safetensors library finds the same faults, but does not say which tensor they cost.
    """
    again = "copy or download the file again"
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or length > size - 8:
                raise errors.CheckpointError(
                    f"{file}: truncated or corrupt: {size:,} bytes do not hold its header; {again}"
                )
            header = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        tensors = [
            StoredTensor(file, name, entry["dtype"], tuple(entry["shape"]), *entry["data_offsets"])
            for name, entry in header.items()
        ]
    except OSError as error:
        raise errors.CheckpointError(f"{file}: cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise errors.CheckpointError(f"{file}: corrupt header; {again}") from error
    for tensor in sorted(tensors, key=lambda tensor: tensor.begin):
        needed = 8 + length + tensor.end
        if needed > size:
            raise errors.CheckpointError(
                f"{file}: truncated: {size:,} bytes, but tensor {tensor.name!r} ends at "
                f"{needed:,}; {again}"
            )
    try:
        with safetensors.safe_open(file, framework="np"):
            pass
    except safetensors.SafetensorError as error:
        reason = str(error).rpartition("deserializing header: ")[2]
        raise errors.CheckpointError(f"{file}: corrupt header ({reason}); {again}") from error
    return tensors


def _check(tensors, wanted, module, directory) -> None:
    """Compares what is stored with what the module declares.

    Raises:
      CheckpointError: tensors are missing, unexpected, or of another shape or dtype.
    """
    source = directory / (INDEX if (directory / INDEX).exists() else WEIGHTS)
    misfit = "these weights do not belong to this config.json"
    names = {module.checkpoint_name(path): path for path in wanted}
    missing = names.keys() - tensors.keys()
    if missing:
        raise errors.CheckpointError(
            f"{source}: {len(missing)} of {len(names)} tensors missing: "
            f"{files.quote_some(missing)}; {misfit}"
        )
    unexpected = {name for name in tensors.keys() - names.keys() if not _ignored(name, module)}
    if unexpected:
        file = tensors[min(unexpected)].file
        raise errors.CheckpointError(
            f"{file}: {len(unexpected)} unexpected tensors: "
            f"{files.quote_some(unexpected)}; {misfit}"
        )
    for name, path in names.items():
        tensor, shape = tensors[name], wanted[path].shape
        expected = shape[::-1] if path.endswith(".kernel") else shape
        if tensor.shape != expected:
            raise errors.CheckpointError(
                f"{tensor.file}: tensor {name!r} has shape {list(tensor.shape)}, expected "
                f"{list(expected)}; {misfit}"
            )
        is_weight = jnp.issubdtype(wanted[path].dtype, jnp.floating)
        _check_code(tensor, _DTYPES if is_weight else _TABLE_DTYPES)


def _check_code(tensor: StoredTensor, known: Mapping[str, Any]) -> None:
    if tensor.code not in known:
        hint = "; quantized checkpoints are not supported" if known is _DTYPES else ""
        raise errors.CheckpointError(
            f"{tensor.file}: tensor {tensor.name!r} is {tensor.code}, expected one of "
            f"{', '.join(known)}{hint}"
        )


def _ignored(name: str, module: nnx.Module) -> bool:
    patterns = [*IGNORED, *getattr(module, "ignored_checkpoint_names", ())]
    patterns += [f"*{suffix}" for suffix in getattr(module, "ignored_checkpoint_suffixes", ())]
    return _matches(name, patterns)


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _read(tensor: StoredTensor, abstract: jax.ShapeDtypeStruct, *, transposed: bool) -> jax.Array:
    """Reads one tensor into its place on the devices of this process."""
    buffers = {}

    def read_shard(index: tuple[slice, ...]) -> np.ndarray:
        bounds = tuple(
            part.indices(length)[:2] for part, length in zip(index, abstract.shape, strict=True)
        )
        if bounds not in buffers:  # devices that hold copies share one reading
            buffers[bounds] = _read_slice(tensor, bounds, abstract.dtype, transposed)
        return buffers[bounds]

    array = jax.make_array_from_callback(
        abstract.shape, abstract.sharding, read_shard, dtype=abstract.dtype
    )
    # Transfers to an accelerator run behind our back; without waiting, buffers would pile up.
    return array.block_until_ready()


def _read_slice(tensor, bounds, dtype, transposed: bool) -> np.ndarray:
    """Reads the part of a tensor within `bounds` (of the target's axes), cast and transposed.

    The file is opened anew for each piece: pages of a memory-mapped file that were touched count as
    this process's memory for as long as it stays mapped.
    """
    out = _aligned_empty(tuple(stop - start for start, stop in bounds), dtype)
    if not bounds:
        with safetensors.safe_open(tensor.file, framework="np") as file:
            out[()] = file.get_tensor(tensor.name)
        return out
    as_stored = out.T if transposed else out
    (first, last), *rest = bounds[::-1] if transposed else bounds
    columns = tuple(slice(start, stop) for start, stop in rest)
    # The bytes mapped are those of whole stored rows, however few columns are wanted.
    row_bytes = max(1, (tensor.end - tensor.begin) // max(1, tensor.shape[0]))
    step = max(1, _PIECE_BYTES // row_bytes)
    for start in range(first, last, step):
        stop = min(start + step, last)
        with safetensors.safe_open(tensor.file, framework="np") as file:
            piece = file.get_slice(tensor.name)[(slice(start, stop), *columns)]
        as_stored[start - first : stop - first] = piece
    return out


def _aligned_empty(shape: tuple[int, ...], dtype) -> np.ndarray:
    """An uninitialised array that a CPU device adopts instead of copying it."""
    dtype = np.dtype(dtype)
    num_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    raw = np.empty(num_bytes + _ALIGNMENT_BYTES, np.uint8)
    offset = -raw.ctypes.data % _ALIGNMENT_BYTES
    return raw[offset : offset + num_bytes].view(dtype).reshape(shape)


class _Outgoing:
    """An array on its way into a file: known by name, shape and dtype, fetched when written."""

    def __init__(self, module: nnx.Module, path: str, leaf: nnx.Variable, dtype):
        self._value = leaf.get_value()
        self._transposed = path.endswith(".kernel")
        self.name = module.checkpoint_name(path)
        if isinstance(leaf, parameters.Table):
            dtype = leaf.stored_dtype
        self.dtype = np.dtype(dtype or self._value.dtype)
        self.shape = self._value.shape[::-1] if self._transposed else self._value.shape
        self.num_bytes = self._value.size * self.dtype.itemsize

    def fetch(self) -> np.ndarray:
        """The values as the file wants them, on this host."""
        # A fresh array: a jax array that is turned into numpy keeps that host copy for its life.
        # jax has no int64 here: tables are widened on the host.
        weight = jnp.issubdtype(self.dtype, jnp.floating)
        dtype = self.dtype if weight else self._value.dtype
        fresh = _prepare(self._value, transposed=self._transposed, dtype=dtype)
        if not fresh.is_fully_addressable:
            from jax.experimental import multihost_utils

            fresh = multihost_utils.process_allgather(fresh, tiled=True)
        return np.asarray(fresh).astype(self.dtype, copy=False)


@functools.partial(jax.jit, static_argnames=("transposed", "dtype"))
def _prepare(value, *, transposed, dtype):
    return jnp.copy(value.T if transposed else value).astype(dtype)


def _pack(tensors: Iterable[_Outgoing], max_bytes: int) -> list[list[_Outgoing]]:
    """Splits tensors, in order, into groups of at most `max_bytes` (or one larger tensor)."""
    shards, filled = [[]], 0
    for tensor in tensors:
        if shards[-1] and filled + tensor.num_bytes > max_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += tensor.num_bytes
    return shards


def _write(file: pathlib.Path, tensors: list[_Outgoing]) -> None:
    """Writes one file, tensor by tensor; the library itself would want them all in memory.

    Source: https://huggingface.co/docs/safetensors, "Format".
    """
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for tensor in tensors:
        end = offset + tensor.num_bytes
        header[tensor.name] = {
            "dtype": _CODES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)  # readers map the data and want it aligned
    first = jax.process_index() == 0
    with file.open("wb") if first else contextlib.nullcontext() as stream:
        if first:
            stream.write(len(encoded).to_bytes(8, "little") + encoded)
        for tensor in tensors:
            values = np.ascontiguousarray(tensor.fetch())
            if first:
                stream.write(values.reshape(-1).view(np.uint8).data)
