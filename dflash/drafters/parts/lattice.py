"""Network that scores the transitions between the likely tokens of adjacent draft positions.

Source: LiLiCorr, arXiv 2608.20530 and NVIDIA/Model-Optimizer (`modeling_lilicorr.py`). A small
transformer reads the k candidates of all draft positions at once, each of which attends to all
others. It maps each candidate to two vectors, one for transitions from it and one for transitions
to it. The score of a transition is the cosine of the two vectors, times a constant.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from dflash.drafters.lilicorr_config import LiLiCorrShape
from dflash.layers.linear import Linear, RMSNorm
from dflash.parallel import parameters
from dflash.parallel.sharding import Sharding

_NUM_FEATURES = 5  # Inputs of the network per candidate, from its probability and rank.
_FEATURE_EPS = 1e-5


class Lattice(NamedTuple):
    """The k most likely tokens of each draft position, in descending order.

    Attributes:
      tokens: Candidates, as tokens of the target, int32 [B, G, k].
      log_probs: Their log-probabilities among all tokens, float32 [B, G, k].
    """

    tokens: jax.Array
    log_probs: jax.Array


class Nodes(NamedTuple):
    """Candidates of draft positions, each with a vector.

    Attributes:
      tokens: int32 [..., k].
      vectors: Unit vectors, [..., k, r].
    """

    tokens: jax.Array
    vectors: jax.Array


class FeatureNorm(nnx.Module):
    """Layer norm with a learned scale and bias."""

    def __init__(self, width: int, **build):
        self.scale = parameters.declare((width,), (None,), stddev=None, **build)
        self.bias = parameters.declare((width,), (None,), stddev=0.0, **build)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalizes rows float32 [..., width]."""
        centered = x - x.mean(axis=-1, keepdims=True)
        variance = jnp.mean(centered**2, axis=-1, keepdims=True)
        return centered * jax.lax.rsqrt(variance + _FEATURE_EPS) * self.scale[...] + self.bias[...]


class LatticeLayer(nnx.Module):
    """Pre-norm transformer layer in which every candidate attends to every other."""

    def __init__(self, shape: LiLiCorrShape, **build):
        width, eps = shape.network_width, shape.decoder.rms_norm_eps
        inner = int(width * shape.lilicorr_mlp_ratio)
        self.attn_norm = RMSNorm(width, eps, **build)
        self.in_proj = _linear(width, 3 * width, **build)
        self.out_proj = _linear(width, width, **build)
        self.mlp_norm = RMSNorm(width, eps, **build)
        self.up = _linear(width, inner, **build)
        self.down = _linear(inner, width, **build)
        self.num_heads = shape.lilicorr_num_heads

    def __call__(self, x: jax.Array, bias: jax.Array) -> jax.Array:
        """Maps rows x [B, N, D] to [B, N, D], given the bias [heads, N, N] of attention scores."""
        heads = (
            part.reshape(*part.shape[:2], self.num_heads, -1)
            for part in jnp.split(self.in_proj(self.attn_norm(x)), 3, axis=-1)
        )
        attended = jax.nn.dot_product_attention(*heads, bias=bias[None].astype(x.dtype))
        x = x + self.out_proj(attended.reshape(x.shape))
        return x + self.down(jax.nn.silu(self.up(self.mlp_norm(x))))


class LatticeNetwork(nnx.Module):
    """Transformer over all candidates of a block, with the parameters of published files."""

    def __init__(self, shape: LiLiCorrShape, *, dtype, sharding: Sharding):
        """Builds an abstract network, replicated over the mesh, for the positions of a block."""
        build = {"dtype": dtype, "sharding": sharding}
        drafter, width = shape.decoder.hidden_size, shape.network_width
        slots, candidates = shape.block_size - 1, shape.lilicorr_candidate_topk
        factors, eps = shape.lilicorr_factor_dim, shape.decoder.rms_norm_eps
        self.token_proj = None if drafter == width else _linear(drafter, width, **build)
        self.pass_hidden_proj = _linear(drafter, width, **build)
        self.feature_norm = FeatureNorm(_NUM_FEATURES, **build)
        self.feature_up = _linear(_NUM_FEATURES, width, **build)
        self.feature_down = _linear(width, width, **build)
        self.slot_embedding = _table((1, 1, slots, 1, width), **build)
        self.rank_embedding = _table((1, 1, 1, candidates, width), **build)
        heads = shape.lilicorr_num_heads
        self.relative_slot_bias = _table((heads, 2 * shape.block_size - 1), **build)
        self.same_slot_bias = _table((heads,), **build)
        self.context_proj = _linear(drafter, width, **build)
        self.layers = nnx.List(
            LatticeLayer(shape, **build) for _ in range(shape.lilicorr_num_layers)
        )
        self.output_norm = RMSNorm(width, eps, **build)
        self.anchor_norm = RMSNorm(width, eps, **build)
        self.factor_input_proj = _linear(3 * width, width, **build)
        self.out_head = _linear(width, factors, **build)
        self.in_head = _linear(width, factors, **build)
        self.anchor_out_head = _linear(width, factors, **build)
        self.eps = shape.lilicorr_vector_eps

    def __call__(
        self,
        lattice: Lattice,
        embedded: jax.Array,
        hidden: jax.Array,
        anchor: jax.Array,
        context: jax.Array,
        has_context: jax.Array | None = None,
    ) -> tuple[Nodes, Nodes]:
        """Computes the vectors of all candidates of B blocks.

        Args:
          lattice: Candidates of the draft positions.
          embedded: Embeddings of the candidates, [B, G, k, D].
          hidden: Hidden states of the draft positions, [B, G, D].
          anchor: Tokens before the first draft positions, int32 [B].
          context: Last rows of the drafter's context, [B, D].
          has_context: Whether there is such a row, bool [B]; None if there always is.
        Returns:
          The candidates before each draft position, with their vectors of transitions from them;
          the only candidate before the first position is the anchor, k times. Then the candidates
          of each position, with their vectors of transitions to them.
        """
        x = self._rows(lattice, embedded, hidden)
        row = self.context_proj(context.astype(x.dtype))
        if has_context is not None:
            row = jnp.where(has_context[:, None], row, 0)
        row = self.anchor_norm(row)
        beside = jnp.broadcast_to(row[:, None, None], x.shape)
        joint = jnp.concatenate([x, beside, x * beside], axis=-1)
        joint = jax.nn.silu(self.factor_input_proj(joint))
        leaving, arriving, start = (
            _unit(head(rows), self.eps)
            for head, rows in (
                (self.out_head, joint),
                (self.in_head, joint),
                (self.anchor_out_head, row),
            )
        )
        tokens = lattice.tokens
        first = (
            jnp.broadcast_to(anchor[:, None, None], tokens[:, :1].shape),
            jnp.broadcast_to(start[:, None, None], leaving[:, :1].shape),
        )
        before = (
            jnp.concatenate([at_anchor, rows[:, :-1]], axis=1)
            for at_anchor, rows in zip(first, (tokens, leaving), strict=True)
        )
        return Nodes(*before), Nodes(tokens, arriving)

    def _rows(self, lattice: Lattice, embedded: jax.Array, hidden: jax.Array) -> jax.Array:
        """Returns the transformer's outputs for all candidates, [B, G, k, D]."""
        dtype = self.output_norm.scale.dtype
        slots, candidates = lattice.tokens.shape[1:]
        x, hidden = embedded.astype(dtype), hidden.astype(dtype)
        if self.token_proj is not None:
            x = self.token_proj(x)
        x = x + self.pass_hidden_proj(hidden)[:, :, None]
        features = self.feature_norm(_features(lattice.log_probs)).astype(dtype)
        x = x + self.feature_down(jax.nn.silu(self.feature_up(features)))
        x = x + self.slot_embedding[...][0, :, :slots] + self.rank_embedding[...][0]
        shape, bias = x.shape, self._bias(slots, candidates)
        x = x.reshape(shape[0], slots * candidates, -1)
        for layer in self.layers:
            x = layer(x, bias)
        return self.output_norm(x).reshape(shape)

    def _bias(self, slots: int, candidates: int) -> jax.Array:
        """Returns the bias of attention scores by distance in slots, [heads, N, N]."""
        slot = jnp.repeat(jnp.arange(slots), candidates)
        distance = slot[:, None] - slot
        by_distance = self.relative_slot_bias[...]
        center = by_distance.shape[1] // 2
        return by_distance[:, distance + center] + jnp.where(
            distance == 0, self.same_slot_bias[...][:, None, None], 0
        )


def _features(log_probs: jax.Array) -> jax.Array:
    """Returns features [..., k, 5]: log p, p, log p over the likeliest, rank, and being first."""
    candidates = log_probs.shape[-1]
    rank = jnp.arange(candidates) / max(candidates - 1, 1)
    features = (
        log_probs,
        jnp.exp(log_probs),
        log_probs - log_probs.max(axis=-1, keepdims=True),
        jnp.broadcast_to(rank, log_probs.shape),
        jnp.broadcast_to(jnp.arange(candidates) == 0, log_probs.shape),
    )
    return jnp.stack([feature.astype(jnp.float32) for feature in features], axis=-1)


def _unit(x: jax.Array, eps: float) -> jax.Array:
    """Scales rows [..., r] to a length of 1, in float32; rows shorter than `eps` stay shorter."""
    x = x.astype(jnp.float32)
    # The length is not differentiable at zero.
    squares = jnp.maximum(jnp.sum(x * x, axis=-1, keepdims=True), eps * eps)
    return x * jax.lax.rsqrt(squares)


def _linear(inputs: int, outputs: int, **build) -> Linear:
    return Linear(inputs, outputs, (None, None), bias=True, **build)


def _table(shape: tuple[int, ...], **build) -> nnx.Param:
    return parameters.declare(shape, (None,) * len(shape), stddev=0.0, **build)
