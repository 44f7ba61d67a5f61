"""Reads a drafter's weights as those of the other rotary style.

Rotary embedding rotates pairs of dimensions of a head: i and i + H/2, as here, or the neighbors 2i
and 2i + 1. Scores of queries and keys do not change if the dimensions of both are permuted alike,
so weights of the other style become ones of this style by a permutation.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dflash.drafters.base import Drafter
from dflash.layers.attention import Attention
from dflash.layers.linear import Linear


def pair_neighbors(drafter: Drafter, rotated: int) -> None:
    """Permutes weights in place, such that dimensions 2i and 2i + 1 of heads are rotated together.

    Args:
      rotated: Number of rotated dimensions per head, from the first one on.
    """
    for _, module in list(nnx.iter_modules(drafter)):
        if isinstance(module, Attention):
            _pair_neighbors(module, rotated)


def can_pair_neighbors(drafter: Drafter) -> bool:
    """Returns whether `pair_neighbors` supports the weights: no kernel is quantized in blocks."""
    return not any(
        isinstance(module, Linear) and module.format is not None and module.format.block
        for _, module in nnx.iter_modules(drafter)
    )


def _pair_neighbors(attention: Attention, rotated: int) -> None:
    width = attention.head_dim
    order = np.concatenate(
        [np.arange(0, rotated, 2), np.arange(1, rotated, 2), np.arange(rotated, width)]
    )
    for parts in attention.products:
        _permute_columns(getattr(attention, f"{parts}_proj"), attention, parts, order)
    if hasattr(attention, "k_proj_target"):
        _permute_columns(attention.k_proj_target, attention, "k", order)
    for norm in (attention.q_norm, attention.k_norm):
        if norm is not None:
            _permute(norm.scale, order)


def _permute_columns(linear: Linear, attention: Attention, parts: str, order: np.ndarray) -> None:
    """Permutes the columns of each head of queries and keys; each shard has all parts in turn."""
    counts = {"q": attention.heads_per_kv_head, "k": 1, "v": 1}
    shards = linear.sharding.size(linear.axes[1])
    heads = [
        part
        for _ in range(shards)
        for part in parts
        for _ in range(counts[part] * attention.num_kv_heads // shards)
    ]
    same = np.arange(attention.head_dim)
    columns = np.concatenate(
        [
            attention.head_dim * place + (same if part == "v" else order)
            for place, part in enumerate(heads)
        ]
    )
    for parameter in (linear.kernel, linear.kernel_scale, linear.bias):
        if parameter is not None:
            _permute(parameter, columns)


def _permute(parameter: nnx.Param, index: np.ndarray) -> None:
    values = parameter.get_value()
    permuted = jnp.take(values, index, axis=-1)
    parameter.set_value(jax.device_put(permuted, values.sharding))
