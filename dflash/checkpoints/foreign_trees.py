"""Trees of weights under the names of other frameworks, such as those of a running trainer."""

import dataclasses
import fnmatch
import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from dflash import errors
from dflash.checkpoints import tensor_map
from dflash.checkpoints.namings.maxtext import MaxTextNames
from dflash.checkpoints.namings.origin import Naming, Origin
from dflash.checkpoints.namings.tunix import TunixNames


def parameters_of(tree: Any) -> Any:
    """Returns a tree of arrays: the parameters of a module of nnx, and other trees unchanged."""
    return nnx.state(tree, nnx.Param) if isinstance(tree, nnx.Module) else tree


def flatten(tree: Any) -> dict[str, Any]:
    """Returns the leaves of a tree by dotted path, in the order of `jax.tree.leaves`.

    Args:
      tree: State of nnx, or nested dictionaries and sequences, whose keys may be dotted paths, or
        tuples; or a module, of which the parameters are returned.
    """
    leaves: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(parameters_of(tree))[0]:
        name = _dotted(path)
        if name in leaves:
            raise errors.CheckpointError(f"weights: two arrays are named {name!r}; leave one out")
        leaves[name] = leaf
    return leaves


def find_naming(
    module: nnx.Module, flat: Mapping[str, Any], *, lora_alpha: float | None = None
) -> Naming:
    """Returns the naming that a tree follows.

    Args:
      flat: Arrays of the tree by dotted path.
      lora_alpha: Numerator of the scale of LoRA parameters; the denominator is their rank.
    Raises:
      CheckpointError: The tree follows none of the namings, or its LoRA parameters lack a scale.
    """
    if any(name.endswith("token_embedder.embedding") for name in flat):
        return MaxTextNames(module, flat)
    if "embedder.input_embedding" in flat:
        return TunixNames(module, flat, lora_alpha)
    if any(name.endswith(".weight") for name in flat):
        return HfNames(module)
    some = ", ".join(map(repr, itertools.islice(flat, 3))) or "no arrays"
    raise errors.CheckpointError(
        f"weights: {some}: expected the names of Hugging Face (model.norm.weight), of Tunix "
        "(final_norm.w) or of MaxText (decoder.decoder_norm.scale)"
    )


def _dotted(path: Iterable[Any]) -> str:
    """Returns the dotted form of a path of jax, without the step from a variable to its array."""
    parts: list[Any] = []
    for step in path:
        if isinstance(step, jax.tree_util.SequenceKey):
            parts.append(step.idx)
        elif isinstance(step, jax.tree_util.DictKey):
            parts += step.key if isinstance(step.key, tuple) else [step.key]
    return ".".join(map(str, parts))


@dataclasses.dataclass(frozen=True)
class HfNames:
    """Names of a checkpoint's tensors; see `tensor_map`."""

    module: nnx.Module

    def origin(self, path: str, shape: tuple[int, ...]) -> Origin:
        """Returns the tensors that hold a parameter."""
        pieces = tensor_map.pieces(tensor_map.source_of(self.module, path), path, shape)
        rows = tuple((piece.lead, piece.first, piece.count) for piece in pieces)
        is_whole = len(pieces) == 1 and pieces[0].is_whole
        return Origin(
            tuple(piece.name for piece in pieces),
            tuple(piece.shape for piece in pieces),
            _Pieces(None if is_whole else rows),
            transposed=pieces[0].transposed,
        )

    def ignores(self, name: str) -> bool:
        """Returns whether checkpoints hold the tensor beside the parameters."""
        suffixes = getattr(self.module, "ignored_checkpoint_suffixes", ())
        patterns = [*self.module.ignored_checkpoint_names, *(f"*{suffix}" for suffix in suffixes)]
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


@dataclasses.dataclass(frozen=True)
class _Pieces:
    """Joins rows of tensors; `rows` has leading index, first row and count of each, or None."""

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
