"""Grouped-query attention, shared by targets and drafters.

A target's rows attend to context in cache pages or, in training, to packed rows. Drafters use the
projections only and implement attention themselves.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from dflash.kernels import implementation
from dflash.kernels.causal_attention import causal_attention
from dflash.kernels.packing import Packing
from dflash.kernels.paged_attention import packed_attention, paged_attention
from dflash.kernels.quantized import Rows
from dflash.kernels.split_heads import Part, split_heads
from dflash.layers import linear
from dflash.layers.cache import CacheArray, batch_axes
from dflash.layers.linear import Linear, RMSNorm, UnscaledRMSNorm
from dflash.layers.products import finish
from dflash.parallel import parameters
from dflash.parallel.sharding import Sharding

# Maps the outputs of `project` to attention outputs [B, T, N, H] and an auxiliary result, such as
# updated pages. For `Attention`, the inputs are rotated queries [B, T, N, H], rotated keys and
# values [B, T, K, H].
Attend = Callable[..., tuple[jax.Array, Any]]


class Attention(nnx.Module):
    """Query, key, value and output projections, with optional per-head norms."""

    def __init__(
        self,
        width: int,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        eps: float,
        qk_norm: bool = False,
        norm_class: type[RMSNorm] = RMSNorm,
        v_norm: bool = False,
        bias: bool = False,
        output_bias: bool = False,
        output_width: int | None = None,
        takes_context: bool = False,
        has_sinks: bool = False,
        scale: float | None = None,
        window: int | None = None,
        rotated: bool = True,
        dtype: jnp.dtype,
        sharding: Sharding,
    ):
        """Builds abstract projections.

        Args:
          v_norm: Normalize the heads of values, without a learned scale.
          output_width: Size of an output row; None for `width`.
          takes_context: Some rows need keys and values but no queries; enables `keys_values`.
          has_sinks: Each head has a learned score of no row, its attention sink.
          scale: Factor that multiplies attention scores; None for 1 / sqrt(head_dim).
          window: Positions up to its own that a row sees; None for all.
          rotated: Whether queries and keys are rotated by their positions.
        """
        build = {"dtype": dtype, "sharding": sharding}
        queries, rows = num_heads * head_dim, num_kv_heads * head_dim
        self.q_proj, self.k_proj, self.v_proj = (
            Linear(width, columns, ("embed", heads), bias=bias, **build)
            for columns, heads in ((queries, "heads"), (rows, "kv_heads"), (rows, "kv_heads"))
        )
        self.o_proj = Linear(
            queries, output_width or width, ("heads", "embed"), bias=output_bias, **build
        )
        norms = (norm_class(head_dim, eps, **build) if qk_norm else None for _ in range(2))
        self.q_norm, self.k_norm = norms
        self.v_norm = UnscaledRMSNorm(head_dim, eps) if v_norm else None
        self.attention_sink_bias = _sinks(num_heads, **build) if has_sinks else None
        self.products = ("q", "k", "v")  # The parts of each projection, in order of its columns.
        self.num_kv_heads, self.heads_per_kv_head = num_kv_heads, num_heads // num_kv_heads
        self.takes_context, self.head_dim = takes_context, head_dim
        self.scale = scale or head_dim**-0.5
        self.window, self.rotated, self.sharding = window, rotated, sharding

    def project(
        self, x: jax.Array, cos_sin: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Projects rows to queries, keys and values.

        Args:
          x: [B, T, D].
          cos_sin: Cos and sin of the rows' positions; see `rotary.angles`.
        Returns:
          Rotated queries [B, T, N, H]; rotated keys and unrotated values, each [B, T, K, H].
        """
        return self._heads_of(self.products, x, cos_sin)

    def keys_values(
        self, x: jax.Array, cos_sin: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        """Projects rows to keys and values only; raises ValueError without `takes_context`."""
        if not self.takes_context:
            raise ValueError("keys_values: build the Attention with takes_context=True")
        return self._heads_of(self.products[1:], x, cos_sin)

    def output(self, attended: jax.Array) -> jax.Array:
        """Projects attention outputs [B, T, N, H] to rows [B, T, D]."""
        return self.o_proj(attended.reshape(*attended.shape[:2], -1))

    def cache_spec(self) -> tuple[CacheArray, CacheArray]:
        """Returns the cache arrays of the layer: keys, values."""
        rows = CacheArray(self.num_kv_heads, self.head_dim, "kv_heads", self.window)
        return rows, rows

    @property
    def flops_per_pair(self) -> int:
        """Floating-point operations per pair of a row and a position that it attends to."""
        return 4 * self.head_dim * self.heads_per_kv_head * self.num_kv_heads

    def attend_pages(
        self,
        pages: tuple[Rows, Rows],
        page_table: jax.Array,
        start: jax.Array,
        tree_mask: jax.Array | None,
        packing: Packing | None = None,
    ) -> Attend:
        """Returns attention of new rows to cached rows and to one another.

        Args:
          pages: This layer's pools of pages, in the structure of `cache_spec`.
          page_table: int32 [B, M].
          start: int32 [B]; number of cached positions, and so the position of the first new row.
          tree_mask: bool [B, T, T]; new rows that each new row sees. None is causal.
          packing: Packing of the new rows [D, N, …]; None for T rows of every sequence.
        Returns:
          Attention whose auxiliary result is the pages with the new rows written.
        """
        batch, pool = batch_axes(start.shape[0], self.sharding)
        rows, kv_rows = self._row_names(batch)
        stored = ("kv_heads", pool, None, None)
        packings = [] if packing is None else [packing]
        names = [stored, stored, (batch, None), (batch,), *[(batch, None)] * len(packings)]
        view = self._view | {"implementation": implementation.on(self.sharding)}
        if self.sharding.exact:
            view["by_position"] = True
        sharded = self.sharding.map(
            functools.partial(packed_attention if packings else paged_attention, **view),
            (rows, kv_rows, kv_rows, *names, (batch, None, None), ("heads",)),
            (rows, stored, stored),
        )
        fixed = (*pages, page_table, start, *packings, tree_mask, self._sinks)

        def attend(queries, keys, values):
            attended, *pages = sharded(queries, keys, values, *fixed)
            return attended, tuple(pages)

        return attend

    def attend_packed(self, segment_ids: jax.Array) -> Attend:
        """Returns causal attention within documents, without a cache.

        Args:
          segment_ids: int32 [B, T]; each row sees earlier rows with the same id. 0 is padding.
        """
        batch, _ = batch_axes(segment_ids.shape[0], self.sharding)
        rows, kv_rows = self._row_names(batch)
        attention = functools.partial(causal_attention, **self._view)
        sharded = self.sharding.map(
            lambda *arrays: (attention(*arrays),),
            (rows, kv_rows, kv_rows, (batch, None), ("heads",)),
            (rows,),
        )

        def attend(queries, keys, values):
            return (*sharded(queries, keys, values, segment_ids, self._sinks), None)

        return attend

    def join_projections(self) -> None:
        """Joins projections that always read the same rows into one; see `linear.join`."""
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

    @property
    def _view(self) -> dict[str, Any]:
        chosen = implementation.for_platform(self.sharding.platform)
        return {"scale": self.scale, "window": self.window, "implementation": chosen}

    @property
    def _sinks(self) -> jax.Array | None:
        return None if self.attention_sink_bias is None else self.attention_sink_bias[...]

    @staticmethod
    def _row_names(batch: str | None) -> tuple[tuple, tuple]:
        return (batch, None, "heads", None), (batch, None, "kv_heads", None)

    def _heads_of(self, products, x, cos_sin):
        """Returns the heads of each part that `products` compute, in order."""
        return tuple(
            heads
            for parts in products
            for heads in self._heads(getattr(self, f"{parts}_proj")(x), parts, cos_sin)
        )

    def _heads(self, product, parts: str, cos_sin):
        """Splits the output of one projection into heads [B, T, n, H], one array per part."""
        norms = {"q": self.q_norm, "k": self.k_norm, "v": self.v_norm}
        norms = [norms[part] for part in parts if norms[part] is not None]
        forms = {
            "q": Part(self.heads_per_kv_head, rotated=self.rotated),
            "k": Part(rotated=self.rotated),
            "v": Part(rotated=False, normed=self.v_norm is not None),
        }
        chosen = implementation.on(self.sharding)
        split = functools.partial(
            split_heads,
            parts=[forms[part] for part in parts],
            width=self.head_dim,
            eps=norms[0].eps if norms else 0.0,
            implementation=chosen,
        )
        arrays = [
            finish(product, self.sharding), cos_sin, tuple(norm.factor for norm in norms)
        ]  # fmt: skip
        if chosen == "reference" and len(parts) == 1:
            # XLA partitions plain JAX by itself. It cannot partition a kernel, nor the output of a
            # joined projection, in which each device holds a shard of every part.
            return split(*arrays)
        batch, _ = batch_axes(product.shape[0], self.sharding)
        columns = {"q": "heads", "k": "kv_heads", "v": "kv_heads"}
        names = [(batch, None, columns[parts[0]]), (batch, None, None, None), (None,)]
        out = [(batch, None, columns[part], None) for part in parts]
        return self.sharding.map(split, names, out)(*arrays)


def _sinks(num_heads: int, **build) -> nnx.Param:
    return parameters.declare((num_heads,), ("heads",), stddev=1.0, **build)


class ContextAttention(Attention):
    """Attention with projections of their own for the keys and values of other rows."""

    def __init__(self, width: int, *, num_kv_heads: int, head_dim: int, **options):
        super().__init__(width, num_kv_heads=num_kv_heads, head_dim=head_dim, **options)
        build = {name: options[name] for name in ("dtype", "sharding")}
        columns = num_kv_heads * head_dim
        build["bias"] = options.get("bias", False)
        self.k_proj_target = Linear(width, columns, ("embed", "kv_heads"), **build)
        self.v_proj_target = Linear(width, columns, ("embed", "kv_heads"), **build)

    def keys_values(self, x, cos_sin):
        (keys,) = self._heads(self.k_proj_target(x), "k", cos_sin)
        (values,) = self._heads(self.v_proj_target(x), "v", cos_sin)
        return keys, values


class GatedAttention(Attention):
    """Grouped-query attention whose outputs are multiplied by the sigmoid of projected gates."""

    def __init__(
        self, width: int, *, num_heads: int, head_dim: int, dtype, sharding: Sharding, **options
    ):
        build = {"dtype": dtype, "sharding": sharding}
        super().__init__(width, num_heads=num_heads, head_dim=head_dim, **options, **build)
        self.gate_proj = Linear(width, num_heads * head_dim, ("embed", "heads"), **build)

    def project(self, x: jax.Array, cos_sin: tuple[jax.Array, jax.Array]) -> tuple:
        """Returns queries, keys and values as `Attention`, and gates [B, T, N · H]."""
        return *super().project(x, cos_sin), self.gate_proj(x)

    def attend_pages(self, *arrays) -> Attend:
        return _gated(super().attend_pages(*arrays))

    def attend_packed(self, segment_ids: jax.Array) -> Attend:
        return _gated(super().attend_packed(segment_ids))


def _gated(attend: Attend) -> Attend:
    def gated(queries, keys, values, gate):
        attended, auxiliary = attend(queries, keys, values)
        return attended.reshape(gate.shape) * jax.nn.sigmoid(gate), auxiliary

    return gated
