"""Gated feed-forward layer of Qwen and Llama."""

import jax
import jax.numpy as jnp
from flax import nnx

from dflash.layers import linear
from dflash.layers.cache import batch_axes
from dflash.layers.linear import Linear
from dflash.parallel.sharding import Sharding


class Mlp(nnx.Module):
    """Gated feed-forward layer, down(silu(gate(x)) · up(x)).

    Source: Shazeer 2020 (SwiGLU).
    """

    def __init__(self, width: int, hidden: int, *, dtype: jnp.dtype, sharding: Sharding):
        build = {"dtype": dtype, "sharding": sharding}
        self.gate_proj = Linear(width, hidden, ("embed", "mlp"), **build)
        self.up_proj = Linear(width, hidden, ("embed", "mlp"), **build)
        self.down_proj = Linear(hidden, width, ("mlp", "embed"), **build)
        self.is_joined = False
        self.sharding = sharding

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps x [B, ..., D] to [B, ..., D]."""
        if not self.is_joined:
            return self.down_proj(gated(self.gate_proj(x), self.up_proj(x)))
        product = self.gate_up_proj(x)
        batch, _ = batch_axes(product.shape[0], self.sharding)
        names = (batch, *(None,) * (product.ndim - 2), "mlp")
        gate = self.sharding.map(
            lambda own: (gated(*jnp.split(own, 2, axis=-1)),), [names], [names]
        )
        return self.down_proj(*gate(product))

    def join(self) -> None:
        """Joins the gate and up projections into one; see `linear.join`."""
        if not self.is_joined and linear.can_join([self.gate_proj, self.up_proj]):
            self.gate_up_proj = linear.join([self.gate_proj, self.up_proj])
            del self.gate_proj, self.up_proj
            self.is_joined = True


def gated(gate: jax.Array, up: jax.Array) -> jax.Array:
    """Returns silu(gate) · up, elementwise."""
    return jax.nn.silu(gate) * up
