"""Paged latent attention: one cached row per position is the key and value of all heads.

New rows, trees and quantized pages are handled as in `paged_attention`.

Source: DeepSeek-V2, arXiv 2405.04434, section 2.1.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from dflash.kernels import implementation as implementations
from dflash.kernels import latent_attention_tpu as tpu
from dflash.kernels import online_softmax, quantized, tuning
from dflash.kernels.paged_attention import fold_in_context, read_pages, row_index, write_rows
from dflash.kernels.quantized import Quantized, Rows


def latent_attention(
    queries: jax.Array,
    latents: jax.Array,
    pages: Rows,
    page_table: jax.Array,
    start: jax.Array,
    tree_mask: jax.Array | None = None,
    *,
    value_width: int,
    scale: float,
    implementation: str = "auto",
    sizes: tuning.LatentSizes = tuning.LATENT_ATTENTION,
) -> tuple[jax.Array, Rows]:
    """Appends T latent rows to each sequence's cache and attends to context and new rows.

    Args:
      queries: [B, T, N, W]; every head sees the same keys.
      latents: [B, T, W]; cache rows of the new positions. A row is a key, and its first V elements
        are the value.
      pages: [1, P, S, W]; plain, or `Quantized`.
      page_table: int32 [B, M].
      start: int32 [B]; cached positions before this call.
      tree_mask: bool [B, T, T]; new rows that each new row sees. None is causal.
      value_width: Elements of a value, V.
    Returns:
      Outputs [B, T, N, V] in the dtype of `queries`, and the pages.
    Raises:
      ValueError: Shapes are inconsistent or exceed VMEM; the message names the array.
    """
    _check(queries, latents, pages, page_table, start, tree_mask)
    if queries.shape[-1] != pages.shape[-1]:
        raise ValueError(
            f"latent_attention: queries {queries.shape} do not fit pages {pages.shape}"
        )
    new = quantized.encode(latents[None], pages)  # [1, B, T, W]

    def keys_and_values(rows):
        return rows, quantized.leading(rows, value_width)

    return implementations.run(
        implementation,
        queries,
        new,
        pages,
        page_table,
        start,
        tree_mask,
        reference=functools.partial(_reference, expand=keys_and_values, scale=scale),
        pallas=functools.partial(
            tpu.latent_attention_tpu, value_width=value_width, scale=scale, sizes=sizes
        ),
        unsupported=tpu.unsupported(queries, pages, value_width),
    )


def expanded_attention(
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
    """Computes latent attention with keys and values that are expanded from the cached rows.

    The other arguments are those of `latent_attention`.

    Args:
      queries: [B, T, N, H].
      expand: Function from stored rows [1, B, S, W] to keys [K, B, S, H] and values [K, B, S, V]; N
        is a multiple of K.
    Returns:
      Outputs [B, T, N, V] in the dtype of `queries`, and the pages.
    Raises:
      ValueError: Shapes are inconsistent; the message names the array.
    """
    _check(queries, latents, pages, page_table, start, tree_mask)
    new = quantized.encode(latents[None], pages)
    arrays = (queries, new, pages, page_table, start, tree_mask)
    return _reference(*arrays, expand=expand, scale=scale)


def _reference(queries, new, pages, page_table, start, tree_mask, *, expand, scale):
    """Computes `expanded_attention` with new rows [1, B, T, W] in their stored form."""
    length = queries.shape[1]
    index = row_index(page_table, start[:, None] + jnp.arange(length), pages.shape[2])
    pages = write_rows(pages, index, new)

    def attend(latents, visible):
        keys, values = expand(latents)
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
    outputs = online_softmax.normalize(partial, queries.dtype)
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
    if isinstance(pages, Quantized):
        expected["pages.scales"] = (pages.scales, (*pages.shape[:2], 1, pages.shape[2]))
    implementations.check_shapes(tpu.OP, expected)
