"""Trees of weights under the names of other frameworks, such as those of a running trainer."""

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import jax
from flax import nnx

from dflash import errors
from dflash.checkpoints.namings.hf import HfNames
from dflash.checkpoints.namings.maxtext import MaxTextNames
from dflash.checkpoints.namings.origin import Naming
from dflash.checkpoints.namings.tunix import TunixNames


def parameters_of(tree: Any) -> Any:
    """Returns a tree of arrays: the parameters of a module of nnx, and other trees unchanged."""
    return nnx.state(tree, nnx.Param) if isinstance(tree, nnx.Module) else tree


def flatten(tree: Any) -> dict[str, Any]:
    """Returns the leaves of a tree by dotted path, in the order of `jax.tree.leaves`.

    Args:
      tree: State of nnx, or nested dictionaries and sequences, whose keys may be dotted paths, or
        tuples; or a module, of which the parameters are returned.
    Raises:
      CheckpointError: Two leaves have the same path.
    """
    found: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(parameters_of(tree))[0]:
        name = _dotted(path)
        if name in found:
            raise errors.CheckpointError(f"weights: two arrays are named {name!r}; leave one out")
        found[name] = leaf
    return found


def find_naming(
    module: nnx.Module, flat: Mapping[str, Any], *, lora_alpha: float | None = None
) -> Naming:
    """Returns the naming that a tree follows.

    Args:
      module: Model whose parameters are named.
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
