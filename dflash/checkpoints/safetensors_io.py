"""Hugging Face checkpoint layout: model.safetensors, or several files with an index.

Tensors are read one after another, each in pieces into a buffer with the layout of the device, so
that the host never holds more than one such buffer beside the weights.

Tensors that hold several projections, or those of all experts, are read as views of each. They are
fused along their rows, and experts along a dimension before them, so the rows of a projection are
contiguous in the file.
"""

import contextlib
import dataclasses
import fnmatch
import functools
import json
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dflash import errors
from dflash.checkpoints import files, outgoing, tensor_map, weight_views
from dflash.checkpoints.outgoing import OutgoingTensor
from dflash.checkpoints.safetensors_header import (
    BUFFER_DTYPES,
    INDEX,
    PLAIN_DTYPES,
    WEIGHTS,
    ScaledTensor,
    StoredTensor,
    read_headers,
    source_of,
)
from dflash.checkpoints.tensor_map import TensorPiece
from dflash.checkpoints.weight_formats import StoredFormat
from dflash.parallel import parameters
from dflash.storage import files as run_files

MAX_SHARD_BYTES = 5 * 2**30
# Tensors that some older checkpoints store, and that are computed from the config here.
# Scales of activations, which are not quantized here, do not matter.
IGNORED = ("*.rotary_emb.inv_freq", "rotary_emb.inv_freq", "*.weight_shape", "*.input_scale")

_PIECE_BYTES = 8 * 2**20
_ALIGNMENT_BYTES = 64  # Alignment at which a CPU device adopts a host buffer without a copy.
_QUANTIZED_DTYPES = {"int8": "I8", "float8_e4m3fn": "F8_E4M3"}  # Dtypes of weights with scales.
_EIGHT_BITS = frozenset(_QUANTIZED_DTYPES.values())
_NO_FORMAT = "; its config.json declares no quantized weights"
_CODES = {np.dtype(dtype): code for code, dtype in (PLAIN_DTYPES | BUFFER_DTYPES).items()}
# Projections in the order of their rows, by the name of the fused one.
_FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
_PARTS = {part: (name, i) for name, parts in _FUSED.items() for i, part in enumerate(parts)}
_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(\w+)\.weight")
_PROJECTION = re.compile(r"(.+)\.(\w+)\.(weight|bias)")


def load(module: nnx.Module, directory: pathlib.Path) -> None:
    """Fills the abstract parameters of `module`, each with its declared sharding and dtype.

    Peak host memory exceeds the memory after loading by at most one tensor (its local shards, in
    the module's dtype). On a CPU device, whose arrays adopt the buffers, it exceeds it by about
    `_PIECE_BYTES`.

    Args:
      module: Module with `checkpoint_name(path)`, which returns a `tensor_map.Source`, and
        optionally `ignored_checkpoint_names`, `ignored_checkpoint_suffixes`, `checkpoint_copies`
        and `known_name(name)`, which returns the expected name of a stored tensor. Parameters whose
        path ends in ".kernel" are stored transposed. Buffers are filled, too.
    """
    load_tensors(module, read_headers(directory), source_of(directory))


def load_tensors(
    module: nnx.Module, tensors: Mapping[str, StoredTensor], listing: pathlib.Path
) -> None:
    """Fills the abstract parameters of `module` from its tensors, by name; see `load`."""
    leaves = dict(parameters.named_arrays(module))
    expected = parameters.readable(module)
    tensors = find_tensors(module, tensors, listing)
    _check_copies(tensors, module)
    parts = {}
    for path, abstract in expected.items():
        pieces = tensor_map.pieces(tensor_map.source_of(module, path), path, abstract.shape)
        parts[path] = [(tensors[piece.name], piece) for piece in pieces]
    in_file_order = sorted(
        expected, key=lambda path: (parts[path][0][0].file.name, parts[path][0][0].begin)
    )
    sized = [(path, expected[path].size) for path in in_file_order]
    total = sum(size for _, size in sized)
    values = {}
    for path in files.track(sized, total, f"reading {listing.parent.name}"):
        # Do not bind the tensor to a name, so that it can be freed before the next one is read.
        values |= parameters.convert(leaves[path], path, _read(parts[path], expected[path]))
    parameters.assign(module, values)


def find_tensors(
    module: nnx.Module, tensors: Mapping[str, StoredTensor], listing: pathlib.Path
) -> dict[str, StoredTensor]:
    """Returns the tensors that hold the parameters of a module, which it checks without reading.

    Fused tensors and quantized ones of plain parameters are replaced by views; see `load_tensors`.

    Raises:
      CheckpointError: A tensor is missing, unexpected, or has another shape or dtype.
    """
    expected = parameters.readable(module)
    by_tensor = tensor_map.by_tensor(
        module, ((path, leaf.shape) for path, leaf in expected.items())
    )
    rename, stored = getattr(module, "known_name", str), getattr(module, "stored_format", None)
    tensors = weight_views.views(tensors, stored)
    tensors = _split_fused(
        {rename(name): tensor for name, tensor in tensors.items()},
        {name: piece.shape for name, ((_, piece), *_) in by_tensor.items()},
    )
    plain = {
        name for name, ((path, _), *_) in by_tensor.items() if expected[path].dtype.itemsize > 1
    }
    tensors = _dequantized(tensors, plain, stored)
    _check(tensors, expected, by_tensor, module, listing)
    return tensors


def _dequantized(
    tensors: Mapping[str, StoredTensor], names: Iterable[str], stored: StoredFormat | None
) -> dict[str, StoredTensor]:
    """Returns the tensors, those of `names` that have scales as the numbers they stand for."""
    result = dict(tensors)
    for name in names if stored is not None else ():
        scales = name.removesuffix("weight") + stored.scale_suffix
        if scales in tensors and name in tensors and tensors[name].code in _EIGHT_BITS:
            files.check_shape(
                tensors[scales].file,
                scales,
                tensors[scales].shape,
                stored.scales_of(tensors[name].shape),
            )
            result[name] = ScaledTensor.of(tensors[name], result.pop(scales), stored.block)
    return result


def stored_dtypes(directory: pathlib.Path) -> set[np.dtype]:
    """Returns the dtypes of the stored weights, without those of buffers."""
    tensors = read_headers(directory).values()
    weights = [
        tensor
        for tensor in tensors
        if not _matches(tensor.name, IGNORED) and tensor.code not in BUFFER_DTYPES
    ]
    for tensor in weights:
        _check_code(tensor, PLAIN_DTYPES)
    return {np.dtype(PLAIN_DTYPES[tensor.code]) for tensor in weights}


def save(
    module: nnx.Module, directory: pathlib.Path, dtype=None, max_shard_bytes: int = MAX_SHARD_BYTES
) -> int:
    """Writes the weights of `module` under their checkpoint names, one tensor in memory at a time.

    All processes of a multi-host run must call this; process 0 writes.

    Args:
      module: Module with `checkpoint_name(path)`, whose parameters and buffers hold arrays.
    Returns:
      Number of tensors written.
    """
    shards = _pack(outgoing.tensors_of(module, dtype), max_shard_bytes)
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


def _check(tensors, expected, names, module, listing) -> None:
    """Checks the stored tensors against the module's parameters, by `tensor_map.by_tensor`."""
    stored = {name for name in tensors if name in names or not _ignored(name, module)}
    files.check_names(stored, names, listing, files.MISFIT, file_of=lambda name: tensors[name].file)
    for name, named_pieces in names.items():
        (path, piece), *_ = named_pieces
        tensor, shape = tensors[name], piece.shape
        if tensor.packing is not None:
            shape = tensor.packing.stored_shape(shape)
        files.check_shape(tensor.file, name, tensor.shape, shape)
        if tensor.packing is None and not isinstance(tensor, ScaledTensor):
            hint = "" if hasattr(module, "stored_format") else _NO_FORMAT
            _check_code(tensor, _codes_for(expected[path].dtype), hint)


def _check_copies(tensors: Mapping[str, StoredTensor], module: nnx.Module) -> None:
    for copy, original in getattr(module, "checkpoint_copies", {}).items():
        if copy in tensors and not _are_equal(tensors[copy], tensors[original]):
            raise errors.CheckpointError(
                f"{tensors[copy].file}: {copy!r} differs from {original!r}, but config.json ties "
                "them; set tie_word_embeddings to false"
            )


def _are_equal(first: StoredTensor, second: StoredTensor) -> bool:
    if (first.code, first.shape) != (second.code, second.shape):
        return False
    columns = [slice(0, size) for size in first.shape[1:]]
    rows = (slice(*bounds) for bounds in _steps(first, 0, first.shape[0]))
    return all(
        first.read((r, *columns)).tobytes() == second.read((r, *columns)).tobytes() for r in rows
    )


def _codes_for(dtype: np.dtype) -> Mapping[str, Any]:
    """Returns the stored dtypes from which an array of this dtype may be read."""
    if dtype.name in _QUANTIZED_DTYPES:
        return {_QUANTIZED_DTYPES[dtype.name]: dtype}
    return PLAIN_DTYPES if jnp.issubdtype(dtype, jnp.floating) else BUFFER_DTYPES


def _check_code(tensor: StoredTensor, known: Mapping[str, Any], hint: str = _NO_FORMAT) -> None:
    if tensor.code not in known:
        hint = hint if known is PLAIN_DTYPES else ""
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


def _read(
    parts: Sequence[tuple[StoredTensor, TensorPiece]], abstract: jax.ShapeDtypeStruct
) -> jax.Array:
    """Reads a parameter onto the devices of this process."""
    buffers = {}

    def read_shard(index: tuple[slice, ...]) -> np.ndarray:
        bounds = tuple(
            part.indices(length)[:2] for part, length in zip(index, abstract.shape, strict=True)
        )
        if bounds not in buffers:  # Read once for all devices that hold copies of a shard.
            buffers[bounds] = _read_box(parts, bounds, abstract.dtype)
        return buffers[bounds]

    array = jax.make_array_from_callback(
        abstract.shape, abstract.sharding, read_shard, dtype=abstract.dtype
    )
    # Wait for the transfer, since it is asynchronous and host buffers would pile up otherwise.
    return array.block_until_ready()


def _read_box(parts, bounds, dtype) -> np.ndarray:
    """Reads the part of a parameter within `bounds` of its axes, cast and transposed."""
    out = _aligned_empty(tuple(stop - start for start, stop in bounds), dtype)
    as_stored, box = out, list(bounds)
    if parts[0][1].transposed:
        as_stored, box = out.swapaxes(-1, -2), [*box[:-2], box[-1], box[-2]]
    run_files.call_all(parts[0][0].file, _readings(parts, as_stored, box))
    return out


def _readings(parts, as_stored: np.ndarray, box) -> Iterator[Callable[[], None]]:
    """Yields calls that together fill `as_stored` with the values in `box`.

    Array and box have the orientation of the files.
    """
    for tensor, piece in parts:
        lead = list(zip(piece.lead, box, strict=False))
        if not all(start <= i < stop for i, (start, stop) in lead):
            continue
        part = as_stored[(*(i - start for i, (start, _) in lead), ...)]
        if piece.count is None:
            yield functools.partial(_fill, part, tensor, ())
            continue
        (low, high), *inner = box[len(lead) :]
        first, last = max(low, piece.at), min(high, piece.at + piece.count)
        columns = tuple(slice(start, stop) for start, stop in inner)
        shift = piece.first - piece.at
        for start, stop in _steps(tensor, first, last):
            index = (slice(start + shift, stop + shift), *columns)
            yield functools.partial(_fill, part[start - low : stop - low], tensor, index)


def _fill(out: np.ndarray, tensor: StoredTensor, index: tuple[slice, ...]) -> None:
    out[...] = tensor.read(index)


def _steps(tensor: StoredTensor, first: int, last: int) -> Iterator[tuple[int, int]]:
    """Splits rows first … last - 1 into ranges of about `_PIECE_BYTES`."""
    step = max(1, _PIECE_BYTES // tensor.row_bytes)
    for start in range(first, last, step):
        yield start, min(start + step, last)


def _aligned_empty(shape: tuple[int, ...], dtype) -> np.ndarray:
    """Returns an uninitialized array that a CPU device adopts instead of copying it."""
    dtype = np.dtype(dtype)
    num_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    raw = np.empty(num_bytes + _ALIGNMENT_BYTES, np.uint8)
    offset = -raw.ctypes.data % _ALIGNMENT_BYTES
    return raw[offset : offset + num_bytes].view(dtype).reshape(shape)


def _pack(tensors: Iterable[OutgoingTensor], max_bytes: int) -> list[list[OutgoingTensor]]:
    """Splits tensors, in order, into groups of at most `max_bytes`, or of one larger tensor."""
    shards, filled = [[]], 0
    for tensor in tensors:
        if shards[-1] and filled + tensor.num_bytes > max_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += tensor.num_bytes
    return shards


def _write(file: pathlib.Path, tensors: list[OutgoingTensor]) -> None:
    """Writes a file tensor by tensor, since the library needs all of them in memory.

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
    encoded += b" " * (-len(encoded) % 8)  # Align the data for readers that map it.
    first = jax.process_index() == 0
    with file.open("wb") if first else contextlib.nullcontext() as stream:
        if first:
            stream.write(len(encoded).to_bytes(8, "little") + encoded)
        for tensor in tensors:
            values = np.ascontiguousarray(tensor.fetch())
            if first:
                stream.write(values.reshape(-1).view(np.uint8).data)


class _Part(NamedTuple):
    """Place of a projection in a fused tensor: its expert, if there are, and its turn."""

    expert: int | None
    turn: int
    name: str


def _split_fused(
    tensors: Mapping[str, StoredTensor], expected: Mapping[str, tuple[int, ...]]
) -> dict[str, StoredTensor]:
    """Returns the tensors of a checkpoint, with views in place of the fused ones.

    Args:
      tensors: Stored tensors by name.
      expected: Shapes of the tensors that a module reads, by name. One that is not stored may be
        part of a tensor "….qkv_proj.weight", "….gate_up_proj.weight", "….experts.gate_up_proj" or
        "….experts.down_proj".
    """
    parts: dict[str, list[_Part]] = {}
    for name in sorted(expected.keys() - tensors.keys()):
        fused, part = _place(name)
        if fused in tensors:
            parts.setdefault(fused, []).append(part)
    separate = {name: tensor for name, tensor in tensors.items() if name not in parts}
    for fused, members in parts.items():
        separate |= {view.name: view for view in _views(tensors[fused], sorted(members), expected)}
    return separate


def _place(name: str) -> tuple[str | None, _Part]:
    """Returns the name of the fused tensor that may hold a projection, and its place there."""
    if match := _EXPERT.fullmatch(name):
        experts, index, projection = match.groups()
        fused, turn = _PARTS.get(projection, (projection, 0))
        return f"{experts}.{fused}", _Part(int(index), turn, name)
    match = _PROJECTION.fullmatch(name)
    if match is None or match[2] not in _PARTS:
        return None, _Part(None, 0, name)
    fused, turn = _PARTS[match[2]]
    return f"{match[1]}.{fused}.{match[3]}", _Part(None, turn, name)


def _views(
    tensor: StoredTensor, parts: Sequence[_Part], expected: Mapping[str, tuple[int, ...]]
) -> Iterator[StoredTensor]:
    """Yields the consecutive parts of a fused tensor as tensors of their own."""
    shapes = [expected[part.name] for part in parts]
    rows, last = sum(shape[0] for shape in shapes), parts[-1].expert
    lead = (rows,) if last is None else (last + 1, rows // (last + 1))
    files.check_shape(tensor.file, tensor.name, tensor.shape, (*lead, *shapes[0][1:]))
    row_bytes, begin = (tensor.end - tensor.begin) // rows, tensor.begin
    for part, part_shape in zip(parts, shapes, strict=True):
        end = begin + part_shape[0] * row_bytes
        yield dataclasses.replace(tensor, name=part.name, shape=part_shape, begin=begin, end=end)
        begin = end
