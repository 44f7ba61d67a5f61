"""Grouped-query attention with output gates, as in Qwen3-Next and Qwen3.5."""

import jax
import jax.numpy as jnp

from dflash.layers.attention import Attend, Attention
from dflash.layers.linear import Linear
from dflash.parallel.sharding import Sharding


class GatedAttention(Attention):
    """Grouped-query attention whose outputs are multiplied by the sigmoid of projected gates."""

    def __init__(
        self,
        width: int,
        *,
        num_heads: int,
        head_dim: int,
        dtype: jnp.dtype,
        sharding: Sharding,
        **options,
    ):
        """Builds abstract projections.

        Args:
          **options: Further arguments of `Attention`.
        """
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
