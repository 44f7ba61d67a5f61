"""The gated feed-forward layer of Qwen and Llama."""

import jax
import jax.numpy as jnp
from flax import nnx

from dflash.common.sharding import Sharding
from dflash.layers.linear import Linear


class Mlp(nnx.Module):
    """down(silu(gate(x)) · up(x)). Source: Shazeer 2020 (SwiGLU)."""

    def __init__(self, width: int, hidden: int, *, dtype: jnp.dtype, sharding: Sharding):
        build = {"dtype": dtype, "sharding": sharding}
        self.gate_proj = Linear(width, hidden, ("embed", "mlp"), **build)
        self.up_proj = Linear(width, hidden, ("embed", "mlp"), **build)
        self.down_proj = Linear(hidden, width, ("mlp", "embed"), **build)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., D] -> [..., D]."""
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))
