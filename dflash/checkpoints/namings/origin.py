"""Origins of parameters in the trees of other frameworks."""

import dataclasses
import re
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import jax

# Dimension of a stacked parameter that counts layers: MaxText's default of `param_scan_axis`.
LAYER_AXIS = 1


class Form(Protocol):
    """Function from the arrays of an origin to a parameter, or to its transpose.

    Equal for parameters that are formed alike.
    """

    @property
    def keeps_order(self) -> bool:
        """Returns whether the result has the numbers of one array, in their order."""

    def __call__(self, *arrays: jax.Array) -> jax.Array:
        """Computes the result from arrays without their dimension of layers."""


@dataclasses.dataclass(frozen=True)
class Origin:
    """Arrays of a tree that form a parameter.

    Attributes:
      shapes: Shape of each array; None accepts any.
      form: Function from the arrays to the parameter, or to its transpose.
      layer: Layer to take from stacked arrays; None if they hold one layer.
      transposed: Swap the last two dimensions of what `form` returns.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...] | None, ...]
    form: Form
    layer: int | None = None
    transposed: bool = False

    def compute(self, arrays: Sequence[jax.Array], layer: Any = None) -> jax.Array:
        """Computes the parameter; `layer` may be an array in place of the attribute."""
        layer = self.layer if layer is None else layer
        if layer is not None:
            arrays = [
                jax.lax.dynamic_index_in_dim(array, layer, LAYER_AXIS, keepdims=False)
                for array in arrays
            ]
        array = self.form(*arrays)
        return array.swapaxes(-1, -2) if self.transposed else array


class Naming(Protocol):
    """Names and shapes of parameters in the trees of one framework."""

    def origin(self, path: str, shape: tuple[int, ...]) -> Origin:
        """Returns the origin of a parameter; raises KeyError if the framework has none."""

    def ignores(self, name: str) -> bool:
        """Returns whether an array that no parameter needs is expected in the tree."""


def rename(rules: Iterable[tuple[str, str]], path: str) -> str:
    """Returns the name that the first matching rule gives to a path, or raises KeyError."""
    for pattern, name in rules:
        match = re.fullmatch(pattern, path)
        if match:
            return match.expand(name)
    raise KeyError(path)


def heads_apart(path: str, shape: tuple[int, ...], size: int) -> tuple[int, ...]:
    """Returns a parameter's shape in a tree whose heads, of this size, have their own dimension."""
    projection = re.search(r"self_attn\.(\w)_proj\.kernel", path)
    if projection is None:
        return shape
    if projection[1] == "o":
        return shape[0] // size, size, shape[1]
    return shape[0], shape[1] // size, size
