"""The pre-norm transformer layer that every network here is made of."""

import functools
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from dflash.config.schema import TargetArchitecture
from dflash.layers.attention import Attend, Attention
from dflash.layers.cache import batch_axes
from dflash.layers.linear import RMSNorm
from dflash.layers.mlp import Mlp
from dflash.parallel import parameters
from dflash.parallel.sharding import Sharding


class TargetAttention(Protocol):
    """What a target needs of the attention of its layers; `Attention` is one of these.

    What `project` makes of the rows and what is kept of a position is its own affair.
    """

    def cache_spec(self) -> Any:
        """What is kept of a position: a pytree of `CacheArray`s."""

    @property
    def flops_per_pair(self) -> int:
        """Operations on a pair of a row and a position that it sees."""

    def project(self, normed: jax.Array, angles: Any) -> tuple:
        """Rows [B, T, D] and the model's `rotary_angles` -> the arguments of an `Attend`."""

    def attend_pages(self, pages, page_table, start, tree_mask) -> Attend:
        """Attention to cached rows and to one another, which gives back the new pages."""

    def attend_packed(self, segment_ids) -> Attend:
        """Attention within documents without a cache, which gives back None."""

    def output(self, attended: jax.Array) -> jax.Array:
        """The outputs of an `Attend` -> [B, T, D]."""


class TransformerLayer(nnx.Module):
    """Attention and mlp around a residual stream; what the rows attend to is the caller's."""

    def __init__(
        self,
        arch: TargetArchitecture,
        *,
        attention: TargetAttention | None = None,
        mlp: nnx.Module | None = None,
        qk_norm: bool = False,
        takes_context: bool = False,
        has_sinks: bool = False,
        dtype: jnp.dtype,
        sharding: Sharding,
    ):
        """Builds an abstract layer.

        Args:
          arch: shape of the decoder.
          attention: of the layer; None: grouped queries, as `arch` has them.
          mlp: [B, ..., D] -> [B, ..., D]; None: the gated one, of `arch.intermediate_size`.
          qk_norm: grouped queries have normed heads.
          takes_context, has_sinks: of grouped queries; see `Attention`.
        """
        build = {"dtype": dtype, "sharding": sharding}
        self.input_layernorm = RMSNorm(arch.hidden_size, arch.rms_norm_eps, **build)
        self.self_attn = attention or Attention(
            arch.hidden_size,
            num_heads=arch.num_attention_heads,
            num_kv_heads=arch.num_key_value_heads,
            head_dim=arch.head_dim,
            eps=arch.rms_norm_eps,
            qk_norm=qk_norm,
            takes_context=takes_context,
            has_sinks=has_sinks,
            **build,
        )
        self.post_attention_layernorm = RMSNorm(arch.hidden_size, arch.rms_norm_eps, **build)
        self.mlp = mlp or Mlp(arch.hidden_size, arch.intermediate_size, **build)
        self.sharding = sharding

    def __call__(self, x: jax.Array, angles: Any, attend: Attend) -> tuple[jax.Array, Any]:
        """[B, T, D] -> [B, T, D], and what `attend` gave back beside its outputs."""
        batch, _ = batch_axes(x.shape[0], self.sharding)
        # The compile report and profiles tell the parts of a program apart by these names.
        with jax.named_scope("attention"):
            branch, kept = self.attention_branch(self.input_layernorm(x), angles, attend)
            x = self.sharding.constrain(x + branch, batch, None, None)
        with jax.named_scope("mlp"):
            x = x + self.mlp_branch(self.post_attention_layernorm(x))
            return self.sharding.constrain(x, batch, None, None), kept

    def attention_branch(
        self, normed: jax.Array, angles: Any, attend: Attend
    ) -> tuple[jax.Array, Any]:
        """What attention adds to the residual stream, from its normed rows [B, T, D]."""
        attended, kept = attend(*self.self_attn.project(normed, angles))
        return self.self_attn.output(attended), kept

    def mlp_branch(self, normed: jax.Array) -> jax.Array:
        """What the mlp adds to the residual stream, from its normed rows [B, T, D]."""
        return self.mlp(normed)


def run_layer(
    layer: nnx.Module,
    x: jax.Array,
    angles: Any,
    attention_of: Callable[..., Attend],
    *seen: Any,
    gather: bool = False,
    remat: bool = False,
) -> tuple[jax.Array, Any]:
    """`layer(x, angles, attend)`, traced once for all layers that are built alike.

    A model has dozens of them, and a program that is compiled already must still be traced.

    Args:
      layer: a `TransformerLayer`, or what is called as one.
      x: [B, T, D].
      angles: the model's `rotary_angles`.
      attention_of: (layer, *seen) -> its `attend`; the same function for all layers.
      *seen: arrays, or pytrees of them.
      gather: make the layer's weights whole first; see `parameters.gathered`.
      remat: recompute what the layer does for the backward pass.
    """
    graph, params = nnx.split(layer)
    run = functools.partial(_run_split, graph, attention_of, gather)
    return (jax.checkpoint(run) if remat else run)(params, x, angles, *seen)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _run_split(graph, attention_of, gather, params, x, angles, *seen):
    layer = nnx.merge(graph, params)
    if gather:
        layer = parameters.gathered(layer, layer.sharding)
    return layer(x, angles, attention_of(layer, *seen))


def join_projections(model: nnx.Module) -> None:
    """Joins what reads the same rows in every layer of a model that is only to decode, in place.

    It computes what it did, by fewer and larger products. Checkpoints and training know the
    projections apart, so neither takes the model any more. One layer after the other is joined:
    never more than one has its weights twice.

    Args:
      model: with weights or abstract; what is joined already stays so.
    """
    for _, module in list(nnx.iter_modules(model)):
        if hasattr(module, "join"):
            module.join()
