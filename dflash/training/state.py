"""Training state: float32 weights, optimizer state, step number and random key."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from dflash.parallel.parameters import Buffer, Frozen
from dflash.parallel.sharding import Sharding

Params = Any  # nnx.State of arrays


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything that a train step changes.

    Two runs with equal states and equal data continue identically.

    Attributes:
      step: Number of finished steps, int32 [].
      key: The run's key, uint32 [2]. A step's random numbers depend on this key and the step alone.
      params: Weights in float32.
    """

    step: jax.Array
    key: jax.Array
    params: Params
    optimizer: Any


def split(model: nnx.Module) -> tuple[nnx.GraphDef, Params]:
    """Returns a module's graph definition and its trained arrays; see also `untrained`."""
    return nnx.graphdef(model), nnx.state(model, nnx.All(nnx.Param, nnx.Not(Frozen)))


def untrained(model: nnx.Module) -> Params:
    """Returns a module's arrays that are not trained, such as a draft vocabulary; often none."""
    return nnx.state(model, nnx.Any(Buffer, Frozen))


def abstract(
    params: Params, optimizer: optax.GradientTransformation, sharding: Sharding
) -> TrainState:
    """Returns the abstract state with shardings; `params` may be abstract, too."""
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), params
    )
    replicated = sharding.replicated()

    def scalar(shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=replicated)

    return TrainState(
        step=scalar((), jnp.int32),
        key=scalar((2,), jnp.uint32),
        params=shapes,
        optimizer=_place(jax.eval_shape(optimizer.init, shapes), shapes, replicated),
    )


def create(
    params: Params, optimizer: optax.GradientTransformation, seed: int, sharding: Sharding
) -> TrainState:
    """Returns the state before the first step, which holds `params` without a copy."""
    placements = shardings(abstract(params, optimizer, sharding))
    init = jax.jit(optimizer.init, out_shardings=placements.optimizer)
    key = jax.random.key_data(step_key_base(seed))
    return TrainState(
        step=jax.device_put(jnp.int32(0), placements.step),
        key=jax.device_put(key, placements.key),
        params=params,
        optimizer=init(params),
    )


def step_key_base(seed: int) -> jax.Array:
    """Returns the key from which the keys of all steps are derived."""
    return jax.random.key(seed, impl="threefry2x32")


def shardings(state: TrainState) -> TrainState:
    """Returns the sharding of each array of a state."""
    return jax.tree.map(lambda x: x.sharding, state)


def flatten(state: TrainState) -> dict[str, jax.Array]:
    """Returns the arrays by name, such as "params.layers.0.mlp.up_proj.kernel"."""
    return {_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(state)}


def unflatten(like: TrainState, arrays: Mapping[str, jax.Array]) -> TrainState:
    """Inverts `flatten`; `like` gives the structure."""
    return jax.tree_util.tree_map_with_path(lambda path, _: arrays[_name(path)], like)


@jax.jit
def checksums(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Returns the sum of each array's elements, read as unsigned integers, modulo 2³².

    The sum does not depend on the sharding of the array, and any single flipped bit changes it.
    """
    return {name: _checksum(array) for name, array in arrays.items()}


def _checksum(array: jax.Array) -> jax.Array:
    word = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[array.dtype.itemsize]
    bits = jax.lax.bitcast_convert_type(array, word)
    return jnp.sum(bits.astype(jnp.uint32), dtype=jnp.uint32)


def _place(optimizer: Any, params: Params, replicated) -> Any:
    by_path = dict(jax.tree_util.tree_leaves_with_path(params))

    def place(path, leaf):
        for start in range(len(path)):
            weight = by_path.get(path[start:])
            if weight is not None and weight.shape == leaf.shape:
                return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=weight.sharding)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=replicated)

    return jax.tree_util.tree_map_with_path(place, optimizer)


def _name(path: tuple) -> str:
    # Remove the suffix that flax's wrapper adds: names in files must not depend on it.
    return jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")
