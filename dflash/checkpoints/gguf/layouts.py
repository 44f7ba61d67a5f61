"""Differences between tensors in GGUF files and Hugging Face's: order, shape and numbers.

llama.cpp's converters change tensors where its own computation then is simpler. A `TensorLayout`
says what they did to a tensor, so that reading undoes it.

Source: llama.cpp, the converters under conversion/.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

Config = Mapping[str, Any]
Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class TensorLayout:
    """Differences between a tensor in a file and the same tensor of Hugging Face.

    Attributes:
      rows: Row of the file that holds each row; None if the order is the same.
      num_rows: Number of rows of the file; None if it has no others.
      columns: Column of the file that holds each column; None if the order is the same.
      squeezed: Dimension of size 1 that the file leaves out; None for none.
      restore: Function from the numbers in the file to those of Hugging Face; None if they are the
        same.
    """

    rows: np.ndarray | None = None
    num_rows: int | None = None
    columns: np.ndarray | None = None
    squeezed: int | None = None
    restore: Callable[[np.ndarray], np.ndarray] | None = None

    def shape(self, stored: Shape) -> Shape:
        """Returns the shape of Hugging Face's tensor, given that in the file."""
        at = self.squeezed
        return stored if at is None else (*stored[:at], 1, *stored[at:])

    def scales(self, block: int) -> "TensorLayout | None":
        """Returns the layout of scales of `block` columns each; None if columns leave blocks."""
        if self.columns is None:
            return self
        blocks = self.columns.reshape(-1, block)
        if (blocks % block != np.arange(block)).any() or (np.diff(blocks) != 1).any():
            return None
        return dataclasses.replace(self, columns=blocks[:, 0] // block)


AS_STORED = TensorLayout()

LayoutOf = Callable[[str, Shape, Config], TensorLayout]


def as_stored(name: str, shape: Shape, config: Config) -> TensorLayout:
    """Returns the layout of families whose tensors are the same in files; see `paired_rope`."""
    return AS_STORED


def paired_rope(name: str, shape: Shape, config: Config) -> TensorLayout:
    """Returns the layout of families whose queries and keys rotate neighbors instead of halves.

    Raises:
      ValueError: The shape does not fit the config; the message continues one that names the
        tensor.
    """
    by_suffix = {".attn_q.weight": "num_attention_heads", ".attn_k.weight": "num_key_value_heads"}
    fields = (field for suffix, field in by_suffix.items() if name.endswith(suffix))
    field = next(fields, None)
    if field is None:
        return AS_STORED
    heads, rows = config[field], shape[0]
    if heads < 1 or rows % (2 * heads):
        raise ValueError(f"has {rows} rows, which do not form {heads} heads")
    pairs = np.arange(rows).reshape(heads, -1, 2)
    return TensorLayout(rows=pairs.swapaxes(1, 2).reshape(-1))


def shifted_norms(name: str, shape: Shape, config: Config) -> TensorLayout:
    """Returns the layout of families whose norms scale by 1 + weight; see `paired_rope`."""
    return (
        TensorLayout(restore=lambda values: values - 1)
        if name.endswith("norm.weight")
        else AS_STORED
    )


def grouped_delta(name: str, shape: Shape, config: Config) -> TensorLayout:
    """Returns the layout of gated DeltaNet in Qwen3-Next; see `paired_rope`."""
    stem = name.rpartition("blk.")[2].partition(".")[2] or name
    if stem == "ssm_norm.weight":
        return AS_STORED
    layouts = {
        "ssm_a": TensorLayout(restore=_log_negated),
        "ssm_conv1d.weight": TensorLayout(squeezed=1 if len(shape) == 2 else None),
        "ffn_gate_inp_shexp.weight": TensorLayout(squeezed=0 if len(shape) == 1 else None),
    }
    return layouts.get(stem) or shifted_norms(name, shape, config)


def tiled_delta(name: str, shape: Shape, config: Config) -> TensorLayout:
    """Returns the layout of gated DeltaNet in Qwen3.5; see `paired_rope`.

    Value heads that read the same key head are V / K heads apart instead of adjacent.
    """
    layout = grouped_delta(name, shape, config)
    stem = name.rpartition("blk.")[2].partition(".")[2]
    width = config["linear_value_head_dim"]
    keys = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"]
    if stem == "ssm_out.weight":
        return dataclasses.replace(layout, columns=_tiled(shape[-1], config, width))
    ordered = {
        "attn_qkv.weight": (keys, width),
        "ssm_conv1d.weight": (keys, width),
        "attn_gate.weight": (0, width),
        "ssm_alpha.weight": (0, 1),
        "ssm_beta.weight": (0, 1),
        "ssm_dt.bias": (0, 1),
        "ssm_a": (0, 1),
    }
    if stem not in ordered:
        return layout
    first, size = ordered[stem]
    values = first + _tiled(shape[0] - first, config, size)
    return dataclasses.replace(layout, rows=np.concatenate([np.arange(first), values]))


def grouped_by_key_head(config: Config) -> np.ndarray:
    """Returns the row of (queries, keys, values, gates), each of all heads, for each grouped row.

    Grouped rows are those of one key head after the other, as in Qwen3-Next's `in_proj_qkvz`.
    """
    heads, width = config["linear_num_key_heads"], config["linear_key_head_dim"]
    values = config["linear_num_value_heads"] // heads * config["linear_value_head_dim"]
    parts, first = [], 0
    for size in (width, width, values, values):
        parts.append(first + np.arange(heads * size).reshape(heads, size))
        first += heads * size
    return np.concatenate(parts, axis=1).reshape(-1)


def _tiled(count: int, config: Config, width: int) -> np.ndarray:
    """Returns the place of each row of value heads of `width` rows, in the order of the file."""
    heads, groups = config["linear_num_value_heads"], config["linear_num_key_heads"]
    if min(heads, groups, width) < 1 or heads % groups or count != heads * width:
        raise ValueError(
            f"has {count} rows or columns for {heads} value heads of {width} in {groups} groups"
        )
    rows = np.arange(count).reshape(heads // groups, groups, width)
    return rows.swapaxes(0, 1).reshape(-1)


def _log_negated(values: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):  # Damaged values may be positive.
        return np.log(-values)
