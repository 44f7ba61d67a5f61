"""Parameters are declared once: shape, dtype, logical axes and initializer in one place.

A module is born abstract: its `nnx.Param` leaves hold `jax.ShapeDtypeStruct`s that carry their
sharding, so a plan of any size costs nothing. Weights then arrive leaf by leaf, each created
directly in its place on the devices: from `initialize` here, or from a checkpoint.
"""

import functools
import zlib
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from flax import nnx

from dflash.common.sharding import Sharding


def declare(
    shape: tuple[int, ...],
    axes: tuple[str | None, ...],
    *,
    dtype: jnp.dtype,
    sharding: Sharding,
    stddev: float | None,
) -> nnx.Param:
    """An abstract parameter; `stddev` of its normal initializer, or None for ones."""
    return nnx.Param(sharding.abstract(shape, axes, dtype), stddev=stddev)


def named_parameters(module: nnx.Module) -> Iterator[tuple[str, nnx.Param]]:
    """Yields ("layers.0.mlp.up_proj.kernel", Param) for every parameter, in a fixed order."""
    for path, param in nnx.to_flat_state(nnx.state(module, nnx.Param)):
        yield ".".join(map(str, path)), param


def initialize(module: nnx.Module, key: jax.Array) -> None:
    """Fills every parameter of an abstract `module`, one sharded leaf at a time."""
    values = {}
    for path, param in named_parameters(module):
        abstract = param.get_value()
        init = jax.jit(
            functools.partial(_draw, shape=abstract.shape, dtype=abstract.dtype, std=param.stddev),
            out_shardings=abstract.sharding,
        )
        values[path] = init(jax.random.fold_in(key, zlib.crc32(path.encode())))
    assign(module, values)


def assign(module: nnx.Module, values: dict[str, jax.Array]) -> None:
    """Puts arrays, by dotted path, into the parameters of `module`."""
    state = nnx.state(module, nnx.Param)
    for path, param in nnx.to_flat_state(state):
        param.set_value(values[".".join(map(str, path))])
    nnx.update(module, state)


def count(module: nnx.Module) -> int:
    """Number of scalar weights."""
    return sum(param.get_value().size for _, param in named_parameters(module))


def _draw(key, *, shape, dtype, std):
    if std is None:
        return jnp.ones(shape, dtype)
    return (std * jax.random.normal(key, shape, jnp.float32)).astype(dtype)
