"""Gated feed-forward layer."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from dflash.layers import linear
from dflash.layers.cache import batch_axes
from dflash.layers.linear import Linear
from dflash.parallel.sharding import Sharding

# Activations by their names in config.json.
ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu_pytorch_tanh": functools.partial(jax.nn.gelu, approximate=True),
}


class Mlp(nnx.Module):
    """Gated feed-forward layer, down(activation(gate(x)) · up(x)).

    Source: Shazeer 2020 (SwiGLU, GEGLU).
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        *,
        activation: str = "silu",  # Name in `ACTIVATIONS`.
        dtype: jnp.dtype,
        sharding: Sharding,
    ):
        build = {"dtype": dtype, "sharding": sharding}
        self.gate_proj = Linear(width, hidden, ("embed", "mlp"), **build)
        self.up_proj = Linear(width, hidden, ("embed", "mlp"), **build)
        self.down_proj = Linear(hidden, width, ("mlp", "embed"), **build)
        self.activation = activation
        self.is_joined = False
        self.sharding = sharding

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps x [B, ..., D] to [B, ..., D]."""
        if not self.is_joined:
            return self.down_proj(gated(self.gate_proj(x), self.up_proj(x), self.activation))
        product = self.gate_up_proj(x)
        batch, _ = batch_axes(product.shape[0], self.sharding)
        names = (batch, *(None,) * (product.ndim - 2), "mlp")
        gate = self.sharding.map(
            lambda columns: (gated(*jnp.split(columns, 2, axis=-1), self.activation),),
            [names],
            [names],
        )
        return self.down_proj(*gate(product))

    def join_projections(self) -> None:
        """Joins the gate and up projections into one; see `linear.join`."""
        if not self.is_joined and linear.can_join([self.gate_proj, self.up_proj]):
            self.gate_up_proj = linear.join([self.gate_proj, self.up_proj])
            del self.gate_proj, self.up_proj
            self.is_joined = True


@dataclasses.dataclass(frozen=True)
class ClampedSwiglu:
    """Gate with (up + 1) · gate · sigmoid(alpha · gate), after clamping both.

    Source: gpt-oss model card, arXiv 2508.10925.

    Attributes:
      limit: Largest gate, and largest magnitude of up.
      alpha: Factor of the gate in the sigmoid.
    """

    limit: float
    alpha: float

    def __call__(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        gate, up = jnp.minimum(gate, self.limit), jnp.clip(up, -self.limit, self.limit)
        return (up + 1) * gate * jax.nn.sigmoid(self.alpha * gate)


def gated(gate: jax.Array, up: jax.Array, activation: str = "silu") -> jax.Array:
    """Returns activation(gate) · up, elementwise."""
    return ACTIVATIONS[activation](gate) * up
