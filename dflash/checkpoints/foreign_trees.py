"""Trees of weights under the names of other frameworks, such as those of a running trainer."""

import itertools
from collections.abc import Mapping
from typing import Any

import jax
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
    if isinstance(tree, nnx.State):  # Several times as fast as a walk over its mappings.
        tree = dict(nnx.to_flat_state(tree))
    found: dict[str, Any] = {}
    _collect(tree, "", found)
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


def _collect(tree: Mapping | list | tuple, prefix: str, found: dict[str, Any]) -> None:
    """Adds the arrays of a tree, by their paths after a prefix."""
    for key, child in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
        name = f"{prefix}{'.'.join(map(str, key)) if isinstance(key, tuple) else key}"
        if not isinstance(child, jax.Array) and isinstance(child, nnx.Variable):
            child = child.get_value()
        if isinstance(child, jax.Array) or not isinstance(child, Mapping | list | tuple):
            found[name] = child
        else:
            _collect(child, f"{name}.", found)
