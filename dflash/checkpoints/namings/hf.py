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
        return Origin(
            tuple(piece.name for piece in pieces),
            tuple(piece.shape for piece in pieces),
            _Pieces(None if whole else rows),
            transposed=pieces[0].transposed,
        )

    def ignores(self, name: str) -> bool:
        """Returns whether checkpoints hold the tensor beside the parameters."""
        suffixes = getattr(self.module, "ignored_checkpoint_suffixes", ())
        patterns = [*self.module.ignored_checkpoint_names, *(f"*{suffix}" for suffix in suffixes)]
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


@dataclasses.dataclass(frozen=True)
class _Pieces:
    """Joins rows of tensors.

    Attributes:
      rows: Leading index, first row and number of rows of each piece; None for one whole tensor.
    """

    rows: tuple[tuple[tuple[int, ...], int, int], ...] | None

    @property
    def keeps_order(self) -> bool:
        """Returns whether the result has the numbers of one array, in order."""
        return self.rows is None

    def __call__(self, *tensors: jax.Array) -> jax.Array:
        if self.rows is None:
            return tensors[0]
        groups: dict[tuple[int, ...], list[jax.Array]] = {}
        for (lead, first, count), tensor in zip(self.rows, tensors, strict=True):
            groups.setdefault(lead, []).append(tensor[first : first + count])
        joined = [jnp.concatenate(group) for group in groups.values()]
        return jnp.stack(joined) if any(groups) else joined[0]
