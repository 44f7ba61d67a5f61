"""Writes the weights of a target or a block drafter as a GGUF file of llama.cpp."""

import os
import pathlib
import secrets
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from flax import nnx

from dflash import errors
from dflash.checkpoints import outgoing
from dflash.checkpoints.gguf import architecture, block_drafter, file_header, kinds
from dflash.checkpoints.gguf.families import Family
from dflash.checkpoints.outgoing import OutgoingTensor
from dflash.storage import files

_DERIVED = "t2d"  # Follows from the ids of the drafted tokens.


class _Tensor(NamedTuple):
    """Tensor of the file.

    Attributes:
      parts: The tensor itself, or those that it stacks.
      rows: Row of the file that holds each row; None to keep their order.
      num_rows: Number of rows of the file, of which the others are zeros; None for no others.
      is_stack: Whether the parts are stacked, even if there is only one.
    """

    name: str
    parts: list[OutgoingTensor]
    rows: np.ndarray | None = None
    num_rows: int | None = None
    is_stack: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape in the file."""
        shape = self.parts[0].shape
        if self.num_rows is not None:
            return (self.num_rows, *shape[1:])
        return (len(self.parts), *shape) if self.is_stack else shape

    @property
    def dtype(self) -> np.dtype:
        """Dtype in the file: float32 for weights other than matrices, as llama.cpp expects."""
        part = self.parts[0]
        keeps = len(part.shape) == 2 or part.dtype.kind == "i"
        return part.dtype if keeps else np.dtype(np.float32)

    def fetch(self) -> np.ndarray:
        """Returns the values in the order of the file."""
        parts = [part.fetch() for part in self.parts]
        values = (np.stack(parts) if self.is_stack else parts[0]).astype(self.dtype, copy=False)
        if self.name == block_drafter.DRAFT_IDS:
            return values + np.arange(len(values))
        if self.rows is None:
            return np.ascontiguousarray(values)
        stored = np.zeros(self.shape, values.dtype)
        stored[self.rows] = values
        return stored


def save(
    module: nnx.Module,
    file: pathlib.Path,
    config: Mapping[str, Any],
    metadata: Mapping[str, Any],
) -> int:
    """Writes a GGUF file, which appears whole or not at all.

    Args:
      config: Contents of its config.json, as `config_to_hf` writes it.
    Returns:
      Number of tensors written.
    """
    family = kinds.of_config(config).family
    tensors = list(_tensors(outgoing.tensors_of(module), family, config))
    factors = architecture.rope_factors(config)
    with files.explained(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        staged = file.with_name(f".{file.name}.{secrets.token_hex(4)}.tmp")
        try:
            _write(staged, metadata, tensors, factors)
            files.sync(staged)
            os.replace(staged, file)
        finally:
            staged.unlink(missing_ok=True)
        files.sync(file.parent)
    return len(tensors)


def _tensors(
    tensors: Iterable[OutgoingTensor], family: Family, config: Mapping[str, Any]
) -> Iterator[_Tensor]:
    tensors = list(tensors)
    drafted = [tensor for tensor in tensors if tensor.name == block_drafter.DRAFT_IDS]
    stacks: dict[str, list[OutgoingTensor]] = {}
    for tensor in tensors:
        name = family.names.to_ggml(tensor.name)
        if name == block_drafter.DRAFT_CODES and drafted:
            ids = _Tensor(block_drafter.DRAFT_IDS, drafted).fetch()
            yield _Tensor(name, [tensor], ids, num_rows=config["vocab_size"])
            continue
        if name is not None:
            yield _Tensor(name, [tensor], family.layout(name, tensor.shape, config).rows)
            continue
        stack = family.names.stack_of(tensor.name)
        if stack is not None:
            stacks.setdefault(stack, []).append(tensor)
        elif tensor.name != _DERIVED:
            raise errors.CheckpointError(
                f"tensor {tensor.name!r} cannot be written to a GGUF file: llama.cpp has no such "
                "tensor"
            )
    for name, experts in stacks.items():
        yield _Tensor(name, experts, is_stack=True)


def _write(
    file: pathlib.Path,
    metadata: Mapping[str, Any],
    tensors: list[_Tensor],
    factors: np.ndarray | None,
) -> None:
    gguf = file_header.package(file)
    writer = gguf.GGUFWriter(file, metadata[architecture.ARCHITECTURE])
    for key in sorted(metadata.keys() - {architecture.ARCHITECTURE}):
        _add(writer, key, metadata[key])
    if factors is not None:
        writer.add_tensor_info(
            architecture.ROPE_FACTORS, factors.shape, factors.dtype, factors.nbytes
        )
    for tensor in tensors:
        is_bfloat16 = tensor.dtype.name == "bfloat16"
        writer.add_tensor_info(
            tensor.name,
            tensor.shape,
            tensor.dtype,
            int(np.prod(tensor.shape)) * tensor.dtype.itemsize,
            gguf.GGMLQuantizationType.BF16 if is_bfloat16 else None,
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    if factors is not None:
        writer.write_tensor_data(factors)
    for tensor in tensors:
        writer.write_tensor_data(tensor.fetch())
    writer.close()


def _add(writer: Any, key: str, value: Any) -> None:
    """Adds a value of metadata; integers are unsigned, as llama.cpp expects them."""
    adders = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
    }
    adders.get(type(value), writer.add_array)(key, value)
