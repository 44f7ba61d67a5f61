"""Joining of linear maps that read the same rows into one larger map."""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from dflash.layers.linear import Linear

# Names of joined projections, with the parts that their columns hold.
JOINED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "kv_proj": ("k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}


def join(linears: Sequence[Linear]) -> Linear:
    """Returns a linear map that computes the outputs of several maps of the same input.

    With few rows, a matrix product takes as long as reading its weights, and each product has a
    fixed start-up cost: see docs/results/tpu_compile.md. Where columns are sharded, each device
    holds its shard of the first map's columns, then that of the second's, and so on, so no column
    moves to another device.

    Args:
      linears: Linear maps, with weights or abstract, for which `can_join` is true.
    """
    first, sharding = linears[0], linears[0].sharding
    kernels = [linear.kernel.get_value() for linear in linears]
    rows, columns = kernels[0].shape[0], sum(kernel.shape[1] for kernel in kernels)
    conversion = first.kernel.get_metadata().get("conversion")
    dtype = kernels[0].dtype if conversion is None else conversion.dtype
    options = {"bias": first.bias is not None, "dtype": dtype, "sharding": sharding}
    joined = Linear(rows, columns, first.axes, **options)
    if first.format is not None:
        joined.quantize(first.format, stored=conversion is None)
    if isinstance(kernels[0], jax.ShapeDtypeStruct):
        return joined
    num_shards = sharding.size(first.axes[1])
    for name in ("kernel", "kernel_scale", "bias"):
        parameter = getattr(joined, name)
        if parameter is None:
            continue
        parts = [getattr(linear, name).get_value() for linear in linears]
        values = side_by_side(num_shards, parameter.get_value().sharding)(parts)
        # Wait, so that this layer's sources are freed before the next layer is copied.
        parameter.set_value(jax.block_until_ready(values))
    return joined


def can_join(linears: Sequence[Linear]) -> bool:
    """Returns whether all maps have the same format and columns sharded over the same mesh axes.

    Maps with block scales are never joined, since a block could straddle two of them, and neither
    are maps with adapters. Either all maps have a bias or none has.
    """
    if len({linear.bias is None for linear in linears}) > 1:
        return False
    if any(linear.low_rank is not None for linear in linears):
        return False
    formats = {linear.format for linear in linears}
    if len(formats) > 1 or any(form is not None and form.block for form in formats):
        return False
    return len({linear.sharding.axes(linear.axes[1]) for linear in linears}) == 1


@functools.cache  # Layers of equal shapes share one compiled program.
def side_by_side(num_shards: int, place: jax.sharding.Sharding) -> Callable:
    """Returns a program that joins kernels, as `join` does; `place` is the result's sharding."""

    def joined(arrays):
        lead = arrays[0].shape[:-1]
        split = [array.reshape(*lead, num_shards, -1) for array in arrays]
        return jnp.concatenate(split, axis=-1).reshape(*lead, -1)

    return jax.jit(joined, out_shardings=place)
