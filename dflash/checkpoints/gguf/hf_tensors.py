"""GGUF layout: model.gguf, or a link to such a file; its weights are dequantized piece by piece."""

import dataclasses
import pathlib
from collections.abc import Collection, Iterator, Mapping

import numpy as np
from flax import nnx

from dflash import errors
from dflash.checkpoints import files, safetensors_io, tensor_map
from dflash.checkpoints.gguf import (
    architecture,
    block_drafter,
    families,
    file_header,
    kinds,
    stored_values,
    tensor_names,
)
from dflash.checkpoints.gguf.families import Family
from dflash.checkpoints.gguf.file_header import GgufHeader, TensorEntry
from dflash.checkpoints.gguf.layouts import TensorLayout
from dflash.checkpoints.gguf.stored_values import GgufTensor
from dflash.checkpoints.safetensors_header import (
    BUFFER_DTYPES,
    PACKED_CODE,
    PLAIN_DTYPES,
    Index,
    StoredTensor,
)
from dflash.parallel import parameters
from dflash.storage.files import view

WEIGHTS = "model.gguf"  # Name of the file, or of a link to it, in a checkpoint directory.


def load(module: nnx.Module, directory: pathlib.Path) -> None:
    """Fills the abstract parameters of `module`; see `safetensors_io.load`."""
    tensors = read_tensors(directory)
    if getattr(module, "stored_format", None) == stored_values.Q8_0_FORMAT:
        shapes = ((path, leaf.shape) for path, leaf in parameters.readable(module).items())
        suffix = module.stored_format.scale_suffix
        scales = (name for name in tensor_map.by_tensor(module, shapes) if name.endswith(suffix))
        eight_bit_names = {name.removesuffix(suffix) + "weight" for name in scales}
        tensors = in_eight_bits(tensors, eight_bit_names)
    safetensors_io.load_tensors(module, tensors, weights_file(directory))


def weights_file(directory: pathlib.Path) -> pathlib.Path:
    """Returns the file behind a directory's model.gguf; its other parts, if any, are beside it."""
    link = directory / WEIGHTS
    return directory / link.readlink() if link.is_symlink() else link


def stored_dtypes(directory: pathlib.Path) -> set[np.dtype]:
    """Returns the dtypes of the weights; quantized ones count as float32."""
    tensors = read_tensors(directory)
    packed = {*BUFFER_DTYPES, PACKED_CODE}
    codes = {tensor.code for tensor in tensors.values()} - packed
    return {np.dtype(PLAIN_DTYPES[code]) for code in codes}


def in_eight_bits(
    tensors: Mapping[str, StoredTensor], names: Collection[str]
) -> dict[str, StoredTensor]:
    """Returns the tensors, those of `names` in Q8_0 as values and scales, in `Q8_0_FORMAT`."""
    result = dict(tensors)
    for name, tensor in tensors.items():
        parts = tensor.eight_bits() if name in names and hasattr(tensor, "eight_bits") else None
        if parts is not None:
            result |= {part.name: part for part in parts}
    return result


def read_tensors(directory: pathlib.Path) -> dict[str, StoredTensor]:
    """Describes every tensor of model.gguf, by its name in Hugging Face's layout."""
    file = weights_file(directory)
    header = file_header.read_header(file)
    kind = kinds.of_file(header)
    family, config = kind.family, kind.config_of(header)
    tensors = {}
    unexpected = []
    for name, entry in header.tensors.items():
        layer = tensor_names.layer_of(name)
        is_behind = layer is not None and layer >= config["num_hidden_layers"]
        if config.get(families.DRAFTING_LAYERS) and is_behind:
            continue
        named = list(_named(header, name, entry, family, config))
        tensors |= {tensor.name: tensor for tensor in named}
        if not named and name != architecture.ROPE_FACTORS:
            unexpected.append(name)
    if unexpected:
        raise errors.CheckpointError(
            f"{file}: {len(unexpected)} unexpected tensors: {files.quote_some(unexpected)}; "
            "this variant of the architecture is not supported"
        )
    try:
        return dict(family.join(tensors, config))
    except ValueError as error:
        raise errors.CheckpointError(f"{file}: tensor {error}") from error


def _named(
    header: GgufHeader, name: str, entry: TensorEntry, family: Family, config: Mapping
) -> Iterator[StoredTensor]:
    """Yields a tensor under its name in Hugging Face's layout, where experts are separate."""
    known = entry.kind in PLAIN_DTYPES or entry.kind in BUFFER_DTYPES
    place = (entry.kind if known else "F32", *entry[1:4])
    hf_name = family.names.to_hf(name)
    if name == block_drafter.DRAFT_IDS and hf_name is not None:
        _draft_ids(header)
        yield _DraftIds(entry.file, hf_name, *place)
        yield _Drafted(entry.file, "t2d", "BOOL", (config["vocab_size"],), *place[2:])
        return
    tensor = GgufTensor(entry.file, hf_name or name, *place, kind=entry.kind)
    if name == block_drafter.DRAFT_CODES and block_drafter.DRAFT_IDS in header.tensors:
        ids = _draft_ids(header)
        if ids.size and not 0 <= ids.min() <= ids.max() < entry.shape[0]:
            problem = f"tensor {block_drafter.DRAFT_IDS!r} names tokens beyond {entry.shape[0]}"
            raise file_header.unsupported(header.file, problem)
        yield dataclasses.replace(
            tensor,
            layout=TensorLayout(rows=ids, num_rows=entry.shape[0]),
            shape=(len(ids), *entry.shape[1:]),
        )
        return
    if hf_name is not None:
        layout = _layout(header, name, entry, family, config)
        yield dataclasses.replace(tensor, layout=layout, shape=layout.shape(entry.shape))
        return
    size = (tensor.end - tensor.begin) // entry.shape[0]
    for number, expert in enumerate(family.names.experts(name, entry.shape[0])):
        begin = tensor.begin + number * size
        yield dataclasses.replace(
            tensor, name=expert, shape=entry.shape[1:], begin=begin, end=begin + size
        )


def _layout(
    header: GgufHeader, name: str, entry: TensorEntry, family: Family, config: Mapping
) -> TensorLayout:
    try:
        return family.layout(name, entry.shape, config)
    except ValueError as error:
        raise errors.CheckpointError(f"{header.file}: tensor {name!r} {error}") from error


def _draft_ids(header: GgufHeader) -> np.ndarray:
    entry = header.tensors[block_drafter.DRAFT_IDS]
    if entry.kind != "I64" or len(entry.shape) != 1:
        what = f"tensor {block_drafter.DRAFT_IDS!r} is no list of token ids"
        raise file_header.unsupported(header.file, what)
    return view(entry.file, entry.begin, entry.end).view(np.int64)


class _DraftIds(StoredTensor):
    """Table `d2t` of Hugging Face's layout: the difference between target and draft token."""

    def read(self, index: Index) -> np.ndarray:
        return super().read(index) - np.arange(index[0].start, index[0].stop)


class _Drafted(StoredTensor):
    """Table `t2d` of Hugging Face's layout: whether a target token can be drafted."""

    def read(self, index: Index) -> np.ndarray:
        drafted = view(self.file, self.begin, self.end).view(np.int64)
        return np.isin(np.arange(index[0].start, index[0].stop), drafted)
