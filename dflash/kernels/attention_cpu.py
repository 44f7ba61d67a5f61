"""Attention of few rows to a cached context on a CPU, in C++ (attention_cpu.cc).

XLA computes it as a loop over tiles of keys, whose iterations cost more than their arithmetic. A
row's result does not depend on the rows beside it, nor on which of its keys are new.
"""

import jax
import jax.numpy as jnp
import numpy as np

from dflash.kernels import library_cpu

_MAX_ROWS = 64  # Rows per sequence; XLA is faster for many.
_WIDTH_FACTOR = 16  # A head's width is a multiple of this, the floats in the longest vector.


def unsupported(queries: jax.Array, keys: jax.Array) -> str | None:
    """Returns why the kernel cannot attend from queries [B, T, N, H] to these keys; None if it can.

    Args:
      queries: [B, T, N, H].
      keys: Stored keys, an array or `Quantized`.
    """
    if not isinstance(keys, jax.Array) or keys.dtype not in (jnp.float32, jnp.bfloat16):
        return "stored keys are neither float32 nor bfloat16"
    if queries.shape[-1] % _WIDTH_FACTOR:
        return f"a head's width is not a multiple of {_WIDTH_FACTOR}"
    if queries.shape[1] > _MAX_ROWS:
        return f"more than {_MAX_ROWS} rows per sequence"
    return None if library_cpu.is_available() else "there is no C++ compiler"


def attend(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    visible: jax.Array,
    stored_keys: jax.Array,
    stored_values: jax.Array,
    length: jax.Array,
    *,
    scale: float,
    page_table: jax.Array | None = None,
    first_visible: jax.Array | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Attends from T rows to a context, and to the new rows that they see.

    Args:
      queries: [B, T, N, H].
      keys: [B, S, K, H]; keys of new rows.
      values: [B, S, K, H].
      visible: bool [B or 1, T, S]; new rows that each row sees.
      stored_keys: [K, P, L, H], pages of L rows; without `page_table`, [B, K, L, H].
      stored_values: In the shape of `stored_keys`.
      length: int32 [B]; rows of the context.
      page_table: int32 [B, M]; pages of each sequence.
      first_visible: int32 [B, T]; first position of the context that each row sees, may be
        negative. None for 0.
      sinks: [N]; attention sinks of the heads; see `online_softmax.with_sinks`.
    Returns:
      [B, T, N, H] in the dtype of `queries`.
    """
    batch, rows, _, _ = queries.shape
    paged = page_table is not None
    if not paged:
        page_table = jnp.zeros((batch, 1), jnp.int32)
    if first_visible is None:
        first_visible = jnp.zeros((batch, rows), jnp.int32)
    result = jax.ShapeDtypeStruct(queries.shape, jnp.float32)
    call = jax.ffi.ffi_call(library_cpu.ATTENTION, result, vmap_method="sequential")
    attended = call(
        queries.astype(jnp.float32),
        keys.astype(stored_keys.dtype),
        values.astype(stored_values.dtype),
        stored_keys,
        stored_values,
        page_table,
        length.astype(jnp.int32),
        first_visible.astype(jnp.int32),
        visible,
        jnp.zeros(0) if sinks is None else sinks.astype(jnp.float32),
        paged=np.bool_(paged),
        scale=np.float32(scale),
    )
    return attended.astype(queries.dtype)
