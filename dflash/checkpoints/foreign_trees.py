"""Trees of weights under the names of other frameworks, such as those of a running trainer."""

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

from flax import nnx

from dflash import errors
from dflash.checkpoints.namings.hf import HfNames
from dflash.checkpoints.namings.maxtext import MaxTextNames
from dflash.checkpoints.namings.origin import Naming
from dflash.checkpoints.namings.tunix import TunixNames


def flatten(tree: Any) -> dict[str, Any]:
    """Returns the arrays of a tree by dotted path.

    Args:
      tree: Module or state of nnx, or nested mappings and sequences, whose keys may be dotted
        paths. Only the parameters of a module are returned.
    """
    if isinstance(tree, nnx.Module):
        tree = nnx.state(tree, nnx.Param)
    return dict(_leaves(tree, ()))


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


def _leaves(tree: Any, path: tuple[str, ...]) -> Iterable[tuple[str, Any]]:
    if isinstance(tree, nnx.Variable):
        tree = tree.get_value()
    if isinstance(tree, Mapping):
        children: Iterable[tuple[Any, Any]] = tree.items()
    elif isinstance(tree, list | tuple):
        children = enumerate(tree)
    else:
        yield ".".join(path), tree
        return
    for key, child in children:
        parts = key if isinstance(key, tuple) else (key,)
        yield from _leaves(child, (*path, *map(str, parts)))
