"""Multi-head latent attention, which caches the keys and values of all heads as one latent row.

Source: DeepSeek-V2, arXiv 2405.04434, section 2.1; DeepSeek-V3, arXiv 2412.19437.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx

from dflash.kernels import implementation, quantized
from dflash.kernels.causal_attention import causal_attention
from dflash.kernels.latent_attention import expanded_attention, latent_attention
from dflash.kernels.quantized import Rows
from dflash.kernels.split_heads import rotate
from dflash.layers.attention import Attend
from dflash.layers.cache import CacheArray, batch_axes
from dflash.layers.linear import Linear, RMSNorm
from dflash.parallel.sharding import Sharding

# Epsilon of the norms on latents; the model's `rms_norm_eps` does not apply to them.
_EPS = 1e-6


@dataclasses.dataclass(frozen=True)
class LatentShape:
    """Sizes of latent attention; `DeepseekV3Architecture` describes the fields of config.json."""

    num_attention_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rope_interleave: bool = True


class LatentAttention(nnx.Module):
    """Attention that caches one latent and one rotated key per position, shared by all heads.

    A cached row has `kv_lora_rank + qk_rope_head_dim` elements. A few rows, as in verification, are
    projected into the latent space and attend there. For a long chunk of a prompt, keys and values
    are computed from the latents instead, which then takes fewer operations.
    """

    def __init__(
        self, width: int, shape: LatentShape, *, scale: float, dtype: jnp.dtype, sharding: Sharding
    ):
        build = {"dtype": dtype, "sharding": sharding}
        heads, latent = shape.num_attention_heads, shape.kv_lora_rank
        query_width = heads * (shape.qk_nope_head_dim + shape.qk_rope_head_dim)
        if shape.q_lora_rank is None:
            self.q_proj = Linear(width, query_width, ("embed", "heads"), **build)
        else:
            self.q_a_proj = Linear(width, shape.q_lora_rank, ("embed", None), **build)
            self.q_a_layernorm = RMSNorm(shape.q_lora_rank, _EPS, **build)
            self.q_b_proj = Linear(shape.q_lora_rank, query_width, (None, "heads"), **build)
        cache_width = latent + shape.qk_rope_head_dim
        self.kv_a_proj_with_mqa = Linear(width, cache_width, ("embed", None), **build)
        self.kv_a_layernorm = RMSNorm(latent, _EPS, **build)
        # Checkpoints store these two as one tensor, `kv_b_proj`.
        self.k_b_proj = Linear(latent, heads * shape.qk_nope_head_dim, (None, "heads"), **build)
        self.v_b_proj = Linear(latent, heads * shape.v_head_dim, (None, "heads"), **build)
        self.o_proj = Linear(heads * shape.v_head_dim, width, ("heads", "embed"), **build)
        self.shape, self.scale, self.sharding = shape, scale, sharding

    def cache_spec(self) -> CacheArray:
        """Returns the cache array of the layer: the latent, followed by the rotated key."""
        return CacheArray(1, self.shape.kv_lora_rank + self.shape.qk_rope_head_dim, None)

    @property
    def flops_per_pair(self) -> int:
        """Floating-point operations per pair of a row and a position, in the latent space."""
        shape = self.shape
        return 2 * shape.num_attention_heads * (2 * shape.kv_lora_rank + shape.qk_rope_head_dim)

    def project(
        self, x: jax.Array, cos_sin: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        """Projects rows [B, T, D] to queries and to rows of the cache.

        Returns:
          Queries [B, T, N, nope + rope], cache rows [B, T, latent + rope].
        """
        shape = self.shape
        if shape.q_lora_rank is None:
            queries = self.q_proj(x)
        else:
            queries = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        queries = queries.reshape(*x.shape[:2], shape.num_attention_heads, -1)
        plain, rotary = jnp.split(queries, [shape.qk_nope_head_dim], axis=-1)
        queries = jnp.concatenate([plain, self._rotate(rotary, cos_sin)], axis=-1)
        latent, key = jnp.split(self.kv_a_proj_with_mqa(x), [shape.kv_lora_rank], axis=-1)
        key = self._rotate(key[:, :, None], cos_sin)[:, :, 0]
        return queries, jnp.concatenate([self.kv_a_layernorm(latent), key], axis=-1)

    def attend_pages(
        self, pages: Rows, page_table: jax.Array, start: jax.Array, tree_mask: jax.Array | None
    ) -> Attend:
        """Returns attention of new rows to cached rows and to one another, as `Attention` does."""
        batch, pool = batch_axes(start.shape[0], self.sharding)
        rows, stored = (batch, None, "heads", None), (None, pool, None, None)
        masks = (batch, None, None)
        names = [rows, (batch, None, None), stored, (batch, None), (batch,), masks]
        kernels = [(None, "heads", None)] * 2

        def attend(queries, cached):
            run = self._expanded if self._expands(queries.shape[1]) else self._absorbed
            sharded = self.sharding.map(run, [*kernels, *names], [rows, stored])
            return sharded(
                *self._kernels(queries), queries, cached, pages, page_table, start, tree_mask
            )

        return attend

    def attend_packed(self, segment_ids: jax.Array) -> Attend:
        """Returns causal attention within documents, without a cache, as `Attention` does."""
        batch, _ = batch_axes(segment_ids.shape[0], self.sharding)
        rows, kernels = (batch, None, "heads", None), [(None, "heads", None)] * 2

        def run(to_keys, to_values, queries, cached, segment_ids):
            heads = self._expand(to_keys, to_values, cached[None])
            keys, values = (array.transpose(1, 2, 0, 3) for array in heads)
            width = max(keys.shape[-1], values.shape[-1])
            padded = (_widen(array, width) for array in (queries, keys, values))
            attended = causal_attention(*padded, segment_ids, scale=self.scale)
            return (attended[..., : values.shape[-1]],)

        names = [*kernels, rows, (batch, None, None), (batch, None)]

        def attend(queries, cached):
            sharded = self.sharding.map(run, names, [rows])
            (attended,) = sharded(*self._kernels(queries), queries, cached, segment_ids)
            return attended, None

        return attend

    def output(self, attended: jax.Array) -> jax.Array:
        """Projects attention outputs [B, T, N, v] to rows [B, T, D]."""
        return self.o_proj(attended.reshape(*attended.shape[:2], -1))

    def _expands(self, length: int) -> bool:
        """Returns whether `length` new rows take fewer operations with expanded keys and values."""
        shape = self.shape
        latent, rope = shape.kv_lora_rank, shape.qk_rope_head_dim
        heads = shape.qk_nope_head_dim + shape.v_head_dim
        # Multiplications per head and context position: expanded on the left, latent on the right.
        return latent * heads + length * (heads + rope) < length * (2 * latent + rope)

    def _absorbed(self, to_keys, to_values, queries, cached, pages, page_table, start, tree_mask):
        """Computes attention in the latent space, from weights [latent, N, …]."""
        plain, rotary = jnp.split(queries, [self.shape.qk_nope_head_dim], axis=-1)
        absorbed = jnp.einsum("btnd,rnd->btnr", plain, to_keys)
        attended, pages = latent_attention(
            jnp.concatenate([absorbed, rotary], axis=-1),
            cached,
            pages,
            page_table,
            start,
            tree_mask,
            value_width=self.shape.kv_lora_rank,
            scale=self.scale,
            implementation=implementation.for_platform(self.sharding.platform),
        )
        return jnp.einsum("btnr,rnv->btnv", attended, to_values), pages

    def _expanded(self, to_keys, to_values, queries, *arrays):
        """Computes attention with the expanded keys and values of every head."""
        return expanded_attention(
            queries,
            *arrays,
            expand=functools.partial(self._expand, to_keys, to_values),
            scale=self.scale,
        )

    def _expand(self, to_keys, to_values, cached: Rows):
        """Expands cache rows [1, B, S, latent + rope] to keys and values of every head.

        Returns:
          Keys [N, B, S, nope + rope], values [N, B, S, v].
        """
        (cached,), scales = quantized.split(cached, to_keys.dtype)
        if scales is not None:
            cached = (cached * scales[0].mT).astype(to_keys.dtype)
        latent, rotary = jnp.split(cached, [self.shape.kv_lora_rank], axis=-1)
        plain = jnp.einsum("bsr,rnd->nbsd", latent, to_keys)
        rotary = jnp.broadcast_to(rotary, (*plain.shape[:3], rotary.shape[-1]))
        values = jnp.einsum("bsr,rnv->nbsv", latent, to_values)
        return jnp.concatenate([plain, rotary], axis=-1), values

    def _kernels(self, x: jax.Array) -> list[jax.Array]:
        """Returns the kernels to keys and to values, each [latent, N, H]."""
        kernels = (self.k_b_proj.plain(x), self.v_b_proj.plain(x))
        return [array.reshape(len(array), self.shape.num_attention_heads, -1) for array in kernels]

    def _rotate(self, x: jax.Array, cos_sin: tuple[jax.Array, jax.Array]) -> jax.Array:
        """Rotates heads [B, T, n, rope]; rotary pairs of the output are half a head apart."""
        if self.shape.rope_interleave:
            x = x.reshape(*x.shape[:-1], -1, 2).swapaxes(-1, -2).reshape(x.shape)
        return rotate(x, cos_sin)


def _widen(x: jax.Array, width: int) -> jax.Array:
    return jnp.pad(x, ((0, 0),) * (x.ndim - 1) + ((0, width - x.shape[-1]),))
