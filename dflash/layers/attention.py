"""The projections around attention, shared by targets and drafters.

How rows meet context differs (pages for a target, a static array for a drafter), so the attention
itself is the caller's.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from dflash.common.sharding import Sharding
from dflash.layers import linear, rotary
from dflash.layers.linear import Linear, RMSNorm


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
        dtype: jnp.dtype,
        sharding: Sharding,
    ):
        """Args: width: of rows that come in; output_width: of those that go out, None: the same."""
        build = {"dtype": dtype, "sharding": sharding}
        self.q_proj = Linear(width, num_heads * head_dim, ("embed", "heads"), **build)
        self.k_proj = Linear(width, num_kv_heads * head_dim, ("embed", "kv_heads"), **build)
        self.v_proj = Linear(width, num_kv_heads * head_dim, ("embed", "kv_heads"), **build)
        self.o_proj = Linear(
            num_heads * head_dim, output_width or width, ("heads", "embed"), **build
        )
        self.q_norm = RMSNorm(head_dim, eps, **build) if qk_norm else None
        self.k_norm = RMSNorm(head_dim, eps, **build) if qk_norm else None
        self.head_dim = head_dim
        self.sharding = sharding

    @property
    def scale(self) -> float:
        """Factor on attention scores."""
        return self.head_dim**-0.5

    def queries(self, x: jax.Array, cos_sin: tuple[jax.Array, jax.Array]) -> jax.Array:
        """[B, T, D] -> rotated queries [B, T, N, H]."""
        return rotary.rotate(self._heads(self.q_proj(x), self.q_norm), cos_sin)

    def keys_values(
        self, x: jax.Array, cos_sin: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        """[B, T, D] -> rotated keys and plain values, each [B, T, K, H]."""
        keys = rotary.rotate(self._heads(self.k_proj(x), self.k_norm), cos_sin)
        return keys, self._heads(self.v_proj(x), None)

    def output(self, attended: jax.Array) -> jax.Array:
        """[B, T, N, H] -> [B, T, D]."""
        return self.o_proj(attended.reshape(*attended.shape[:2], -1))

    def _heads(self, x, norm):
        x = linear.finish(x, self.sharding)
        split = x.reshape(*x.shape[:2], -1, self.head_dim)
        return split if norm is None else norm(split)
