"""Rows that are sorted into groups, each group times a matrix of its own: experts."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from dflash.kernels import flash_tpu
from dflash.kernels import grouped_matmul_tpu as tpu
from dflash.kernels import implementation as implementations
from dflash.kernels import quantized as quantized

IMPLEMENTATIONS = ("auto", "tiles", "ragged_dot", "pallas", "interpret")

_SMALLEST_TILE, _LARGEST_TILE = 8, 128  # rows


def grouped_matmul(
    rows: jax.Array,
    weights: jax.Array,
    sizes: jax.Array,
    scales: jax.Array | None = None,
    *,
    block: tuple[int, int] | None = None,
    read: float = 1.0,
    implementation: str = "auto",
) -> jax.Array:
    """rows[i] @ weights[g] for every row i of group g.

    A group's weights are read once for each tile of its rows, and not at all if it has none.

    Args:
      rows: [R, D]; those of group 0, then those of group 1, and so on.
      weights: [E, D, F].
      sizes: int32 [E]; rows of each group, together at most R.
      scales: float32 [E, 1, F], or a scale a block, for weights in eight bits; see `quantized`.
      block: inputs and outputs of a block; None: all inputs of one output.
      read: share of the weights that is expected to be read, for the compiler to plan by.
      implementation: "tiles": plain JAX, one product for each tile of rows. "ragged_dot":
        `jax.lax.ragged_dot`, which a CPU computes with all weights for all rows. "pallas", and
        "interpret" to play it on a CPU: a kernel for TPUs. "auto": tiles on a CPU; on a TPU the
        kernel, where it covers the case; ragged_dot elsewhere.
    Returns:
      [R, F]; zeros for the rows behind the last group.
    Raises:
      ValueError: shapes that do not fit each other, an unknown implementation, or one that does not
        cover the case.
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation {implementation!r} is not one of {IMPLEMENTATIONS}")
    if rows.ndim != 2 or weights.ndim != 3 or rows.shape[1] != weights.shape[1]:
        raise ValueError(f"rows {rows.shape} do not fit weights {weights.shape}")
    if sizes.shape != weights.shape[:1]:
        raise ValueError(f"sizes {sizes.shape} of {weights.shape[0]} groups")
    arrays = (rows, weights, sizes) if scales is None else (rows, weights, sizes, scales)
    tiles, ragged = (functools.partial(one, block=block) for one in (_in_tiles, _ragged_dot))
    kernel = functools.partial(_by_kernel, block, read)
    if implementation == "tiles":
        return tiles(*arrays)
    if implementation == "ragged_dot":
        return ragged(*arrays)
    uncovered = tpu.unsupported(rows, weights, block)
    if implementation == "auto":
        on_tpu = ragged if uncovered else functools.partial(kernel, False)
        return jax.lax.platform_dependent(*arrays, cpu=tiles, tpu=on_tpu, default=ragged)
    if uncovered:
        raise ValueError(f"{uncovered}; use implementation='ragged_dot'")
    played = implementations.interpret_params() if implementation == "interpret" else False
    return kernel(played, *arrays)


def for_platform(platform: str) -> str:
    """The implementation for programs that run on one known platform; see `implementation`."""
    return {"cpu": "tiles", "tpu": "auto"}.get(platform, "ragged_dot")


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
    spread = quantized.spread(scales, weights.shape, block)
    return (weights.astype(jnp.float32) * spread).astype(dtype)


@dataclasses.dataclass(frozen=True)
class _Tiles:
    """Rows of one group after another, cut into tiles of one size and one group each.

    The last rows of a group's last tile may be others', and are left out of what comes out.

    Attributes:
      begin: int32 [N]; the first row of each tile.
      size: rows of a tile.
      group: int32 [N]; of each tile; of those not in use, the last one's.
      end: int32 [N]; the row behind the last one of its group.
      used: int32 []; tiles in use.
      place: int32 [rows]; where a row lies among the rows of all tiles.
      inside: bool [rows]; whether it belongs to a group.
    """

    begin: jax.Array
    size: int
    group: jax.Array
    end: jax.Array
    used: jax.Array
    place: jax.Array
    inside: jax.Array

    def of(self, rows: jax.Array, begin: jax.Array) -> jax.Array:
        """[..., R, D]: the tiles that begin there, of rows [rows, D]."""
        return rows[jnp.minimum(begin[..., None] + jnp.arange(self.size), len(rows) - 1)]


def _cut(count: int, sizes: jax.Array, tile: int) -> _Tiles:
    """Tiles of `tile` rows, of `count` rows in groups of these sizes [E]."""
    groups = len(sizes)
    num_tiles = count // tile + min(groups, count)
    tiles_of = -(-sizes // tile)  # [E]
    ends, last_rows = jnp.cumsum(tiles_of), jnp.cumsum(sizes)
    first_row, first_tile = last_rows - sizes, ends - tiles_of
    index = jnp.arange(num_tiles)
    filled = jnp.minimum(index, jnp.maximum(ends[-1] - 1, 0))
    group = jnp.minimum(jnp.searchsorted(ends, filled, side="right"), groups - 1)
    begin = first_row[group] + (index - first_tile[group]) * tile
    row = jnp.arange(count)
    own = jnp.minimum(jnp.searchsorted(last_rows, row, side="right"), groups - 1)
    within = row - first_row[own]
    place = (first_tile[own] + within // tile) * tile + within % tile
    place = jnp.minimum(place, num_tiles * tile - 1)
    inside = row < last_rows[-1]
    return _Tiles(begin, tile, group.astype(jnp.int32), last_rows[group], ends[-1], place, inside)


def _in_tiles(rows, weights, sizes, scales=None, *, block):
    """What comes out for a row does not depend on the rows beside it: products have one shape."""
    tiles = _cut(len(rows), sizes, _tile_rows(len(rows), len(sizes)))

    def product(one):
        group, begin, is_used = one
        empty = jnp.zeros((tiles.size, weights.shape[2]), rows.dtype)
        own = None if scales is None else scales[group]
        return jax.lax.cond(
            is_used,
            lambda: tiles.of(rows, begin) @ _plain(weights[group], own, block, rows.dtype),
            lambda: empty,
        )

    is_used = jnp.arange(len(tiles.group)) < tiles.used
    return _by_row(jax.lax.map(product, (tiles.group, tiles.begin, is_used)), tiles)


def _by_row(products, tiles: _Tiles):
    """Products [N, R, F] of all tiles -> [rows, F]."""
    flat = products.reshape(-1, products.shape[-1])
    return jnp.where(tiles.inside[:, None], flat[tiles.place], 0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _by_kernel(block, read, interpret, rows, weights, sizes, scales=None):
    """The kernel; its gradients are those of ragged_dot."""
    tile = max(_tile_rows(len(rows), len(sizes)), flash_tpu.row_tile(rows.dtype))
    tiles = _cut(len(rows), sizes, tile)
    of_kernel = tpu.Tiles(tile, tiles.group, tiles.begin, tiles.end, tiles.used)
    is_few = tpu.few(rows)
    products = tpu.grouped_matmul_tpu(
        rows if is_few else tiles.of(rows, tiles.begin), weights, of_kernel, scales,
        block=block, read=read, interpret=interpret,
    )  # fmt: skip
    return jnp.where(tiles.inside[:, None], products, 0) if is_few else _by_row(products, tiles)


def _kernel_forward(block, read, interpret, *arrays):
    return _by_kernel(block, read, interpret, *arrays), arrays


def _kernel_backward(block, read, interpret, arrays, gradient):
    _, pull_back = jax.vjp(functools.partial(_ragged_dot, block=block), *arrays)
    return pull_back(gradient)


_by_kernel.defvjp(_kernel_forward, _kernel_backward)


def _tile_rows(count: int, groups: int) -> int:
    """Rows of a tile: about those of a group, as a power of two."""
    mean = max(1, count // groups)
    return min(max(1 << (mean - 1).bit_length(), _SMALLEST_TILE), _LARGEST_TILE)
