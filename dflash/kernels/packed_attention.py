"""Paged attention over packed rows: different numbers of new rows per sequence.

Only the kernel attends to packed rows as they are. Elsewhere rows are padded, so that all sequences
have the same number, and packed again.
"""

import functools

import jax

from dflash.kernels import implementation as implementations
from dflash.kernels import packed_attention_tpu as tpu
from dflash.kernels import tuning
from dflash.kernels.packing import Packing
from dflash.kernels.paged_attention import paged_attention
from dflash.kernels.quantized import Rows


def packed_attention(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    key_pages: Rows,
    value_pages: Rows,
    page_table: jax.Array,
    start: jax.Array,
    packing: Packing,
    tree_mask: jax.Array | None = None,
    sinks: jax.Array | None = None,
    *,
    scale: float,
    window: int | None = None,
    implementation: str = "auto",
    sizes: tuning.BlockSizes | None = None,
) -> tuple[jax.Array, Rows, Rows]:
    """Computes `paged_attention` over packed rows.

    The padding of a sequence is stored after its rows, with arbitrary keys and values.

    Args:
      queries: [D, N, heads, H].
      keys: [D, N, K, H]; the number of heads is a multiple of K.
      values: [D, N, K, H].
      key_pages: Pages of keys; see `paged_attention`.
      page_table: int32 [B, M].
      start: int32 [B]; cached positions before this call.
      packing: Packing of up to T rows of B sequences into N for each of D replicas.
      tree_mask: bool [B, T, T]; new rows that each new row sees. None is causal.
      sinks: [heads]; attention sinks, or None.
      scale: Factor that multiplies the scores.
      window: Positions up to its own that a row sees; None for all.
      implementation: Implementation to run; see `implementation.run`.
      sizes: Tile sizes of the kernel; None for the tuned ones.
    Returns:
      Outputs [D, N, heads, H] in the dtype of `queries`, key_pages, value_pages. Outputs of rows
      past the last sequence's are arbitrary.
    Raises:
      ValueError: Shapes are inconsistent; the message names the array.
    """
    arrays = (queries, keys, values, key_pages, value_pages, page_table, start)
    view = {"scale": scale, "window": window}
    chosen = sizes or tuning.PAGED_ATTENTION.get(queries.shape[-1])
    shapes = queries, packing, key_pages, page_table, tree_mask, window, sinks is not None
    unsupported = tpu.unsupported(*shapes, sizes=chosen)

    def padded(*arrays, implementation):
        *rows, key_pages, value_pages, page_table, start, packing, tree_mask, sinks = arrays

        def attend(*rows):
            fixed = key_pages, value_pages, page_table, start, tree_mask, sinks
            options = view | {"implementation": implementation, "sizes": sizes}
            attended, *pages = paged_attention(*rows, *fixed, **options)
            return attended, pages

        attended, pages = packing.around(attend)(*rows)
        return attended, *pages

    return implementations.run(
        implementation,
        *arrays,
        packing,
        tree_mask,
        sinks,
        reference=functools.partial(
            padded, implementation=implementation if unsupported else "reference"
        ),
        pallas=functools.partial(tpu.packed_attention_tpu, **view, sizes=chosen),
        unsupported=unsupported,
        cpu=functools.partial(padded, implementation="cpu"),
    )
