"""Tensors that hold several projections, or those of all experts, as views of each projection.

Projections are fused along their rows, and experts along a dimension before them, so the rows of a
projection are contiguous in the file.
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from dflash.checkpoints import files
from dflash.checkpoints.safetensors_header import StoredTensor

Shape = tuple[int, ...]

# Projections in the order of their rows, by the name of the fused one.
_FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
_PARTS = {part: (name, i) for name, parts in _FUSED.items() for i, part in enumerate(parts)}
_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(\w+)\.weight")
_PROJECTION = re.compile(r"(.+)\.(\w+)\.(weight|bias)")


class _Part(NamedTuple):
    """Place of a projection in a fused tensor: its expert, if there are, and its turn."""

    expert: int | None
    turn: int
    name: str


def split(
    tensors: Mapping[str, StoredTensor], expected: Mapping[str, Shape]
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
    tensor: StoredTensor, parts: Sequence[_Part], expected: Mapping[str, Shape]
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
