"""The projections around attention, shared by targets and drafters.

How rows meet context differs (pages for a target, a static array for a drafter), so the attention
itself is the caller's.
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from dflash.common.sharding import Sharding
from dflash.kernels import implementation
from dflash.kernels.split_heads import split_heads
from dflash.layers import linear
from dflash.layers.cache import batch_axes
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
        return self._heads(self.q_proj(x), self.q_norm, cos_sin, "heads")

    def keys_values(
        self, x: jax.Array, cos_sin: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        """[B, T, D] -> rotated keys and plain values, each [B, T, K, H]."""
        values = linear.finish(self.v_proj(x), self.sharding)
        values = values.reshape(*values.shape[:2], -1, self.head_dim)
        return self._heads(self.k_proj(x), self.k_norm, cos_sin, "kv_heads"), values

    def output(self, attended: jax.Array) -> jax.Array:
        """[B, T, N, H] -> [B, T, D]."""
        return self.o_proj(attended.reshape(*attended.shape[:2], -1))

    def _heads(self, product, norm, cos_sin, name):
        """Normed and rotated heads [B, T, n, H] of a projection, whose columns are `name`."""
        arrays = [linear.finish(product, self.sharding), cos_sin]
        batch, _ = batch_axes(product.shape[0], self.sharding)
        names = [(batch, None, name), (batch, None, None, None)]
        if norm is not None:
            arrays.append(norm.scale[...])
            names.append((None,))
        chosen = implementation.for_platform(self.sharding.platform)
        split = functools.partial(
            split_heads, eps=0.0 if norm is None else norm.eps, implementation=chosen
        )
        if chosen == "reference":
            # XLA splits plain JAX over devices by itself, but not a kernel.
            return split(*arrays)
        out = ((batch, None, name, None),)
        (heads,) = self.sharding.map(lambda *arrays: (split(*arrays),), names, out)(*arrays)
        return heads
