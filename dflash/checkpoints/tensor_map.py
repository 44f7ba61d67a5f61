"""Which stored tensors a parameter is made of, where these are not one for one.

A module's `checkpoint_name(path)` returns the name of the tensor that a parameter is stored as, or
one of the classes below: `Rows` of a tensor that holds several parameters, or a `Stack` of tensors
that are one parameter. Reading and writing both follow it, a tensor at a time.
"""

import dataclasses
import itertools
from collections.abc import Iterable

from flax import nnx


@dataclasses.dataclass(frozen=True)
class Rows:
    """Some rows of a stored tensor: a projection that is fused with others.

    The tensor's rows are `groups` runs of `of` rows each, such as one for each head; the parameter
    has rows begin … end - 1 of every run, one run after another.
    """

    name: str
    begin: int
    end: int
    of: int
    groups: int = 1


@dataclasses.dataclass(frozen=True)
class Stack:
    """A tensor, or rows of one, for each index of the parameter's first dimension: experts."""

    parts: tuple[str | Rows, ...]


Source = str | Rows | Stack

_SCALES = ".kernel_scale"
PACKED = "weight_packed"  # in place of "weight"; see `StoredFormat`


@dataclasses.dataclass(frozen=True)
class Piece:
    """Rows of a stored tensor that lie side by side in a parameter too.

    Attributes:
      name: of the tensor.
      shape: of the whole tensor.
      first: its first row of the piece.
      count: number of rows; None for a tensor without dimensions.
      lead: index of the part of the parameter that holds the piece; () for the whole.
      at: first row of the piece in that part, in the orientation of the tensor.
    """

    name: str
    shape: tuple[int, ...]
    first: int
    count: int | None
    lead: tuple[int, ...]
    at: int

    @property
    def is_whole(self) -> bool:
        """Tensor and parameter are one and the same."""
        return not self.lead and self.shape[:1] == (() if self.count is None else (self.count,))


def pieces(source: Source, shape: tuple[int, ...]) -> list[Piece]:
    """Everything that a parameter is made of.

    Args:
      source: what `checkpoint_name` returns for it.
      shape: of the parameter, in the orientation of the tensors; see `stored_shape`.
    Raises:
      ValueError: the source does not fill this shape exactly.
    """
    return list(_pieces(source, tuple(shape), ()))


def stored_shape(path: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a parameter as files orient it: a kernel is stored transposed."""
    return (*shape[:-2], shape[-1], shape[-2]) if is_transposed(path) else tuple(shape)


def is_transposed(path: str) -> bool:
    """Whether the last two dimensions of the parameter at a dotted path are swapped in files."""
    return path.endswith((".kernel", _SCALES))


def source_of(module: nnx.Module, path: str) -> Source:
    """What the parameter at a dotted path is stored as; scales are beside the kernel's tensors.

    Args:
      module: offers `checkpoint_name(path)`; if it has scales `scale_suffix`, and in `packed` the
        paths of kernels whose tensors are packed.
    """
    kernel_path = path.removesuffix("_scale") if path.endswith(_SCALES) else path
    kernel = module.checkpoint_name(kernel_path)
    if kernel_path != path:
        suffix = module.scale_suffix
    elif path in getattr(module, "packed", ()):
        suffix = PACKED
    else:
        return kernel

    def beside(name: str) -> str:
        return name.removesuffix("weight") + suffix

    if isinstance(kernel, Stack):
        return Stack(tuple(beside(part) for part in kernel.parts))
    if isinstance(kernel, Rows):
        return dataclasses.replace(kernel, name=beside(kernel.name))
    return beside(kernel)


def by_tensor(
    module: nnx.Module, shapes: Iterable[tuple[str, tuple[int, ...]]]
) -> dict[str, list[tuple[str, Piece]]]:
    """Of every stored tensor of a module the pieces, each with the path of its parameter.

    Args:
      module: offers `checkpoint_name(path)`.
      shapes: path and shape of each of its parameters and buffers.
    Raises:
      ValueError: the parameters do not divide a tensor up among them, row by row.
    """
    tensors: dict[str, list[tuple[str, Piece]]] = {}
    for path, shape in shapes:
        for piece in pieces(source_of(module, path), stored_shape(path, shape)):
            tensors.setdefault(piece.name, []).append((path, piece))
    for name, held in tensors.items():
        parts = sorted((piece for _, piece in held), key=lambda piece: piece.first)
        if len({piece.shape for piece in parts}) > 1:
            raise ValueError(f"{name!r} has several shapes: {[piece.shape for piece in parts]}")
        ends = [piece.first + (piece.count or 0) for piece in parts]
        rows = parts[0].shape[0] if parts[0].shape else 0
        if [piece.first for piece in parts] != [0, *ends[:-1]] or ends[-1] != rows:
            raise ValueError(f"{name!r}: its {rows} rows are not divided up by {held}")
    return tensors


def _pieces(source: Source, shape: tuple[int, ...], lead: tuple[int, ...]) -> Iterable[Piece]:
    if isinstance(source, Stack):
        if len(source.parts) != shape[0]:
            raise ValueError(f"{len(source.parts)} parts for a first dimension of {shape[0]}")
        parts = (_pieces(part, shape[1:], (i,)) for i, part in enumerate(source.parts))
        yield from itertools.chain.from_iterable(parts)
    elif isinstance(source, Rows):
        count = source.end - source.begin
        if shape[0] != source.groups * count:
            raise ValueError(f"{source} does not make {shape[0]} rows")
        stored = (source.groups * source.of, *shape[1:])
        for group in range(source.groups):
            first = group * source.of + source.begin
            yield Piece(source.name, stored, first, count, lead, group * count)
    else:
        yield Piece(source, shape, 0, shape[0] if shape else None, lead, 0)
