"""Start of a DFlash drafter from its target or another drafter, by `drafter.initialize_from`."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from dflash import errors
from dflash.checkpoints import checkpoint
from dflash.config import registry
from dflash.drafters.base_config import BlockDrafterConfig
from dflash.drafters.dflash import DFlash
from dflash.loading import models
from dflash.loading.models import Source
from dflash.models.decoder import Decoder
from dflash.parallel import parameters

_OF_TARGET = "target_first", "target_last"
_KEY = "drafter.initialize_from"
KERNELS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def copies(drafter: Any, target: Decoder, initialize_from: str) -> dict[str, str]:
    """Returns the target's weight that each weight of a drafter starts as, by dotted paths.

    Kernels of attention and MLP must all have one, of the same shape. Weights that the target's
    layers lack or compute with otherwise, such as norms of other kinds, keep their own start.

    Args:
      drafter: Drafter with transformer layers, abstract or not.
      initialize_from: `target_first` or `target_last`: the layers that become the draft layers.
    Raises:
      ConfigError: The target has too few layers, or layers of other kernels.
    """
    count, depth = len(drafter.layers), len(target.layers)
    if count > depth:
        raise errors.ConfigError(f"{_KEY}: {count} draft layers, but the target has only {depth}")
    first = 0 if initialize_from == "target_first" else depth - count
    weights, problems, found = dict(parameters.named_parameters(target)), [], {}
    kinds, target_kinds = _kinds(drafter), _kinds(target)
    for path, weight in parameters.named_parameters(drafter):
        source = _source(path, first)
        module, _, leaf = path.rpartition(".")
        same_kind = kinds[module] is target_kinds.get(source.rpartition(".")[0])
        if source in weights and same_kind and f"{source}_scale" not in weights:
            found[path] = source
            shapes = weight.get_value().shape, weights[source].get_value().shape
            if shapes[0] != shapes[1]:
                problems.append(
                    f"{_KEY}: {path} is {list(shapes[0])}, but the target's {source} is "
                    f"{list(shapes[1])}: give drafter.architecture the target's sizes"
                )
        elif leaf == "kernel" and module.rpartition(".")[2] in KERNELS:
            problems.append(f"{_KEY}: the target has no plain {source} for the drafter's {path}")
    if problems:
        raise errors.ConfigError(*problems)
    return found


def shared(drafter: DFlash, other: DFlash, reference: str) -> dict[str, str]:
    """Returns the weights that a drafter takes from another one: those that both have.

    The result is that of `copies`.

    Args:
      reference: Checkpoint of the other drafter, for messages.
    Raises:
      ConfigError: Shapes of weights differ, or the drafter has a draft vocabulary of its own.
    """
    if drafter.d2t is not None:
        raise errors.ConfigError(
            f"{_KEY}: {reference} may draft other tokens; leave "
            "drafter.architecture.draft_vocab_size out"
        )
    own, theirs = (
        {path: weight.get_value().shape for path, weight in parameters.named_parameters(module)}
        for module in (drafter, other)
    )
    found = [path for path in own if path in theirs]
    problems = [
        f"{_KEY}: {path} is {list(own[path])}, but {reference} has {list(theirs[path])}: give "
        "drafter.architecture its sizes"
        for path in found
        if own[path] != theirs[path]
    ]
    if problems:
        raise errors.ConfigError(*problems)
    return dict(zip(found, found, strict=True))


def check(drafter: Any, target: Decoder, initialize_from: str, *, download: bool) -> None:
    """Raises ConfigError if a drafter cannot start so, as far as that is known without download."""
    if initialize_from in _OF_TARGET:
        copies(drafter, target, initialize_from)
    elif checkpoint.find(initialize_from, download=download) is not None:
        shared(drafter, _find(target, initialize_from)[0], initialize_from)


def copy(drafter: Any, target: Decoder, initialize_from: str) -> None:
    """Copies the weights of `copies`, or of `shared`, into a drafter with weights."""
    if initialize_from in _OF_TARGET:
        origin, sources = target, copies(drafter, target, initialize_from)
    else:
        origin, source = _find(target, initialize_from)
        sources = shared(drafter, origin, initialize_from)
        models.load_weights(origin, source)
    weights, own = (dict(parameters.named_parameters(module)) for module in (origin, drafter))
    values = {}
    for path, source in sources.items():
        like = own[path].get_value()
        # Copy even if nothing is converted, since train steps donate the drafter's weights.
        value = jnp.array(weights[source].get_value(), like.dtype, copy=True)
        values[path] = jax.device_put(value, like.sharding)
    parameters.assign(drafter, values)


def _find(target: Decoder, reference: str) -> tuple[DFlash, Source]:
    """Returns the abstract drafter of a checkpoint; raises UserError if it is not of this kind."""
    name = models.find_strategy(reference)
    config = registry.load_schema(registry.DRAFTERS[name])(checkpoint=reference)
    if not isinstance(config, BlockDrafterConfig):
        raise errors.ConfigError(f"{_KEY}: {reference} is of {name}, which has no block to take")
    source, build = models.find_drafter(config), {"dtype": "float32", "sharding": target.sharding}
    return models.build_drafter(config, source, target.arch, **build), source


def _source(path: str, first: int) -> str:
    """Returns the path in the target, whose layer `first` becomes draft layer 0."""
    name, *rest = path.split(".")
    return ".".join([name, str(first + int(rest[0])), *rest[1:]]) if name == "layers" else path


def _kinds(model: nnx.Module) -> dict[str, type]:
    return {".".join(map(str, path)): type(module) for path, module in nnx.iter_modules(model)}
