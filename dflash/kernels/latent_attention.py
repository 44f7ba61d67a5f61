"""Paged attention where one latent row is kept of a position, for all heads, as key and as value.

What `paged_attention` does for new rows, trees and pages of eight bits holds here too.

Source: DeepSeek-V2, arXiv 2405.04434, section 2.1.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from dflash.kernels import online_softmax, quantised
from dflash.kernels.paged_attention import fold_in_context, read_pages, row_index, write_rows
from dflash.kernels.quantised import Quantised, Rows


def latent_attention(
    queries: jax.Array,
    latents: jax.Array,
    pages: Rows,
    page_table: jax.Array,
    start: jax.Array,
    tree_mask: jax.Array | None = None,
    *,
    expand: Callable[[Rows], tuple[Rows, Rows]],
    scale: float,
) -> tuple[jax.Array, Rows]:
    """Appends T rows to each sequence's cache and attends over context and new rows.

    Args:
      queries: [B, T, N, H].
      latents: [B, T, W]; what is to be kept of each new row.
      pages: [1, P, S, W]; plain, or `Quantised`.
      page_table: int32 [B, M].
      start: int32 [B]; positions in use before this call.
      tree_mask: bool [B, T, T] or None; see `paged_attention`.
      expand: rows [1, B, S, W], as they are stored -> their keys [K, B, S, H] and values
        [K, B, S, V]; N is a multiple of K. With K = 1 they are hardly more than the rows.
      scale: factor on the scores.
    Returns:
      outputs [B, T, N, V] in the dtype of `queries`, and the pages.
    Raises:
      ValueError: shapes that do not fit each other; the message names them.
    """
    _check(queries, latents, pages, page_table, start, tree_mask)
    length = queries.shape[1]
    index = row_index(page_table, start[:, None] + jnp.arange(length), pages.shape[2])
    new = quantised.encode(latents[None], pages)  # [1, B, T, W]
    pages = write_rows(pages, index, new)

    def attend(kept, visible):
        keys, values = expand(kept)
        rows = online_softmax.group_queries(queries, keys.shape[0])
        return online_softmax.attend(rows, keys, values, visible, scale=scale)

    if tree_mask is None:
        tree_mask = jnp.tril(jnp.ones((1, length, length), bool))
    group = queries.shape[2] // jax.eval_shape(expand, new)[0].shape[0]
    partial = attend(new, jnp.repeat(tree_mask, group, axis=1))
    partial = fold_in_context(
        partial,
        lambda index, visible: attend(read_pages(pages, index), visible),
        page_table,
        start,
        pages.shape[2],
    )
    outputs = online_softmax.normalise(partial, queries.dtype)
    return online_softmax.ungroup(outputs, length), pages


def _check(queries, latents, pages, page_table, start, tree_mask):
    batch, length = queries.shape[:2]
    width = pages.shape[-1]
    expected = {
        "latents": (latents, (batch, length, width)),
        "pages": (pages, (1, *pages.shape[1:3], width)),
        "page_table": (page_table, (batch, page_table.shape[-1])),
        "start": (start, (batch,)),
    }
    if tree_mask is not None:
        expected["tree_mask"] = (tree_mask, (batch, length, length))
    if isinstance(pages, Quantised):
        expected["pages.scales"] = (pages.scales, (*pages.shape[:2], 1, pages.shape[2]))
    for name, (array, shape) in expected.items():
        if array.shape != shape:
            raise ValueError(f"latent_attention: {name} is {array.shape}, expected {shape}")
