"""Rows that are sorted into groups, each group times a matrix of its own: experts."""

import functools

import jax
import jax.numpy as jnp

from dflash.kernels import quantised

IMPLEMENTATIONS = ("auto", "tiles", "ragged_dot")

_SMALLEST_TILE, _LARGEST_TILE = 8, 128  # rows


def grouped_matmul(
    rows: jax.Array,
    weights: jax.Array,
    sizes: jax.Array,
    scales: jax.Array | None = None,
    *,
    block: tuple[int, int] | None = None,
    implementation: str = "auto",
) -> jax.Array:
    """rows[i] @ weights[g] for every row i of group g.

    A group's weights are read once for each tile of its rows, and not at all if it has none.

    Args:
      rows: [R, D]; those of group 0, then those of group 1, and so on.
      weights: [E, D, F].
      sizes: int32 [E]; rows of each group, together at most R.
      scales: float32 [E, 1, F], or a scale a block, for weights in eight bits; see `quantised`.
      block: inputs and outputs of a block; None: all inputs of one output.
      implementation: "tiles": plain JAX, one product for each tile of rows. "ragged_dot":
        `jax.lax.ragged_dot`, which a CPU computes with all weights for all rows. "auto": tiles on a
        CPU, ragged_dot elsewhere.
    Returns:
      [R, F]; zeros for the rows behind the last group.
    Raises:
      ValueError: shapes that do not fit each other, or an unknown implementation.
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation {implementation!r} is none of {IMPLEMENTATIONS}")
    if rows.ndim != 2 or weights.ndim != 3 or rows.shape[1] != weights.shape[1]:
        raise ValueError(f"rows {rows.shape} do not fit weights {weights.shape}")
    if sizes.shape != weights.shape[:1]:
        raise ValueError(f"sizes {sizes.shape} of {weights.shape[0]} groups")
    arrays = (rows, weights, sizes) if scales is None else (rows, weights, sizes, scales)
    tiles, ragged = (functools.partial(one, block=block) for one in (_in_tiles, _ragged_dot))
    if implementation == "tiles":
        return tiles(*arrays)
    if implementation == "ragged_dot":
        return ragged(*arrays)
    return jax.lax.platform_dependent(*arrays, cpu=tiles, default=ragged)


def _ragged_dot(rows, weights, sizes, scales=None, *, block):
    """Scales by block are applied to all weights ahead of the product, others to what it gives."""
    if scales is not None and block is not None:
        weights, scales = _plain(weights, scales, block, rows.dtype), None
    product = jax.lax.ragged_dot(
        rows, weights.astype(rows.dtype), sizes, preferred_element_type=jnp.float32
    )
    row, ends = jnp.arange(len(rows)), jnp.cumsum(sizes)
    if scales is not None:
        group = jnp.minimum(jnp.searchsorted(ends, row, side="right"), len(sizes) - 1)
        product *= scales[group, 0]
    # What stands behind the last group is not defined everywhere.
    return jnp.where((row < ends[-1])[:, None], product, 0).astype(rows.dtype)


def _plain(weights, scales, block, dtype):
    """Weights with their scales applied, if there are any."""
    if scales is None:
        return weights
    spread = quantised.spread(scales, weights.shape, block)
    return (weights.astype(jnp.float32) * spread).astype(dtype)


def _in_tiles(rows, weights, sizes, scales=None, *, block):
    """Tiles of one size, each of one group; their last rows may be others', and are left out.

    What comes out for a row does not depend on the rows beside it: every product has one shape.
    """
    count, groups = rows.shape[0], weights.shape[0]
    tile = _tile_rows(count, groups)
    num_tiles = count // tile + min(groups, count)
    tiles_of = -(-sizes // tile)  # [E]
    ends = jnp.cumsum(tiles_of)
    first_row, first_tile = jnp.cumsum(sizes) - sizes, ends - tiles_of
    index = jnp.arange(num_tiles)
    group = jnp.minimum(jnp.searchsorted(ends, index, side="right"), groups - 1)
    begin = first_row[group] + (index - first_tile[group]) * tile
    taken = jnp.minimum(begin[:, None] + jnp.arange(tile), count - 1)  # [tiles, rows of a tile]

    def product(one):
        group, indices, is_used = one
        empty = jnp.zeros((tile, weights.shape[2]), rows.dtype)
        own = None if scales is None else scales[group]
        return jax.lax.cond(
            is_used,
            lambda: rows[indices] @ _plain(weights[group], own, block, rows.dtype),
            lambda: empty,
        )

    products = jax.lax.map(product, (group, taken, index < ends[-1]))
    row = jnp.arange(count)
    last_rows = jnp.cumsum(sizes)
    own = jnp.minimum(jnp.searchsorted(last_rows, row, side="right"), groups - 1)
    within = row - first_row[own]
    place = (first_tile[own] + within // tile) * tile + within % tile
    flat = products.reshape(num_tiles * tile, -1)
    inside = (row < last_rows[-1])[:, None]
    return jnp.where(inside, flat[jnp.minimum(place, len(flat) - 1)], 0)


def _tile_rows(count: int, groups: int) -> int:
    """Rows of a tile: about those of a group, as a power of two."""
    mean = max(1, count // groups)
    return min(max(1 << (mean - 1).bit_length(), _SMALLEST_TILE), _LARGEST_TILE)
