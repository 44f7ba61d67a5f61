"""Mapping between parameters and stored tensors, which need not be one to one.

A module's `checkpoint_name(path)` returns the name of the stored tensor of a parameter, or the
`TensorRows` of a tensor that holds several parameters, a `Stack` of tensors that form one
parameter, or an `Untransposed` kernel. Reading and writing both use this mapping, one tensor at a
time.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterable

from flax import nnx


@dataclasses.dataclass(frozen=True)
class TensorRows:
    """Rows of a stored tensor, such as one of several fused projections.

    The tensor's rows form `groups` runs of `of` rows each, such as one run per head. The parameter
    consists of rows begin … end - 1 of every run, one run after another.
    """

    name: str
    begin: int
    end: int
    of: int
    groups: int = 1


@dataclasses.dataclass(frozen=True)
class Stack:
    """Tensors stacked along the first dimension of a parameter, such as one per expert."""

    parts: tuple[str | TensorRows, ...]


@dataclasses.dataclass(frozen=True)
class Untransposed:
    """Tensor that stores a kernel as [..., in, out], as the parameter does.

    If the checkpoint quantizes the kernel, its values and scales are transposed.
    """

    name: str


Source = str | TensorRows | Stack | Untransposed

_SCALES = ".kernel_scale"


@dataclasses.dataclass(frozen=True)
class TensorPiece:
    """Rows of a stored tensor that are contiguous in a parameter, too.

    Attributes:
      first: First row of the piece within the tensor.
      count: Number of rows; None for a tensor without dimensions.
      lead: Leading index into the parameter; () for the whole parameter.
      at: First row of the piece within `parameter[lead]`, in the orientation of the tensor.
      transposed: Whether the tensor swaps the last two dimensions of the parameter.
    """

    name: str
    shape: tuple[int, ...]
    first: int
    count: int | None
    lead: tuple[int, ...]
    at: int
    transposed: bool = False

    @property
    def is_whole(self) -> bool:
        """Returns whether the piece is both the whole tensor and the whole parameter."""
        return not self.lead and self.shape[:1] == (() if self.count is None else (self.count,))


def pieces(source: Source, path: str, shape: tuple[int, ...]) -> list[TensorPiece]:
    """Returns the pieces of stored tensors that form a parameter.

    Args:
      source: Result of `checkpoint_name` for the parameter.
      path: Dotted path of the parameter; files transpose kernels and their scales.
    Raises:
      ValueError: The source does not fill this shape exactly.
    """
    transposed = path.endswith((".kernel", _SCALES))
    if isinstance(source, Untransposed):
        source, transposed = source.name, False
    stored = (*shape[:-2], shape[-1], shape[-2]) if transposed else tuple(shape)
    parts = _pieces(source, stored, ())
    return [dataclasses.replace(piece, transposed=transposed) for piece in parts]


def source_of(module: nnx.Module, path: str) -> Source:
    """Returns the source of the parameter at a dotted path.

    Args:
      module: Module with `checkpoint_name(path)`. Quantized kernels need `stored_format`, and
        `packed`: the paths of kernels whose tensors are packed.
    """
    kernel_path = path.removesuffix("_scale") if path.endswith(_SCALES) else path
    kernel = module.checkpoint_name(kernel_path)
    if kernel_path != path:
        suffix = module.stored_format.scale_suffix
    elif path in getattr(module, "packed", ()):
        suffix = module.stored_format.packed_suffix
    else:
        return kernel

    if isinstance(kernel, Untransposed):
        kernel = kernel.name
    if kernel_path != path and module.stored_format.block is not None:
        kernel = _in_blocks(kernel, module.stored_format.block[0])
    return renamed(kernel, lambda name: name.removesuffix("weight") + suffix)


def is_divided(source: Source, rows: int) -> bool:
    """Returns whether no block of this many rows of a tensor belongs to several parameters."""
    if isinstance(source, Stack):
        return all(is_divided(part, rows) for part in source.parts)
    ends = (source.begin, source.end, source.of) if isinstance(source, TensorRows) else ()
    return not any(end % rows for end in ends)


def _in_blocks(source: Source, rows: int) -> Source:
    """Returns the source of scales, of which a tensor has one row for each `rows` of its values."""
    if isinstance(source, Stack):
        return Stack(tuple(_in_blocks(part, rows) for part in source.parts))
    if not isinstance(source, TensorRows):
        return source
    ends = {name: getattr(source, name) // rows for name in ("begin", "end", "of")}
    return dataclasses.replace(source, **ends)


def renamed(source: Source, rename: Callable[[str], str]) -> Source:
    """Returns a source with all of its tensors renamed."""
    if isinstance(source, Stack):
        return Stack(tuple(renamed(part, rename) for part in source.parts))
    if isinstance(source, TensorRows | Untransposed):
        return dataclasses.replace(source, name=rename(source.name))
    return rename(source)


def by_tensor(
    module: nnx.Module, shapes: Iterable[tuple[str, tuple[int, ...]]]
) -> dict[str, list[tuple[str, TensorPiece]]]:
    """Returns the pieces of every stored tensor of a module, each with its parameter's path.

    Args:
      shapes: Path and shape of each parameter and buffer of the module.
    Raises:
      ValueError: The pieces do not cover each row of a tensor exactly once.
    """
    tensors: dict[str, list[tuple[str, TensorPiece]]] = {}
    for path, shape in shapes:
        for piece in pieces(source_of(module, path), path, shape):
            tensors.setdefault(piece.name, []).append((path, piece))
    for name, named in tensors.items():
        parts = sorted((piece for _, piece in named), key=lambda piece: piece.first)
        if len({piece.shape for piece in parts}) > 1:
            raise ValueError(f"{name!r} has several shapes: {[piece.shape for piece in parts]}")
        ends = [piece.first + (piece.count or 0) for piece in parts]
        rows = parts[0].shape[0] if parts[0].shape else 0
        if [piece.first for piece in parts] != [0, *ends[:-1]] or ends[-1] != rows:
            raise ValueError(f"{name!r}: its {rows} rows are not divided up by {named}")
    return tensors


def _pieces(source: Source, shape: tuple[int, ...], lead: tuple[int, ...]) -> Iterable[TensorPiece]:
    if isinstance(source, Stack):
        if len(source.parts) != shape[0]:
            raise ValueError(f"{len(source.parts)} parts for a first dimension of {shape[0]}")
        parts = (_pieces(part, shape[1:], (i,)) for i, part in enumerate(source.parts))
        yield from itertools.chain.from_iterable(parts)
    elif isinstance(source, TensorRows):
        count = source.end - source.begin
        if shape[0] != source.groups * count:
            raise ValueError(f"{source} does not make {shape[0]} rows")
        stored = (source.groups * source.of, *shape[1:])
        for group in range(source.groups):
            first = group * source.of + source.begin
            yield TensorPiece(source.name, stored, first, count, lead, group * count)
    else:
        yield TensorPiece(source, shape, 0, shape[0] if shape else None, lead, 0)
