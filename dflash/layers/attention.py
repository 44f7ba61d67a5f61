"""Grouped-query attention, shared by targets and drafters.

A target's rows meet their context in pages or, in training, in packed rows; how a drafter's do is
the drafter's: it uses the projections alone.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from dflash.kernels import implementation
from dflash.kernels.causal_attention import causal_attention
from dflash.kernels.paged_attention import paged_attention
from dflash.kernels.quantized import Rows
from dflash.kernels.split_heads import Part, split_heads
from dflash.layers import linear
from dflash.layers.cache import CacheArray, batch_axes
from dflash.layers.linear import Linear, RMSNorm
from dflash.parallel import parameters
from dflash.parallel.sharding import Sharding

# What `project` makes of the rows -> outputs [B, T, N, H], and whatever else the caller wants
# back, such as updated pages. Here: rotated queries [B, T, N, H], rotated keys and values
# [B, T, K, H].
Attend = Callable[..., tuple[jax.Array, Any]]


class Attention(nnx.Module):
    """Query, key, value and output projections, with per-head norms where the family has them."""

    def __init__(
        self,
        width: int,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        eps: float,
        qk_norm: bool,
        output_width: int | None = None,
        takes_context: bool = False,
        has_sinks: bool = False,
        dtype: jnp.dtype,
        sharding: Sharding,
    ):
        """Builds abstract projections.

        Args:
          width: of rows that come in.
          output_width: of those that go out; None: the same.
          takes_context: there are rows of which keys and values are wanted alone.
          has_sinks: every head has a learned score that stands for no row, `attention_sink_bias`.
        """
        build = {"dtype": dtype, "sharding": sharding}
        self.q_proj = Linear(width, num_heads * head_dim, ("embed", "heads"), **build)
        self.k_proj = Linear(width, num_kv_heads * head_dim, ("embed", "kv_heads"), **build)
        self.v_proj = Linear(width, num_kv_heads * head_dim, ("embed", "kv_heads"), **build)
        self.o_proj = Linear(
            num_heads * head_dim, output_width or width, ("heads", "embed"), **build
        )
        self.q_norm = RMSNorm(head_dim, eps, **build) if qk_norm else None
        self.k_norm = RMSNorm(head_dim, eps, **build) if qk_norm else None
        self.attention_sink_bias = (
            parameters.declare((num_heads,), ("heads",), stddev=1.0, **build) if has_sinks else None
        )
        # What each product gives: the columns of "kv_proj" are keys and then values.
        self.products = ("q", "k", "v")
        self.heads_per_kv_head = num_heads // num_kv_heads
        self.num_kv_heads = num_kv_heads
        self.takes_context = takes_context
        self.head_dim = head_dim
        self.sharding = sharding

    @property
    def scale(self) -> float:
        """Factor on attention scores."""
        return self.head_dim**-0.5

    def project(
        self, x: jax.Array, cos_sin: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """[B, T, D] -> rotated queries [B, T, N, H], rotated keys and plain values [B, T, K, H]."""
        return self._heads_of(self.products, x, cos_sin)

    def keys_values(
        self, x: jax.Array, cos_sin: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        """[B, T, D] -> rotated keys and plain values, each [B, T, K, H].

        Raises:
          ValueError: this was not built with `takes_context`.
        """
        if not self.takes_context:
            raise ValueError("keys and values alone: build the attention with takes_context=True")
        return self._heads_of(self.products[1:], x, cos_sin)

    def output(self, attended: jax.Array) -> jax.Array:
        """[B, T, N, H] -> [B, T, D]."""
        return self.o_proj(attended.reshape(*attended.shape[:2], -1))

    def cache_spec(self) -> tuple[CacheArray, CacheArray]:
        """What is kept of a position: keys, values."""
        rows = CacheArray(self.num_kv_heads, self.head_dim, "kv_heads")
        return rows, rows

    @property
    def flops_per_pair(self) -> int:
        """Operations on a pair of a row and a position that it sees: scores and sums."""
        return 4 * self.head_dim * self.heads_per_kv_head * self.num_kv_heads

    def attend_pages(
        self,
        pages: tuple[Rows, Rows],
        page_table: jax.Array,
        start: jax.Array,
        tree_mask: jax.Array | None,
    ) -> Attend:
        """Attention of new rows to cached ones and to one another.

        Args:
          pages: of this layer, as `cache_spec` names them.
          page_table: int32 [B, M].
          start: int32 [B]; positions in use before, and the position of the first new row.
          tree_mask: bool [B, T, T] or None; which new rows each new row sees (None: causal).
        Returns:
          Attention that gives back the pages with the new rows.
        """
        batch, pool = batch_axes(start.shape[0], self.sharding)
        rows, kv_rows = self._row_names(batch)
        stored = ("kv_heads", pool, None, None)
        fixed = [*pages, page_table, start]
        names = [stored, stored, (batch, None), (batch,)]
        if tree_mask is not None:
            fixed.append(tree_mask)
            names.append((batch, None, None))
        sharded = self.sharding.map(
            functools.partial(
                paged_attention,
                scale=self.scale,
                implementation=implementation.for_platform(self.sharding.platform),
            ),
            (rows, kv_rows, kv_rows, *names),
            (rows, stored, stored),
        )

        def attend(queries, keys, values):
            attended, *pages = sharded(queries, keys, values, *fixed)
            return attended, tuple(pages)

        return attend

    def attend_packed(self, segment_ids: jax.Array) -> Attend:
        """Causal attention within documents, without a cache.

        Args:
          segment_ids: int32 [B, T]; rows see earlier rows of their own number, 0 is padding.
        Returns:
          Attention that gives back None.
        """
        batch, _ = batch_axes(segment_ids.shape[0], self.sharding)
        rows, kv_rows = self._row_names(batch)
        chosen = implementation.for_platform(self.sharding.platform)
        sharded = self.sharding.map(
            lambda *arrays: (causal_attention(*arrays, scale=self.scale, implementation=chosen),),
            (rows, kv_rows, kv_rows, (batch, None)),
            (rows,),
        )

        def attend(queries, keys, values):
            return (*sharded(queries, keys, values, segment_ids), None)

        return attend

    def join(self) -> None:
        """Makes one product of those that are always wanted of the same rows; see `linear.join`."""
        if self.products != ("q", "k", "v"):
            return
        products = ("q", "kv") if self.takes_context else ("qkv",)
        for parts in products:
            maps = [getattr(self, f"{part}_proj") for part in parts]
            if len(maps) == 1 or not linear.can_join(maps):
                continue
            setattr(self, f"{parts}_proj", linear.join(maps))
            for part in parts:
                delattr(self, f"{part}_proj")
            self.products = products

    @staticmethod
    def _row_names(batch: str | None) -> tuple[tuple, tuple]:
        """Logical names of the dimensions of queries, and of keys and values."""
        return (batch, None, "heads", None), (batch, None, "kv_heads", None)

    def _heads_of(self, products, x, cos_sin):
        """Heads of everything that these products give, in their order."""
        return tuple(
            heads
            for parts in products
            for heads in self._heads(getattr(self, f"{parts}_proj")(x), parts, cos_sin)
        )

    def _heads(self, product, parts: str, cos_sin):
        """Heads [B, T, n, H] of each part of a product."""
        norms = {"q": self.q_norm, "k": self.k_norm, "v": None}
        norms = [norms[part] for part in parts if norms[part] is not None]
        forms = {"q": Part(self.heads_per_kv_head), "k": Part(), "v": Part(rotated=False)}
        chosen = implementation.for_platform(self.sharding.platform)
        split = functools.partial(
            split_heads,
            parts=[forms[part] for part in parts],
            width=self.head_dim,
            eps=norms[0].eps if norms else 0.0,
            implementation=chosen,
        )
        arrays = [
            linear.finish(product, self.sharding), cos_sin, tuple(norm.scale[...] for norm in norms)
        ]  # fmt: skip
        if chosen == "reference" and len(parts) == 1:
            # XLA splits plain JAX over devices by itself, but neither a kernel nor shares of parts.
            return split(*arrays)
        batch, _ = batch_axes(product.shape[0], self.sharding)
        columns = {"q": "heads", "k": "kv_heads", "v": "kv_heads"}
        names = [(batch, None, columns[parts[0]]), (batch, None, None, None), (None,)]
        out = [(batch, None, columns[part], None) for part in parts]
        return self.sharding.map(split, names, out)(*arrays)
