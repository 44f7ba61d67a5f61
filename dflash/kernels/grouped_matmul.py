"""Rows that are sorted into groups, each group times a matrix of its own: experts."""

import jax
import jax.numpy as jnp

IMPLEMENTATIONS = ("auto", "tiles", "ragged_dot")

_SMALLEST_TILE, _LARGEST_TILE = 8, 128  # rows


def grouped_matmul(
    rows: jax.Array, weights: jax.Array, sizes: jax.Array, *, implementation: str = "auto"
) -> jax.Array:
    """rows[i] @ weights[g] for every row i of group g.

    A group's weights are read once for each tile of its rows, and not at all if it has none.

    Args:
      rows: [R, D]; those of group 0, then those of group 1, and so on.
      weights: [E, D, F].
      sizes: int32 [E]; rows of each group, together at most R.
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
    if implementation == "tiles":
        return _in_tiles(rows, weights, sizes)
    if implementation == "ragged_dot":
        return _ragged_dot(rows, weights, sizes)
    return jax.lax.platform_dependent(rows, weights, sizes, cpu=_in_tiles, default=_ragged_dot)


def _ragged_dot(rows, weights, sizes):
    product = jax.lax.ragged_dot(rows, weights, sizes)
    # What stands behind the last group is not defined everywhere.
    inside = jnp.arange(len(rows)) < sizes.sum()
    return jnp.where(inside[:, None], product, 0)


def _in_tiles(rows, weights, sizes):
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
        return jax.lax.cond(is_used, lambda: rows[indices] @ weights[group], lambda: empty)

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
