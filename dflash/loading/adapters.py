"""LoRA adapters of a target: merged into its weights, or beside them, chosen by each sequence."""

import functools
from collections.abc import Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from dflash import errors
from dflash.checkpoints import files, lora, tensor_map
from dflash.checkpoints.lora import Adapter, LowRankUpdate
from dflash.checkpoints.tensor_map import TensorPiece
from dflash.layers.linear import Linear, LowRank
from dflash.loading.quantization import projections
from dflash.models.decoder import Decoder
from dflash.parallel import parameters

# --- merged -------------------------------------------------------------------------------------


def check_mergeable(target: Decoder, adapter: Adapter) -> None:
    """Raises CheckpointError if an adapter cannot be merged into a target."""
    stored = _stored(target)
    _check_shapes(adapter, {name: pieces[0][1].shape for name, pieces in stored.items()})
    quantized = {path for path, kernel in projections(target) if kernel.format is not None}
    for name in adapter.updates:
        for path, _ in stored[name]:
            if path.removesuffix(".kernel") in quantized:
                raise errors.CheckpointError(
                    f"{adapter.directory}: {name}: is in eight bits in the target, which takes no "
                    "merged update; leave target.quantization out, or serve the adapter by "
                    "serve.adapters"
                )


def merge(target: Decoder, adapter: Adapter) -> None:
    """Adds the updates of an adapter to a target's weights, one parameter at a time, in place."""
    variables, stored = dict(parameters.named_parameters(target)), _stored(target)
    for name, update in adapter.updates.items():
        for path, piece in stored[name]:
            value = variables[path].get_value()
            program = _merger(value.sharding, piece.lead, piece.at, piece.transposed)
            last = piece.first + piece.count
            variables[path].set_value(program(value, update.a, update.b[piece.first : last]))


def _stored(target: Decoder) -> dict[str, list[tuple[str, TensorPiece]]]:
    """Returns the pieces of each tensor of the target's checkpoint."""
    shapes = ((path, leaf.shape) for path, leaf in parameters.readable(target).items())
    return tensor_map.by_tensor(target, shapes)


@functools.cache  # Layers of equal shapes share one compiled program.
def _merger(place: jax.sharding.Sharding, lead: tuple[int, ...], at: int, transposed: bool):
    """Returns a program that adds a product of A and rows of B to a part of a parameter."""

    def merged(value, a, b):
        delta = jnp.matmul(b, a, precision="highest")
        start = (*lead, *((0, at) if transposed else (at, 0)))
        delta = (delta.T if transposed else delta)[(None,) * len(lead)]
        old = jax.lax.dynamic_slice(value, start, delta.shape)
        new = (old.astype(jnp.float32) + delta).astype(value.dtype)
        return jax.lax.dynamic_update_slice(value, new, start)

    return jax.jit(merged, donate_argnums=0, out_shardings=place)


# --- by sequence --------------------------------------------------------------------------------


def declare(target: Decoder, references: Mapping[str, str]) -> dict[str, Adapter]:
    """Reads adapters, and declares their updates beside a target's linear maps, in place.

    Sequences choose among them by number: 1 for the first adapter, and 0 for none.

    Args:
      references: Directories, or references to the hub, by the names of the adapters.
    Returns:
      The adapters by name, for `fill`.
    Raises:
      CheckpointError: An adapter cannot be read, or does not fit the target.
    """
    adapters = {name: lora.read(reference) for name, reference in references.items()}
    maps = dict(linear_maps(target))
    shapes = {name: linear.kernel.get_value().shape[::-1] for name, linear in maps.items()}
    for adapter in adapters.values():
        _check_shapes(adapter, shapes)
    for name, linear in maps.items():
        ranks = {number: update.rank for number, update in _of_map(name, adapters.values())}
        if ranks:
            linear.low_rank = LowRank(linear, ranks)
    target.adapters = tuple(adapters)
    return adapters


def fill(target: Decoder, adapters: Sequence[Adapter]) -> None:
    """Fills the updates that `declare` has declared."""
    for name, linear in linear_maps(target):
        updates = [update for _, update in _of_map(name, adapters)]
        if updates:
            joined = {
                "a": np.concatenate([update.a for update in updates]).T,
                "b": np.concatenate([update.b.T for update in updates]),
            }
            parameters.assign_host(linear.low_rank, joined)


def _of_map(name: str, adapters: Sequence[Adapter]) -> Iterator[tuple[int, LowRankUpdate]]:
    """Yields the number and the update of each adapter that has one for a tensor."""
    for number, adapter in enumerate(adapters, start=1):
        if name in adapter.updates:
            yield number, adapter.updates[name]


def linear_maps(target: Decoder) -> Iterator[tuple[str, Linear]]:
    """Yields the linear maps of the layers that are a tensor of the checkpoint, by its name."""
    for path, kernel in projections(target):
        name = tensor_map.source_of(target, f"{path}.kernel")
        # Maps of experts, which are no `Linear`, do not multiply the rows of sequences.
        if isinstance(kernel, Linear) and path.startswith("layers.") and isinstance(name, str):
            yield name, kernel


def _check_shapes(adapter: Adapter, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raises CheckpointError if an update belongs to no tensor of these shapes [out, in]."""
    place = adapter.directory / lora.WEIGHTS
    unknown = adapter.updates.keys() - shapes.keys()
    if unknown:
        raise errors.CheckpointError(
            f"{place}: updates {files.quote_some(unknown)}, which this target does not have as "
            "linear maps of its own"
        )
    for name, update in adapter.updates.items():
        shape = (len(update.b), update.a.shape[1])
        if shape != tuple(shapes[name]):
            raise errors.CheckpointError(
                f"{place}: {name}: updates a map of {list(shape)}, but the target's is "
                f"{list(shapes[name])}; give the adapter's own base model"
            )
