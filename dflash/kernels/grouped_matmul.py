"""Grouped matrix product: rows sorted by group, each group with its own weights, for experts."""

import functools

import jax
import jax.numpy as jnp

from dflash.kernels import flash_tpu, quantized
from dflash.kernels import grouped_matmul_tpu as tpu
from dflash.kernels import implementation as implementations

IMPLEMENTATIONS = ("auto", "tiles", "ragged_dot", "pallas", "interpret")

# Limits of the rows per tile.
_SMALLEST_TILE, _LARGEST_TILE = 8, 128


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
    """Computes rows[i] @ weights[g] for every row i of group g.

    A group's weights are read once per tile of its rows, and not at all if it has no rows.

    Args:
      rows: [R, D]; sorted by group.
      weights: [E, D, F].
      sizes: int32 [E]; number of rows of each group, at most R in total.
      scales: Scales of 8-bit weights: float32 [E, 1, F], or one per block; see `quantized`.
      block: Inputs and outputs per scale; None for one scale per output.
      read: Fraction of the weights that is expected to be read, for the cost estimate.
      implementation: "tiles" is plain JAX, with one product per tile of rows. "ragged_dot" is
        `jax.lax.ragged_dot`, which a CPU computes with all weights for all rows. "pallas" is a
        kernel for TPUs, and "interpret" runs it in the interpreter. "auto" is tiles on a CPU, the
        kernel on a TPU if it supports the case, and ragged_dot elsewhere.
    Returns:
      [R, F]; zeros for rows past the last group.
    Raises:
      ValueError: Shapes are inconsistent, or the implementation is unknown or does not support the
        case.
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation {implementation!r} is not one of {IMPLEMENTATIONS}")
    if rows.ndim != 2 or weights.ndim != 3 or rows.shape[1] != weights.shape[1]:
        raise ValueError(f"grouped_matmul: rows {rows.shape} do not fit weights {weights.shape}")
    if sizes.shape != weights.shape[:1]:
        raise ValueError(f"grouped_matmul: sizes is {sizes.shape}, expected {weights.shape[:1]}")
    arrays = (rows, weights, sizes) if scales is None else (rows, weights, sizes, scales)
    tiles, ragged = (
        functools.partial(product, block=block) for product in (_in_tiles, _ragged_dot)
    )
    kernel = functools.partial(_by_kernel, block, read)
    if implementation == "tiles":
        return tiles(*arrays)
    if implementation == "ragged_dot":
        return ragged(*arrays)
    unsupported = tpu.unsupported(rows, weights, block)
    if implementation == "auto":
        on_tpu = ragged if unsupported else functools.partial(kernel, False)
        return jax.lax.platform_dependent(*arrays, cpu=tiles, tpu=on_tpu, default=ragged)
    if unsupported:
        raise ValueError(f"{unsupported}; use implementation='ragged_dot'")
    interpret = implementations.interpret_params() if implementation == "interpret" else False
    return kernel(interpret, *arrays)


def for_platform(platform: str) -> str:
    """Returns the implementation for programs that run on a known platform."""
    return {"cpu": "tiles", "tpu": "auto"}.get(platform, "ragged_dot")


def _ragged_dot(rows, weights, sizes, scales=None, *, block):
    """Computes `grouped_matmul` by `jax.lax.ragged_dot`.

    Block scales are applied to the weights before the product, scales per output to its result.
    """
    if scales is not None and block is not None:
        weights, scales = _plain(weights, scales, block, rows.dtype), None
    product = jax.lax.ragged_dot(
        rows, weights.astype(rows.dtype), sizes, preferred_element_type=jnp.float32
    )
    row, ends = jnp.arange(len(rows)), jnp.cumsum(sizes)
    if scales is not None:
        group = jnp.minimum(jnp.searchsorted(ends, row, side="right"), len(sizes) - 1)
        product *= scales[group, 0]
    # Rows past the last group are undefined on some platforms.
    return jnp.where((row < ends[-1])[:, None], product, 0).astype(rows.dtype)


def _plain(weights, scales, block, dtype):
    """Returns weights with their scales, if any, applied."""
    if scales is None:
        return weights
    spread = quantized.spread(scales, weights.shape, block)
    return (weights.astype(jnp.float32) * spread).astype(dtype)


def _cut(count: int, sizes: jax.Array, tile: int) -> tpu.Tiles:
    """Divides `count` rows, in groups of sizes [E], into tiles of `tile` rows."""
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
    row_group = jnp.minimum(jnp.searchsorted(last_rows, row, side="right"), groups - 1)
    within = row - first_row[row_group]
    place = (first_tile[row_group] + within // tile) * tile + within % tile
    place = jnp.minimum(place, num_tiles * tile - 1)
    inside = row < last_rows[-1]
    return tpu.Tiles(
        begin, tile, group.astype(jnp.int32), last_rows[group], ends[-1], place, inside
    )


def _in_tiles(rows, weights, sizes, scales=None, *, block):
    """Computes `grouped_matmul` tile by tile.

    All products have the same shape, so the result of a row does not depend on other rows.
    """
    tiles = _cut(len(rows), sizes, _tile_rows(len(rows), len(sizes)))

    def product(tile):
        group, begin, is_used = tile
        zeros = jnp.zeros((tiles.size, weights.shape[2]), rows.dtype)
        tile_scales = None if scales is None else scales[group]
        return jax.lax.cond(
            is_used,
            lambda: (
                tiles.gather(rows, begin) @ _plain(weights[group], tile_scales, block, rows.dtype)
            ),
            lambda: zeros,
        )

    is_used = jnp.arange(len(tiles.group)) < tiles.num_used
    return _by_row(jax.lax.map(product, (tiles.group, tiles.begin, is_used)), tiles)


def _by_row(products, tiles: tpu.Tiles):
    """Gathers the products [N, R, F] of all tiles to rows [rows, F]."""
    flat = products.reshape(-1, products.shape[-1])
    return jnp.where(tiles.inside[:, None], flat[tiles.place], 0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _by_kernel(block, read, interpret, rows, weights, sizes, scales=None):
    """Computes `grouped_matmul` by the kernel, with the gradients of ragged_dot."""
    tile = max(_tile_rows(len(rows), len(sizes)), flash_tpu.row_tile(rows.dtype))
    tiles = _cut(len(rows), sizes, tile)
    in_vmem = tpu.fits_vmem(rows)
    products = tpu.grouped_matmul_tpu(
        rows if in_vmem else tiles.gather(rows, tiles.begin), weights, tiles, scales,
        block=block, read=read, interpret=interpret,
    )  # fmt: skip
    return jnp.where(tiles.inside[:, None], products, 0) if in_vmem else _by_row(products, tiles)


def _kernel_forward(block, read, interpret, *arrays):
    return _by_kernel(block, read, interpret, *arrays), arrays


def _kernel_backward(block, read, interpret, arrays, gradient):
    _, pull_back = jax.vjp(functools.partial(_ragged_dot, block=block), *arrays)
    return pull_back(gradient)


_by_kernel.defvjp(_kernel_forward, _kernel_backward)


def _tile_rows(count: int, groups: int) -> int:
    """Returns the rows per tile: the mean group size, rounded up to a power of two."""
    mean = max(1, count // groups)
    return min(max(1 << (mean - 1).bit_length(), _SMALLEST_TILE), _LARGEST_TILE)
