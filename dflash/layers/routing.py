"""Routing of rows to experts."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

from dflash.parallel import parameters
from dflash.parallel.sharding import Sharding


@dataclasses.dataclass(frozen=True)
class Routing:
    """Rule by which rows are routed to experts.

    Attributes:
      num_experts: Experts per layer, E.
      experts_per_token: Experts per row, k.
      scoring: Function from logits to scores: softmax over all experts, or sigmoid of each logit.
      normalize: Normalize the weights of the chosen experts to sum to 1, before `scale`.
      scale: Factor that multiplies the weights.
      num_groups: Groups of equally many experts, which are ranked by the sum of their two highest
        scores.
      groups_per_token: Best groups per row, from which its experts are chosen.
      has_correction: A learned bias is added to the scores for choosing experts, but not for their
        weights.
    """

    num_experts: int
    experts_per_token: int
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    normalize: bool = True
    scale: float = 1.0
    num_groups: int = 1
    groups_per_token: int = 1
    has_correction: bool = False
    has_bias: bool = False


def route(
    logits: jax.Array, routing: Routing, correction: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Chooses experts from the router's logits.

    Args:
      logits: [..., E].
      correction: float32 [E]; required if `routing.has_correction`.
    Returns:
      Experts int32 [..., k], best first, and their weights float32 [..., k].
    Source: softmax from Qwen3; all else from DeepSeek-V3 (arXiv 2412.19437), section 2.1.2.
    """
    logits = logits.astype(jnp.float32)
    score = jax.nn.softmax if routing.scoring == "softmax" else jax.nn.sigmoid
    scores = score(logits)
    ranked = scores if correction is None else scores + correction
    if routing.num_groups > 1:
        ranked = _keep_best_groups(ranked, routing)
    _, experts = jax.lax.top_k(ranked, routing.experts_per_token)
    weights = jnp.take_along_axis(scores, experts, axis=-1)
    if routing.normalize:
        weights /= weights.sum(axis=-1, keepdims=True) + 1e-20
    return experts, weights * routing.scale


def _keep_best_groups(ranked: jax.Array, routing: Routing) -> jax.Array:
    """Replaces the scores of groups that are not chosen by minus infinity."""
    grouped = ranked.reshape(*ranked.shape[:-1], routing.num_groups, -1)
    best_two, _ = jax.lax.top_k(grouped, min(2, grouped.shape[-1]))
    _, kept = jax.lax.top_k(best_two.sum(axis=-1), routing.groups_per_token)
    is_kept = jax.nn.one_hot(kept, routing.num_groups, dtype=bool).any(axis=-2)
    return jnp.where(is_kept[..., None], grouped, -jnp.inf).reshape(ranked.shape)


class Router(nnx.Module):
    """Router of one layer, which chooses experts by float32 logits; replicated on all devices."""

    def __init__(self, width: int, routing: Routing, *, dtype: jnp.dtype, sharding: Sharding):
        build = {"dtype": dtype, "sharding": sharding}
        shape = (width, routing.num_experts)
        self.kernel = parameters.declare(shape, (None, None), stddev=width**-0.5, **build)
        self.e_score_correction_bias = (
            parameters.declare(
                (routing.num_experts,), (None,), dtype=jnp.float32, sharding=sharding, stddev=0.1
            )
            if routing.has_correction
            else None
        )
        self.bias = (
            parameters.declare((routing.num_experts,), (None,), stddev=0.0, **build)
            if routing.has_bias
            else None
        )
        self.routing = routing

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns experts int32 [..., k] and weights float32 [..., k] for rows x [..., D]."""
        correction = self.e_score_correction_bias
        logits = jnp.einsum(
            "...d,de->...e", x, self.kernel[...], preferred_element_type=jnp.float32
        )
        if self.bias is not None:
            logits += self.bias[...]
        return route(logits, self.routing, None if correction is None else correction[...])
