"""Origins of parameters in the trees of other frameworks."""

import dataclasses
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import jax

# Dimension of a stacked parameter that counts layers: MaxText's default of `param_scan_axis`.
LAYER_AXIS = 1


@dataclasses.dataclass(frozen=True)
class Origin:
    """Arrays of a tree that form a parameter.

    Attributes:
      names: Names of the arrays in the tree.
      shapes: Shape of each array; None accepts any.
      form: Function from the arrays, without their dimension of layers, to the parameter. Equal for
        parameters that are formed alike.
      layer: Layer to take from stacked arrays; None if they hold one layer.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...] | None, ...]
    form: Callable[..., jax.Array]
    layer: int | None = None

    def compute(self, arrays: Sequence[jax.Array], layer: Any = None) -> jax.Array:
        """Computes the parameter; `layer` may be an array in place of the attribute."""
        layer = self.layer if layer is None else layer
        if layer is not None:
            arrays = [
                jax.lax.dynamic_index_in_dim(array, layer, LAYER_AXIS, keepdims=False)
                for array in arrays
            ]
        return self.form(*arrays)


class Naming(Protocol):
    """Names and shapes of parameters in the trees of one framework."""

    def origin(self, path: str, shape: tuple[int, ...]) -> Origin:
        """Returns the origin of the parameter of this shape at a dotted path.

        Raises:
          KeyError: The framework has no such parameter.
        """

    def ignores(self, name: str) -> bool:
        """Returns whether an array that no parameter needs is expected in the tree."""


def rename(rules: Iterable[tuple[str, str]], path: str) -> str:
    """Returns the name that the first matching rule, a pattern and its expansion, gives to a path.

    Raises:
      KeyError: No rule matches.
    """
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
