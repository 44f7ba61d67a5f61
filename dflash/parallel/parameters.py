"""Parameters are declared once: shape, dtype, logical axes and initializer in one place.

A module starts abstract: its `nnx.Param` leaves hold `jax.ShapeDtypeStruct`s with their
sharding, so a plan of any size costs nothing. Weights then arrive leaf by leaf, each created
directly in its place on the devices: from `initialize` or `init_fast_random` here, or from a
checkpoint.
"""

import dataclasses
import functools
import math
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dflash.parallel.sharding import Sharding


class Buffer(nnx.Variable):
    """Integers or flags that belong to a checkpoint as weights do, but are never trained.

    Metadata:
      stored_dtype: its dtype in files, such as "int64"; in memory it may be narrower.
      ones: how many of its first entries are 1 without a checkpoint; the rest are 0.
    """


class Frozen(nnx.Param):
    """A weight that belongs to a checkpoint and is never trained, such as columns of a target's."""


_ARRAYS = nnx.Any(nnx.Param, Buffer)


@dataclasses.dataclass(frozen=True)
class Maker:
    """Makes two parameters of one array of a checkpoint, such as values and scales of weights.

    Attributes:
      dtype: in which the array is read.
      program: array -> the parameter itself, and the one at the path with `suffix` behind it.
      suffix: of the second one's path.
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
    maker: "Maker | None" = None,
    is_made: bool = False,
) -> nnx.Param:
    """An abstract parameter.

    Args:
      stddev: of its normal initializer; None for ones.
      offset: number, or nested tuples that broadcast to the shape, added to what is drawn.
      maker: how it is made of what a checkpoint has in its place; None: it is what is read.
      is_made: the maker of another parameter makes this one too; checkpoints do not have it.
    """
    abstract = sharding.abstract(shape, axes, dtype)
    return nnx.Param(
        abstract, axes=axes, stddev=stddev, offset=offset, maker=maker, is_made=is_made
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
    """An abstract one-dimensional buffer; see `Buffer`."""
    abstract = sharding.abstract(shape, axes, dtype)
    return Buffer(abstract, stored_dtype=stored_dtype, ones=ones)


def frozen(param: nnx.Param) -> Frozen:
    """The same parameter, never to be trained."""
    return Frozen(param.get_value(), **param.get_metadata())


def gathered(module: nnx.Module, sharding: Sharding) -> nnx.Module:
    """A copy of a module whose weights are whole on every device that has rows of its own.

    Inside a jitted program, for products with many rows: weights travel instead of rows. Splits
    over mesh axes that do not split the batch stay. Gradients of the copies are summed into the
    split originals: no device holds a sum whole.

    Args:
      module: its weights are arrays of the program.
      sharding: that they are declared with.
    """
    split = set(sharding.axes("batch"))
    graph, params, rest = nnx.split(module, nnx.Param, ...)

    def gather(param: nnx.Variable) -> nnx.Variable:
        names = param.get_metadata()["axes"]
        whole = tuple(None if split & set(sharding.axes(name)) else name for name in names)
        if whole == names or sharding.mesh.size == 1:
            return param
        return param.replace(_gather(sharding, names, whole, param.get_value()))

    whole = jax.tree.map(gather, params, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
    return nnx.merge(graph, whole, rest)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _gather(sharding, names, whole, array):
    """The array, whole where `whole` says so; its gradient is split as `names` say."""
    return sharding.constrain(array, *whole)


def _gather_forward(sharding, names, whole, array):
    return sharding.constrain(array, *whole), None


def _gather_backward(sharding, names, whole, _, gradient):
    return (sharding.constrain(gradient, *names),)


_gather.defvjp(_gather_forward, _gather_backward)


def named_arrays(module: nnx.Module) -> Iterator[tuple[str, nnx.Variable]]:
    """Yields (dotted path, variable) for every parameter, then for every buffer."""
    yield from named_parameters(module)
    yield from _named(nnx.state(module, Buffer))


def named_parameters(module: nnx.Module) -> Iterator[tuple[str, nnx.Param]]:
    """Yields ("layers.0.mlp.up_proj.kernel", Param) for every parameter, in a fixed order."""
    yield from _named(nnx.state(module, nnx.Param))


def initialize(module: nnx.Module, key: jax.Array) -> None:
    """Fills an abstract `module` for training with normal draws, one sharded leaf at a time.

    Frozen weights and buffers that are there already stay.
    """

    def draw(seed, shape):
        return jax.random.normal(jax.random.fold_in(key, seed), shape)

    _fill(module, draw)


def init_fast_random(module: nnx.Module, seed: int) -> None:
    """Fills an abstract `module` with noise of the same variance as `initialize`, but faster.

    For studies of shape and speed: a hash of each element's index is random enough, and 50 times
    faster on a CPU than a generator; billions of weights take seconds.
    """
    bound = math.sqrt(3)  # of a uniform distribution with variance 1

    def draw(leaf_seed, shape):
        bits = jnp.full(shape, leaf_seed ^ jnp.uint32(seed), jnp.uint32)
        for axis in range(len(shape)):
            bits = _mix(bits ^ jax.lax.broadcasted_iota(jnp.uint32, shape, axis))
        return bound * (bits.astype(jnp.float32) * 2.0**-31 - 1.0)

    _fill(module, draw)


def readable(module: nnx.Module) -> dict[str, jax.ShapeDtypeStruct]:
    """By dotted path what a checkpoint holds of an abstract module, in the form to be read."""
    wanted = {}
    for path, leaf in named_arrays(module):
        abstract, maker = leaf.get_value(), leaf.get_metadata().get("maker")
        if maker is not None:
            place = abstract.sharding
            abstract = jax.ShapeDtypeStruct(abstract.shape, maker.dtype, sharding=place)
        if not leaf.get_metadata().get("is_made"):
            wanted[path] = abstract
    return wanted


def made(leaf: nnx.Variable, path: str, array: jax.Array) -> dict[str, jax.Array]:
    """The parameters, by path, that come of the array read for the one at `path`."""
    maker = leaf.get_metadata().get("maker")
    if maker is None:
        return {path: array}
    own, other = jax.block_until_ready(maker.program(array))
    return {path: own, path + maker.suffix: other}


def assign(module: nnx.Module, values: dict[str, jax.Array]) -> None:
    """Puts arrays, by dotted path, into the parameters and buffers of `module`."""
    state = nnx.state(module, _ARRAYS)
    variables = dict(_named(state))
    for path, value in values.items():
        variables[path].set_value(value)
    nnx.update(module, state)


def assign_host(module: nnx.Module, values: dict[str, np.ndarray]) -> None:
    """As `assign`, of host arrays that are the same on every process."""
    variables = dict(named_arrays(module))
    assign(module, {path: put(x, variables[path].get_value()) for path, x in values.items()})


def count(module: nnx.Module) -> int:
    """Number of scalar weights; the scales of eight-bit ones do not count."""
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
    """A host array, the same on every process, with dtype and place of `like`."""
    values = values.astype(like.dtype)
    return jax.make_array_from_callback(values.shape, like.sharding, lambda index: values[index])


def _named(state: Any) -> Iterator[tuple[str, nnx.Variable]]:
    for path, variable in nnx.to_flat_state(state):
        yield ".".join(map(str, path)), variable


def _fill(module: nnx.Module, draw: Callable[[jax.Array, tuple[int, ...]], jax.Array]) -> None:
    """Fills each parameter with stddev · draw(its own seed, shape) or ones, and each buffer.

    Frozen weights that are there already stay, as buffers do.
    """

    @functools.cache  # layers repeat their shapes: one program serves them all
    def program(shape, dtype, sharding, stddev, offset):
        def create(seed):
            if stddev is None:
                return jnp.ones(shape, dtype)
            values = stddev * draw(seed, shape)
            return (values if offset is None else values + jnp.asarray(offset)).astype(dtype)

        return jax.jit(create, out_shardings=sharding)

    values = {}
    for path, param in named_parameters(module):
        leaf = param.get_value()
        if isinstance(param, Frozen) and isinstance(leaf, jax.Array):
            continue
        create = program(leaf.shape, leaf.dtype, leaf.sharding, param.stddev, param.offset)
        values[path] = create(np.uint32(zlib.crc32(path.encode())))
    assign(module, values)
    fill_buffers(module)


def _mix(bits: jax.Array) -> jax.Array:
    """A bijection of 32-bit integers in which every output bit depends on every input bit.

    Source: the finalizer of MurmurHash3 (Austin Appleby, public domain).
    """
    bits = (bits ^ (bits >> 16)) * jnp.uint32(0x85EBCA6B)
    bits = (bits ^ (bits >> 13)) * jnp.uint32(0xC2B2AE35)
    return bits ^ (bits >> 16)
