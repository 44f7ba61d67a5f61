"""Tensors of a GGUF file under their names in Hugging Face's layout, dequantized when read."""

import dataclasses
import math
import pathlib
import re
from collections.abc import Iterator, Mapping

import numpy as np

from dflash import errors
from dflash.checkpoints import files, gguf_architecture, gguf_header
from dflash.checkpoints.gguf_header import GgufHeader, TensorEntry
from dflash.checkpoints.safetensors_header import PLAIN_DTYPES, Index, StoredTensor
from dflash.storage.files import view

WEIGHTS = "model.gguf"  # Name of the file, or of a link to it, in a checkpoint directory.

# Names without ".weight": ggml's -> Hugging Face's.
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
_EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
_IN_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.weight")
_HEADS = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
_FLOAT32_BYTES = 4


@dataclasses.dataclass(frozen=True)
class GgufTensor(StoredTensor):
    """Tensor of a GGUF file under its name and in the row order of Hugging Face.

    Attributes:
      kind: Name of its quantization type; `code` is the dtype of the values that `read` returns.
      pairs: Number of heads whose rows the file stores as neighbors to be rotated together; 0 if
        rows have the order of Hugging Face.
    """

    kind: str
    pairs: int = 0

    @property
    def row_bytes(self) -> int:
        """Returns the bytes that a row takes in memory, dequantized."""
        return _FLOAT32_BYTES * math.prod(self.shape[1:])

    def read(self, index: Index) -> np.ndarray:
        """Returns the values at `index`; it dequantizes whole rows, however few columns."""
        rows, *columns = index
        if not self.pairs:
            return self._rows(rows.start, rows.stop)[(slice(None), *columns)]
        size = self.shape[0] // self.pairs
        first, last = rows.start // size * size, -(-rows.stop // size) * size
        heads = self._rows(first, last).reshape(-1, size // 2, 2, *self.shape[1:])
        halves = heads.swapaxes(1, 2).reshape(last - first, *self.shape[1:])
        return halves[(slice(rows.start - first, rows.stop - first), *columns)]

    def _rows(self, first: int, last: int) -> np.ndarray:
        """Returns rows first … last - 1 in the order of the file."""
        if len(self.shape) == 1:
            return self._dequantized(self.begin, self.end, 1).reshape(-1)[first:last]
        size = (self.end - self.begin) // self.shape[0]
        begin, end = self.begin + first * size, self.begin + last * size
        return self._dequantized(begin, end, last - first).reshape(-1, *self.shape[1:])

    def _dequantized(self, begin: int, end: int, rows: int) -> np.ndarray:
        """Returns the float32 values [rows, …] of the bytes begin … end - 1 of the file."""
        gguf = gguf_header.package(self.file)
        stored = view(self.file, begin, end).reshape(rows, -1)
        with np.errstate(all="ignore"):  # Damaged scales may be infinite.
            return gguf.dequantize(stored, gguf.GGMLQuantizationType[self.kind])


def read_tensors(directory: pathlib.Path) -> dict[str, GgufTensor]:
    """Describes every tensor of model.gguf, by its name in Hugging Face's layout.

    Raises:
      CheckpointError: The file is damaged, its architecture is unsupported, or it has tensors that
        the architecture does not have.
    """
    file = (directory / WEIGHTS).resolve()
    header = gguf_header.read_header(file)
    config = gguf_architecture.config_of(header)
    tensors = {}
    unexpected = []
    for name, entry in header.tensors.items():
        found = list(_named(header, name, entry, config))
        tensors |= {tensor.name: tensor for tensor in found}
        if not found and name != gguf_architecture.ROPE_FACTORS:
            unexpected.append(name)
    if unexpected:
        raise errors.CheckpointError(
            f"{file}: {len(unexpected)} unexpected tensors: {files.quote_some(unexpected)}; "
            "this variant of the architecture is not supported"
        )
    return tensors


def _named(
    header: GgufHeader, name: str, entry: TensorEntry, config: Mapping
) -> Iterator[GgufTensor]:
    """Yields a tensor under its name in Hugging Face's layout, where experts are separate."""
    code = entry.kind if entry.kind in PLAIN_DTYPES else "F32"
    whole = GgufTensor(
        header.file, name, code, entry.shape, entry.begin, entry.end, kind=entry.kind
    )
    top, in_layer = _TOP.get(name.removesuffix(".weight")), _IN_LAYER.fullmatch(name)
    if top is not None and name.endswith(".weight"):
        yield dataclasses.replace(whole, name=f"{top}.weight")
    if in_layer is None:
        return
    layer, stem = f"model.layers.{in_layer[1]}", in_layer[2]
    if stem in _LAYER:
        pairs = 0
        if gguf_architecture.family_of(header).paired_rope and stem in _HEADS:
            pairs = _check_pairs(whole, config[_HEADS[stem]])
        yield dataclasses.replace(whole, name=f"{layer}.{_LAYER[stem]}.weight", pairs=pairs)
    elif stem in _EXPERTS:
        yield from _experts(whole, f"{layer}.mlp.experts", _EXPERTS[stem])


def _check_pairs(tensor: GgufTensor, heads: int) -> int:
    """Returns the number of heads, which divides the rows into pairs."""
    if heads < 1 or tensor.shape[0] % (2 * heads):
        raise errors.CheckpointError(
            f"{tensor.file}: tensor {tensor.name!r} has {tensor.shape[0]} rows, which do not form "
            f"{heads} heads"
        )
    return heads


def _experts(stacked: GgufTensor, prefix: str, stem: str) -> Iterator[GgufTensor]:
    """Yields the tensor of each expert."""
    count, *shape = stacked.shape
    size = (stacked.end - stacked.begin) // count
    for expert in range(count):
        begin = stacked.begin + expert * size
        yield dataclasses.replace(
            stacked,
            name=f"{prefix}.{expert}.{stem}.weight",
            shape=tuple(shape),
            begin=begin,
            end=begin + size,
        )
