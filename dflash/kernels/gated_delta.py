"""Gated delta rule: linear attention over a state of fixed size, for chains and trees of rows.

A value head keeps a state S [dk, dv], in float32. A row with query q, key k, value v, decay e^g and
rate beta updates and reads it:

    S ← e^g S;   u = beta (v - Sᵀ k);   S ← S + k uᵀ;   o = Sᵀ q

A block of rows is computed at once: its corrections u solve a triangular system, in which a row
depends on its ancestors. The state after any row follows from S and the u, k and g on the path to
this row, so a verified block leaves the state alone until the accepted path is known, and rejected
rows need neither a copy of the state nor a second pass.

Source: Yang et al. 2024, arXiv 2412.06464; the system of a tree is that of a chain with the
ancestors of each row in place of all earlier rows.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

BLOCK = 64  # Rows per block of a longer chain.
# Log decay after which nothing of the state is left: exp of it is 0 in float32, but its sums and
# its products with 0 are finite.
FORGET = -1e4

# The state accumulates over thousands of rows, so no product may round to bfloat16.
_einsum = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


class Block(NamedTuple):
    """Updates of the state by T rows, for `advance`.

    Attributes:
      keys: float32 [B, T, K · dk].
      updates: float32 [B, T, V · dv]; the correction u of each row.
      log_decay: float32 [B, T, V]; g of each row, at most 0.
    """

    keys: jax.Array
    updates: jax.Array
    log_decay: jax.Array


def solve_block(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    state: jax.Array,
    ancestry: jax.Array | None = None,
) -> tuple[jax.Array, Block]:
    """Computes the outputs of a block of rows, without changing the state.

    Args:
      queries: float32 [B, T, K, dk]; value head v reads query and key head v // (V / K).
      keys: float32 [B, T, K, dk].
      values: float32 [B, T, V, dv].
      log_decay: float32 [B, T, V]; g, at most 0. Together with a beta of 0, a g of 0 marks padding.
      beta: float32 [B, T, V], in [0, 1].
      state: float32 [B, V, dk, dv]; state before the block.
      ancestry: bool [B, T, T]; entry [b, r, c]: c is r itself or an ancestor of r, with ancestors
        before their descendants. None is a chain.
    Returns:
      Outputs float32 [B, T, V, dv], and the block.
    Raises:
      ValueError: V is not a multiple of K.
    """
    batch, rows, num_keys, _ = keys.shape
    if values.shape[2] % num_keys:
        raise ValueError(f"{values.shape[2]} value heads for {num_keys} key heads; use a multiple")

    def by_key(x):
        """Reshapes [B, T, V, ...] to [B, K, V / K, T, ...]."""
        return jnp.moveaxis(x.reshape(batch, rows, num_keys, -1, *x.shape[3:]), 1, 3)

    within, from_state = _decays(by_key(log_decay), ancestry)
    # Queries and keys read the state in one product, since reading it takes most of the time.
    readers = jnp.concatenate([keys, queries], axis=1)
    stored = _einsum(
        "btkd,bkrde->bkrte", readers, state.reshape(batch, num_keys, -1, *state.shape[2:])
    )
    stored_keys, stored_queries = jnp.split(stored, 2, axis=3)
    products = _einsum("btkd,bskd->bkts", readers, keys)[:, :, None]
    rates = by_key(beta)[..., None]
    updates = rates * (by_key(values) - from_state * stored_keys)
    if rows > 1:
        system = rates * products[..., :rows, :] * within
        # The solver reads the entries below the diagonal only.
        updates = jax.lax.linalg.triangular_solve(
            system, updates, left_side=True, lower=True, unit_diagonal=True
        )
    outputs = from_state * stored_queries
    outputs += _einsum("bkrts,bkrse->bkrte", products[..., rows:, :] * within, updates)

    def by_row(x):
        return jnp.moveaxis(x, 3, 1).reshape(values.shape)

    block = Block(*(x.reshape(batch, rows, -1) for x in (keys, by_row(updates))), log_decay)
    return by_row(outputs), block


def scan_blocks(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    state: jax.Array,
    block_size: int = BLOCK,
) -> tuple[jax.Array, jax.Array]:
    """Computes a chain of any length block by block; see `solve_block` for the arguments.

    Returns:
      Outputs float32 [B, T, V, dv], and the state after all rows.
    """
    rows = keys.shape[1]
    count = -(-rows // block_size)
    arrays = queries, keys, values, log_decay, beta

    def blocks(x):
        """Reshapes [B, T, ...] to [blocks, B, rows of a block, ...]; zeros are padding."""
        x = jnp.pad(x, ((0, 0), (0, count * block_size - rows), *((0, 0),) * (x.ndim - 2)))
        return jnp.moveaxis(x.reshape(x.shape[0], count, block_size, *x.shape[2:]), 1, 0)

    def step(state, arrays):
        outputs, block = solve_block(*arrays, state)
        return advance(state, block), outputs

    if count == 1:
        state, outputs = step(state, arrays)
        return outputs, state
    state, outputs = jax.lax.scan(step, state, tuple(map(blocks, arrays)))
    outputs = jnp.moveaxis(outputs, 0, 1)
    return outputs.reshape(outputs.shape[0], -1, *outputs.shape[3:])[:, :rows], state


def advance(
    state: jax.Array, block: Block, count: jax.Array | None = None, path: jax.Array | None = None
) -> jax.Array:
    """Returns the state after the accepted rows of a block.

    Args:
      state: float32 [B, V, dk, dv]; state before the block.
      count: int32 [B]; number of accepted rows, 0 to leave the state unchanged. None for all.
      path: int32 [B, R]; row of the block at each depth of the accepted path. None is a chain.
    """
    if path is not None:
        block = Block(*(along(path, rows) for rows in block))
    keys, updates, log_decay = block
    if count is not None:
        accepted = jnp.arange(keys.shape[1]) < count[:, None]
        log_decay = jnp.where(accepted[..., None], log_decay, 0)
        updates = jnp.where(accepted[..., None], updates, 0)
    # Each update decays by the rows after its own; sums from the end lose no digits.
    since = jnp.cumsum(log_decay[:, ::-1], axis=1)[:, ::-1]
    total = since[:, 0]
    after = jnp.concatenate([since[:, 1:], jnp.zeros_like(since[:, :1])], axis=1)
    heads, key_width, value_width = state.shape[1:]
    keys = keys.reshape(*keys.shape[:2], -1, key_width)
    updates = updates.reshape(*keys.shape[:3], heads // keys.shape[2], value_width)
    updates = updates * jnp.exp(after).reshape(*updates.shape[:-1], 1)
    added = _einsum("btkd,btkre->bkrde", keys, updates).reshape(state.shape)
    return jnp.exp(total)[..., None, None] * state + added


def along(path: jax.Array, rows: jax.Array) -> jax.Array:
    """Returns the rows [B, R, ...] on a path int32 [B, R] through rows [B, T, ...]."""
    return jnp.take_along_axis(rows, path.reshape(*path.shape, *(1,) * (rows.ndim - 2)), axis=1)


def _decays(log_decay: jax.Array, ancestry: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Returns the decay from each row to each row, and from the state to each row.

    Differences of cumulative sums would lose digits after a row that forgets almost everything, so
    the decay between two rows is summed over the rows between them.

    Args:
      log_decay: [B, K, V / K, T].
      ancestry: bool [B, T, T], or None for a chain.
    Returns:
      [B, K, V / K, T, T], 0 from rows that are no ancestors and 1 from a row to itself; and
      [B, K, V / K, T, 1].
    """
    rows = log_decay.shape[-1]
    if ancestry is None:
        ancestry = jnp.tril(jnp.ones((1, rows, rows), bool))
    mask = ancestry[:, None, None]
    steps = jnp.where(mask, log_decay[..., None, :], 0)
    later = (ancestry & ~jnp.eye(rows, dtype=bool)).astype(jnp.float32)
    sums = _einsum("bkrim,bmj->bkrij", steps, jnp.broadcast_to(later, (steps.shape[0], rows, rows)))
    return jnp.exp(jnp.where(mask, sums, -jnp.inf)), jnp.exp(steps.sum(axis=-1, keepdims=True))


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
      path: See `advance`.
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
