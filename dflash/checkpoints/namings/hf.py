"""Names of Hugging Face's tensors."""

import dataclasses
import fnmatch

import jax
import jax.numpy as jnp
from flax import nnx

from dflash.checkpoints import tensor_map
from dflash.checkpoints.namings.origin import Origin


@dataclasses.dataclass(frozen=True)
class HfNames:
    """Names of a checkpoint's tensors; see `tensor_map`."""

    module: nnx.Module

    def origin(self, path: str, shape: tuple[int, ...]) -> Origin:
        """Returns the tensors that hold a parameter."""
        pieces = tensor_map.pieces(tensor_map.source_of(self.module, path), path, shape)
        rows = tuple((piece.lead, piece.first, piece.count) for piece in pieces)
        whole = len(pieces) == 1 and pieces[0].is_whole
        form = _Pieces(None if whole else rows, pieces[0].transposed)
        return Origin(
            tuple(piece.name for piece in pieces), tuple(piece.shape for piece in pieces), form
        )

    def ignores(self, name: str) -> bool:
        """Returns whether checkpoints hold the tensor beside the parameters."""
        suffixes = getattr(self.module, "ignored_checkpoint_suffixes", ())
        patterns = [*self.module.ignored_checkpoint_names, *(f"*{suffix}" for suffix in suffixes)]
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


@dataclasses.dataclass(frozen=True)
class _Pieces:
    """Joins rows of tensors to a parameter.

    Attributes:
      rows: Leading index, first row and number of rows of each piece; None for one whole tensor.
      transposed: Swap the last two dimensions.
    """

    rows: tuple[tuple[tuple[int, ...], int, int], ...] | None
    transposed: bool

    def __call__(self, *tensors: jax.Array) -> jax.Array:
        array = tensors[0]
        if self.rows is not None:
            groups: dict[tuple[int, ...], list[jax.Array]] = {}
            for (lead, first, count), tensor in zip(self.rows, tensors, strict=True):
                groups.setdefault(lead, []).append(tensor[first : first + count])
            joined = [jnp.concatenate(group) for group in groups.values()]
            array = jnp.stack(joined) if any(groups) else joined[0]
        return array.swapaxes(-1, -2) if self.transposed else array
