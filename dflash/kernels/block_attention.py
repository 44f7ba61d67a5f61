"""Block attention: a draft block against a static context, and against itself in both directions.

A causal paged kernel cannot serve this: every row of the block sees every other one.
"""

import functools

import jax
import jax.numpy as jnp

from dflash.kernels import block_attention_tpu as tpu
from dflash.kernels import implementation as implementations
from dflash.kernels import online_softmax, tuning

# Keys per step of the loop over the context; see paged_attention.TILE_TOKENS.
TILE_TOKENS = 256


def block_attention(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    context_keys: jax.Array,
    context_values: jax.Array,
    length: jax.Array,
    sinks: jax.Array | None = None,
    *,
    scale: float,
    window: int | None = None,
    causal: bool = False,
    implementation: str = "auto",
    sizes: tuning.BlockSizes | None = None,
) -> jax.Array:
    """Attends from a block of T rows over its context and itself.

    The block is anchored at position `length[b]`: context key p is visible to all of its rows iff
    p < length[b], and p >= length[b] - window where a window is set.

    Args:
      queries: [B, T, N, H].
      keys: [B, T, K, H]; N is a multiple of K.
      values: [B, T, K, H].
      context_keys: [B, K, L, H]; rows at and past `length` are never looked at.
      context_values: [B, K, L, H].
      length: int32 [B]; context rows in use.
      sinks: [N]; a score of each head's own that joins every row's sum, without a value; or None.
      scale: factor on the scores.
      window: context positions before the anchor that remain visible; None for all.
      causal: row r sees the block's rows up to r only.
      implementation: see `implementation.run`.
      sizes: of the kernel's blocks; None for the tuned ones.
    Returns:
      [B, T, N, H] in the dtype of `queries`.
    Raises:
      ValueError: shapes that do not fit each other, or do not fit VMEM; the message names them.
    """
    arrays = (queries, keys, values, context_keys, context_values, length)
    _check(*arrays)
    if sinks is not None:
        if sinks.shape != queries.shape[2:3]:
            raise ValueError(f"block_attention: sinks {sinks.shape} of {queries.shape[2]} heads")
        arrays = (*arrays, sinks)
    view = {"scale": scale, "window": window, "causal": causal}
    sizes = sizes or tuning.BLOCK_ATTENTION.get(queries.shape[-1])
    return implementations.run(
        implementation,
        *arrays,
        reference=functools.partial(_reference, **view),
        pallas=functools.partial(tpu.block_attention_tpu, **view, sizes=sizes),
        unsupported=tpu.unsupported(queries, context_keys),
    )


def _reference(
    queries, keys, values, context_keys, context_values, length, sinks=None,
    *, scale, window, causal,
):  # fmt: skip
    block = queries.shape[1]
    inside = jnp.ones((1, block, block), bool)
    inside = jnp.tril(inside) if causal else inside
    return _attend(
        queries, keys, values, inside, context_keys, context_values, length, scale, window, sinks
    )


def branch_attention(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    visible: jax.Array,
    context_keys: jax.Array,
    context_values: jax.Array,
    length: jax.Array,
    *,
    scale: float,
) -> jax.Array:
    """Attends from T rows over a context, and over those of S drafted rows that each one may see.

    Args:
      queries: [B, T, N, H].
      keys: [B, S, K, H]; N is a multiple of K.
      values: [B, S, K, H].
      visible: bool [B, T, S]; every row sees one at least.
      context_keys: [B, K, L, H]; rows at and past `length` are never looked at.
      context_values: [B, K, L, H].
      length: int32 [B]; context rows in use.
      scale: factor on the scores.
    Returns:
      [B, T, N, H] in the dtype of `queries`.
    Raises:
      ValueError: shapes that do not fit each other; the message names them.
    """
    batch, rows, _, _ = queries.shape
    drafted = keys.shape[1]
    arrays = (queries, keys, values, context_keys, context_values, length)
    _check(*arrays, drafted=drafted, op="branch_attention")
    if visible.shape != (batch, rows, drafted):
        raise ValueError(
            f"branch_attention: visible is {visible.shape}, expected {(batch, rows, drafted)}"
        )
    return _attend(
        queries, keys, values, visible, context_keys, context_values, length, scale, None
    )


def _attend(
    queries, keys, values, visible_rows, context_keys, context_values, length, scale, window,
    sinks=None,
):  # fmt: skip
    """Both of the above: over the rows that bool [B or 1, T, S] shows, and over the context."""
    block, kv_heads = queries.shape[1], keys.shape[2]
    rows = online_softmax.group_queries(queries, kv_heads)
    partial = online_softmax.attend(
        rows,
        keys.transpose(2, 0, 1, 3),
        values.transpose(2, 0, 1, 3),
        jnp.repeat(visible_rows, queries.shape[2] // kv_heads, axis=1),
        scale=scale,
    )

    capacity = context_keys.shape[2]
    tile = min(TILE_TOKENS, capacity)
    first_visible = jnp.zeros_like(length) if window is None else jnp.maximum(length - window, 0)

    def fold_in_tile(i, partial):
        # The last tile may reach past the capacity; dynamic_slice then starts earlier, so the
        # positions are counted from where it really starts and those of earlier tiles left out.
        begin = jnp.minimum(i * tile, capacity - tile)
        positions = begin + jnp.arange(tile)
        visible = (positions < length[:, None]) & (positions >= first_visible[:, None])
        visible &= positions >= i * tile
        seen = online_softmax.attend(
            rows,
            jax.lax.dynamic_slice_in_dim(context_keys, begin, tile, axis=2).swapaxes(0, 1),
            jax.lax.dynamic_slice_in_dim(context_values, begin, tile, axis=2).swapaxes(0, 1),
            visible[:, None, :],
            scale=scale,
        )
        return online_softmax.merge(partial, seen)

    first_tile = first_visible.min() // tile
    end_tile = (length.max() + tile - 1) // tile
    partial = jax.lax.fori_loop(first_tile, end_tile, fold_in_tile, partial)
    if sinks is not None:
        partial = online_softmax.with_sinks(partial, sinks)
    return online_softmax.ungroup(online_softmax.normalise(partial, queries.dtype), block)


def _check(
    queries,
    keys,
    values,
    context_keys,
    context_values,
    length,
    *,
    drafted=None,
    op="block_attention",
):
    batch, block, heads, width = queries.shape
    block = block if drafted is None else drafted
    kv_heads = keys.shape[2]
    expected = {
        "keys": (keys, (batch, block, kv_heads, width)),
        "values": (values, (batch, block, kv_heads, width)),
        "context_keys": (context_keys, (batch, kv_heads, context_keys.shape[2], width)),
        "context_values": (context_values, context_keys.shape),
        "length": (length, (batch,)),
    }
    for name, (array, shape) in expected.items():
        if array.shape != shape:
            raise ValueError(f"{op}: {name} is {array.shape}, expected {shape}")
    if heads % kv_heads:
        raise ValueError(f"{op}: {heads} query heads, expected a multiple of {kv_heads} kv heads")
