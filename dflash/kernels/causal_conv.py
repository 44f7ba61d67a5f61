"""Causal depthwise convolution over the last rows of a chain, a tree or packed documents."""

import jax
import jax.numpy as jnp

from dflash.kernels.gated_delta import along


def causal_conv(
    rows: jax.Array,
    before: jax.Array,
    weights: jax.Array,
    *,
    ancestry: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
) -> jax.Array:
    """Convolves each row with itself and the W - 1 rows that it follows.

    Args:
      rows: [B, T, C].
      before: [B, W - 1, C]; rows before the first one, the latest last.
      weights: [C, W]; the last column belongs to the row itself.
      ancestry: bool [B, T, T]; see `gated_delta.solve_block`. None is a chain.
      segment_ids: int32 [B, T]; a row of a chain follows rows with its own id only. None for all.
    Returns:
      float32 [B, T, C].
    """
    width, length = weights.shape[1], rows.shape[1]
    everything = jnp.concatenate([before, rows.astype(before.dtype)], axis=1)
    total = jnp.zeros(rows.shape, jnp.float32)
    for back in range(width):
        first = width - 1 - back
        if ancestry is None or back == 0:
            earlier = everything[:, first : first + length]
        else:
            earlier = along(ancestors(ancestry, back, width - 1), everything)
        if segment_ids is not None and back:
            shifted = jnp.pad(segment_ids, ((0, 0), (back, 0)), constant_values=-1)[:, :length]
            earlier = jnp.where((shifted == segment_ids)[..., None], earlier, 0)
        total += earlier.astype(jnp.float32) * weights[:, first].astype(jnp.float32)
    return total


def last_rows(
    before: jax.Array, rows: jax.Array, count: jax.Array, path: jax.Array | None = None
) -> jax.Array:
    """Returns the W - 1 rows that the next row follows, after the accepted rows of a block.

    Args:
      before: [B, W - 1, C]; rows before the block.
      rows: [B, T, C]; rows of the block.
      count: int32 [B]; number of accepted rows.
      path: int32 [B, R]; row of the block at each depth of the accepted path. None is a chain.
    """
    if path is not None:
        rows = along(path, rows)
    everything = jnp.concatenate([before, rows.astype(before.dtype)], axis=1)
    return along(count[:, None] + jnp.arange(before.shape[1]), everything)


def ancestors(ancestry: jax.Array, back: int, width: int) -> jax.Array:
    """Returns the ancestor `back` generations up of each row, int32 [B, T].

    Indices count from the first of the `width` rows before the block, which precede its root.
    """
    depth = ancestry.sum(axis=-1, dtype=jnp.int32) - 1
    at_depth = depth[:, None, :] == depth[:, :, None] - back
    among = width + jnp.argmax(ancestry & at_depth, axis=-1).astype(jnp.int32)
    return jnp.where(depth >= back, among, width + depth - back)
