"""Declaration of parameters: shape, dtype, logical axes and initializer in one place.

A module starts abstract: its `nnx.Param` leaves hold `jax.ShapeDtypeStruct`s with their sharding,
so that declaring a model of any size takes no memory. Weights are then created leaf by leaf,
directly sharded on the devices, by `initialize` or `init_fast_random` or from a checkpoint.
"""

import dataclasses
import functools
import math
import zlib
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dflash.parallel.sharding import Sharding


class Buffer(nnx.Variable):
    """Integers or flags that are stored in checkpoints and never trained.

    Metadata:
      stored_dtype: Dtype in files, such as "int64"; in memory it may be narrower.
      ones: Number of leading entries initialized to 1; the others are initialized to 0.
    """


class Frozen(nnx.Param):
    """Weight that is stored in checkpoints and never trained, such as a copy of a target's."""


_ARRAYS = nnx.Any(nnx.Param, Buffer)


@dataclasses.dataclass(frozen=True)
class Conversion:
    """Conversion of one stored array to two parameters, such as quantized values and scales.

    Attributes:
      dtype: Dtype in which the array is read.
      program: Function from the array to the two parameters.
      suffix: Suffix of the second parameter's path, after the path of the first.
    """

    dtype: jnp.dtype
    program: Callable[[jax.Array], tuple[jax.Array, jax.Array]]
    suffix: str


def declare(
    shape: tuple[int, ...],
    axes: tuple[str | None, ...],
    *,
    dtype: jnp.dtype,
    sharding: Sharding,
    stddev: float | None,
    offset: float | tuple | None = None,
    conversion: "Conversion | None" = None,
    is_derived: bool = False,
) -> nnx.Param:
    """Returns an abstract parameter.

    Args:
      stddev: Standard deviation of the normal initializer; None to initialize with ones.
      offset: Number, or nested tuples that broadcast to the shape, added to the initial values.
      conversion: Conversion of the stored array; None to use the array unchanged.
      is_derived: Another parameter's conversion computes it, so checkpoints do not store it.
    """
    return nnx.Param(
        sharding.abstract(shape, axes, dtype),
        axes=axes,
        stddev=stddev,
        offset=offset,
        conversion=conversion,
        is_derived=is_derived,
    )


def declare_buffer(
    shape: tuple[int, ...],
    axes: tuple[str | None, ...],
    *,
    dtype: jnp.dtype,
    stored_dtype: str,
    ones: int = 0,
    sharding: Sharding,
) -> Buffer:
    """Returns an abstract one-dimensional buffer; see `Buffer`."""
    return Buffer(sharding.abstract(shape, axes, dtype), stored_dtype=stored_dtype, ones=ones)


def frozen(param: nnx.Param) -> Frozen:
    """Returns the parameter as a `Frozen` one."""
    return Frozen(param.get_value(), **param.get_metadata())


def gathered(module: nnx.Module, sharding: Sharding) -> nnx.Module:
    """Returns a copy of a module with its weights all-gathered over the mesh axes of the batch.

    For matmuls with many rows inside a jitted program, where moving weights is cheaper than moving
    rows. Splits over other mesh axes stay. Gradients are reduce-scattered to the sharded originals,
    so that no device holds a whole sum.

    Args:
      sharding: Sharding that the weights are declared with.
    """
    split = set(sharding.axes("batch"))
    graph, params, rest = nnx.split(module, nnx.Param, ...)

    def gather(param: nnx.Variable) -> nnx.Variable:
        names = param.get_metadata()["axes"]
        gathered_names = tuple(None if split & set(sharding.axes(name)) else name for name in names)
        if gathered_names == names or sharding.mesh.size == 1:
            return param
        return param.replace(_gather(sharding, names, gathered_names, param.get_value()))

    replicas = jax.tree.map(gather, params, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
    return nnx.merge(graph, replicas, rest)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _gather(sharding, names, gathered_names, array):
    """Constrains an array to the axes `gathered_names`, and its gradient to the axes `names`."""
    return sharding.constrain(array, *gathered_names)


def _gather_forward(sharding, names, gathered_names, array):
    return sharding.constrain(array, *gathered_names), None


def _gather_backward(sharding, names, gathered_names, _, gradient):
    return (sharding.constrain(gradient, *names),)


_gather.defvjp(_gather_forward, _gather_backward)


def named_arrays(module: nnx.Module) -> Iterator[tuple[str, nnx.Variable]]:
    """Yields (dotted path, variable) for every parameter, then for every buffer."""
    for state in nnx.state(module, nnx.Param, Buffer):  # One walk over the module for both.
        yield from _named(state)


def named_parameters(module: nnx.Module) -> Iterator[tuple[str, nnx.Param]]:
    """Yields ("layers.0.mlp.up_proj.kernel", Param) for every parameter, in a fixed order."""
    yield from _named(nnx.state(module, nnx.Param))


def owns(module: nnx.Module, variables: Mapping[str, nnx.Variable]) -> bool:
    """Returns whether a module has exactly these variables at their dotted paths."""
    nodes: dict[str, Any] = {"": module}

    def find(path: str) -> Any:
        if path not in nodes:
            parent, _, key = path.rpartition(".")
            node = find(parent)
            nodes[path] = node[int(key)] if key.isdecimal() else getattr(node, key, None)
        return nodes[path]

    return all(find(path) is variable for path, variable in variables.items())


def initialize(module: nnx.Module, key: jax.Array) -> None:
    """Fills an abstract `module` for training with normal draws, one sharded leaf at a time.

    Frozen weights and buffers that already hold arrays are left unchanged.
    """
    _fill(module, _normal(jax.random.key_impl(key)), np.asarray(jax.random.key_data(key)))


def init_fast_random(module: nnx.Module, seed: int) -> None:
    """Fills an abstract `module` with noise of the same variance as `initialize`, but faster.

    For studies of shape and speed: a hash of each element's index is random enough, and 50 times
    faster on a CPU than a generator; billions of weights take seconds.
    """
    _fill(module, _hashed, np.uint32(seed))


def readable(module: nnx.Module) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the arrays to read for an abstract module, as abstract arrays by dotted path."""
    return readable_of(dict(named_arrays(module)))


def readable_of(variables: Mapping[str, nnx.Variable]) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the arrays to read for a module with these variables; see `readable`."""
    arrays = {}
    for path, leaf in variables.items():
        abstract, conversion = leaf.get_value(), leaf.get_metadata().get("conversion")
        if conversion is not None:
            place = abstract.sharding
            abstract = jax.ShapeDtypeStruct(abstract.shape, conversion.dtype, sharding=place)
        if not leaf.get_metadata().get("is_derived"):
            arrays[path] = abstract
    return arrays


def convert(leaf: nnx.Variable, path: str, array: jax.Array) -> dict[str, jax.Array]:
    """Returns the parameters, by path, that result from the array stored for `path`."""
    conversion = leaf.get_metadata().get("conversion")
    if conversion is None:
        return {path: array}
    value, other = jax.block_until_ready(conversion.program(array))
    return {path: value, path + conversion.suffix: other}


def assign(module: nnx.Module, values: dict[str, jax.Array]) -> None:
    """Puts arrays, by dotted path, into the parameters and buffers of `module`."""
    state = nnx.state(module, _ARRAYS)
    variables = dict(_named(state))
    for path, value in values.items():
        variables[path].set_value(value)
    nnx.update(module, state)


def assign_host(module: nnx.Module, values: dict[str, np.ndarray]) -> None:
    """Assigns host arrays, identical on every process, like `assign`."""
    variables = dict(named_arrays(module))
    assign(module, {path: put(x, variables[path].get_value()) for path, x in values.items()})


def count(module: nnx.Module) -> int:
    """Returns the number of scalar weights, without the scales of quantized kernels."""
    return sum(
        param.get_value().size
        for path, param in named_parameters(module)
        if not path.endswith(".kernel_scale")
    )


def fill_buffers(module: nnx.Module) -> None:
    """Fills each buffer of `module` that is still abstract with its initial values."""
    values = {}
    for path, buffer in _named(nnx.state(module, Buffer)):
        leaf = buffer.get_value()
        if isinstance(leaf, jax.ShapeDtypeStruct):
            values[path] = put(np.arange(leaf.size) < buffer.ones, leaf)
    assign(module, values)


def put(values: np.ndarray, like: jax.Array | jax.ShapeDtypeStruct) -> jax.Array:
    """Puts a host array, identical on every process, on devices like `like`."""
    values = values.astype(like.dtype)
    return jax.make_array_from_callback(values.shape, like.sharding, lambda index: values[index])


def _named(state: Any) -> Iterator[tuple[str, nnx.Variable]]:
    for path, variable in nnx.to_flat_state(state):
        yield ".".join(map(str, path)), variable


# Draws numbers of mean 0 and variance 1 from the seed of the module, that of the leaf, and a shape.
_Draw = Callable[[jax.Array, jax.Array, tuple[int, ...]], jax.Array]


@functools.cache
def _normal(impl: Hashable) -> _Draw:
    def draw(key_data, leaf_seed, shape):
        key = jax.random.wrap_key_data(key_data, impl=impl)
        return jax.random.normal(jax.random.fold_in(key, leaf_seed), shape)

    return draw


def _hashed(seed, leaf_seed, shape):
    """Draws from a uniform distribution by a hash of each element's index."""
    bits = jnp.full(shape, leaf_seed ^ seed, jnp.uint32)
    for axis in range(len(shape)):
        bits = _mix(bits ^ jax.lax.broadcasted_iota(jnp.uint32, shape, axis))
    bound = math.sqrt(3)  # that of variance 1
    return bound * (bits.astype(jnp.float32) * 2.0**-31 - 1.0)


@functools.cache  # Leaves of equal shapes share one program, also those of other modules.
def _creation(draw: _Draw, shape, dtype, sharding, stddev, offset) -> Callable[..., jax.Array]:
    def create(seed, leaf_seed):
        if stddev is None:
            return jnp.ones(shape, dtype)
        values = stddev * draw(seed, leaf_seed, shape)
        return (values if offset is None else values + jnp.asarray(offset)).astype(dtype)

    return jax.jit(create, out_shardings=sharding)


def _fill(module: nnx.Module, draw: _Draw, seed: np.ndarray) -> None:
    """Fills each parameter with stddev · draw(seed, its own seed, shape) or ones, and each buffer.

    Frozen weights and buffers that already hold arrays are left unchanged.
    """
    values = {}
    for path, param in named_parameters(module):
        leaf = param.get_value()
        if isinstance(param, Frozen) and isinstance(leaf, jax.Array):
            continue
        how = leaf.shape, leaf.dtype, leaf.sharding, param.stddev, param.offset
        values[path] = _creation(draw, *how)(seed, np.uint32(zlib.crc32(path.encode())))
    assign(module, values)
    fill_buffers(module)


def _mix(bits: jax.Array) -> jax.Array:
    """Applies a bijection of 32-bit integers; every output bit depends on every input bit.

    Source: the finalizer of MurmurHash3 (Austin Appleby, public domain).
    """
    bits = (bits ^ (bits >> 16)) * jnp.uint32(0x85EBCA6B)
    bits = (bits ^ (bits >> 13)) * jnp.uint32(0xC2B2AE35)
    return bits ^ (bits >> 16)
