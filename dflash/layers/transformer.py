"""Pre-norm transformer layer, the building block of targets and drafters."""

import functools
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from dflash.config.schema import TargetArchitecture
from dflash.layers import linear
from dflash.layers.attention import Attend, Attention
from dflash.layers.cache import batch_axes
from dflash.layers.linear import Linear, RMSNorm
from dflash.layers.mlp import Mlp
from dflash.parallel import parameters
from dflash.parallel.sharding import Sharding

# Linear maps whose kernels are also read otherwise than by calls.
_READ_AS_MATRICES = ("lm_head", "k_b_proj", "v_b_proj")


class TargetAttention(Protocol):
    """Interface of the attention of a target's layers, which `Attention` implements.

    The outputs of `project` and the layout of the cache are up to the implementation. A layer with
    recurrent state, such as `GatedDeltaNet`, has `attend_state` instead of `attend_pages`.
    """

    def cache_spec(self) -> Any:
        """Returns the arrays that the layer caches, a pytree of `CacheArray`s.

        A layer with recurrent state returns its `RecurrentSpec`.
        """

    @property
    def flops_per_pair(self) -> int:
        """Floating-point operations per pair of a row and a position that it attends to."""

    def project(self, normed: jax.Array, angles: Any) -> tuple:
        """Projects rows [B, T, D] to the arguments of an `Attend`, given `rotary_angles`."""

    def attend_pages(self, pages, page_table, start, tree_mask) -> Attend:
        """Returns attention to cached rows and new ones; its auxiliary result is the new pages."""

    def attend_state(self, state, tree_mask, count) -> Attend:
        """Returns attention to recurrent state and new rows; see `GatedDeltaNet.attend_state`."""

    def attend_packed(self, segment_ids) -> Attend:
        """Returns attention within documents, without a cache; its auxiliary result is None."""

    def output(self, attended: jax.Array) -> jax.Array:
        """Projects the outputs of an `Attend` to rows [B, T, D]."""


class TransformerLayer(nnx.Module):
    """Attention and MLP on a residual stream; the caller supplies the attention function."""

    def __init__(
        self,
        arch: TargetArchitecture,
        *,
        attention: TargetAttention,
        mlp: nnx.Module | None = None,
        norm_class: type[RMSNorm] = RMSNorm,
        dtype: jnp.dtype,
        sharding: Sharding,
    ):
        """Builds an abstract layer.

        Args:
          mlp: Module from [B, ..., D] to [B, ..., D]; None for a gated MLP of
            `arch.intermediate_size`.
          norm_class: Class of the norms before attention and MLP.
        """
        build = {"dtype": dtype, "sharding": sharding}
        self.input_layernorm = norm_class(arch.hidden_size, arch.rms_norm_eps, **build)
        self.self_attn = attention
        self.post_attention_layernorm = norm_class(arch.hidden_size, arch.rms_norm_eps, **build)
        self.mlp = mlp or Mlp(arch.hidden_size, arch.intermediate_size, **build)
        self.sharding = sharding

    def __call__(self, x: jax.Array, angles: Any, attend: Attend) -> tuple[jax.Array, Any]:
        """Maps x [B, T, D] to [B, T, D], and returns the auxiliary result of `attend` too."""
        batch, _ = batch_axes(x.shape[0], self.sharding)
        # The compile report and profiles attribute operations by these names.
        with jax.named_scope("attention"):
            branch, auxiliary = self.attention_branch(self.input_layernorm(x), angles, attend)
            x = self.sharding.constrain(x + branch, batch, None, None)
        with jax.named_scope("mlp"):
            x = x + self.mlp_branch(self.mlp_norm(x))
            return self.sharding.constrain(x, batch, None, None), auxiliary

    def attention_branch(
        self, normed: jax.Array, angles: Any, attend: Attend
    ) -> tuple[jax.Array, Any]:
        """Returns the output of attention for normed rows [B, T, D], and its auxiliary result."""
        attended, auxiliary = attend(*self.self_attn.project(normed, angles))
        return self.self_attn.output(attended), auxiliary

    def mlp_norm(self, x: jax.Array) -> jax.Array:
        """Normalizes the residual stream [B, T, D] for the MLP."""
        return self.post_attention_layernorm(x)

    def mlp_branch(self, normed: jax.Array) -> jax.Array:
        """Returns the output of the MLP for normed rows [B, T, D]."""
        return self.mlp(normed)


def grouped_attention(
    arch: TargetArchitecture, kind: type[Attention] = Attention, **options
) -> Attention:
    """Returns grouped-query attention; `options` take precedence over the sizes of `arch`."""
    sizes = {
        "num_heads": arch.num_attention_heads,
        "num_kv_heads": arch.num_key_value_heads,
        "head_dim": arch.head_dim,
        "eps": arch.rms_norm_eps,
    }
    return kind(arch.hidden_size, **sizes | options)


def run_layer(
    layer: nnx.Module,
    x: jax.Array,
    angles: Any,
    attention_of: Callable[..., Attend],
    *seen: Any,
    gather: bool = False,
    remat: bool = False,
    adapters: jax.Array | None = None,
) -> tuple[jax.Array, Any]:
    """Computes `layer(x, angles, attend)`, tracing layers of identical structure only once.

    A model has dozens of layers, and tracing them takes time even if the program is in the
    compilation cache.

    Args:
      layer: `TransformerLayer`, or a module with the same call signature.
      x: Rows [B, T, D].
      angles: Output of the model's `rotary_angles`.
      attention_of: Function from (layer, *seen) to the layer's `attend`; pass the same function
        object for all layers.
      *seen: Further arguments of `attention_of`, pytrees of arrays.
      gather: All-gather the layer's weights first; see `parameters.gathered`.
      remat: Recompute the layer in the backward pass.
      adapters: Adapter of each row, int32 [B, T] or [B, 1]; see `linear.choose_adapters`.
    Returns:
      Rows [B, T, D], and the auxiliary result of `attend`.
    """
    graph, params = nnx.split(layer)
    run = functools.partial(_run_split, graph, attention_of, gather)
    return (jax.checkpoint(run) if remat else run)(params, x, angles, adapters, *seen)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _run_split(graph, attention_of, gather, params, x, angles, adapters, *seen):
    layer = nnx.merge(graph, params)
    linear.choose_adapters(layer, adapters)
    if gather:
        layer = parameters.gathered(layer, layer.sharding)
    return layer(x, angles, attention_of(layer, *seen))


def join_projections(model: nnx.Module) -> None:
    """Joins projections that read the same rows, in all layers of a model for decoding, in place.

    The model's outputs stay the same, computed by fewer and larger products. Afterwards the model
    can be neither trained nor saved, since checkpoints and training expect separate projections.
    Layers are joined one at a time, so that at most one has its weights in memory twice.

    Args:
      model: Model with weights, or abstract. Joined projections are left unchanged.
    """
    for _, module in list(nnx.iter_modules(model)):
        if hasattr(module, "join_projections"):
            module.join_projections()


def use_panels(model: nnx.Module) -> None:
    """Stores the kernels of linear maps in panels where a C++ kernel multiplies them, in place.

    The model's outputs stay the same. Afterwards it can be neither trained nor saved, as after
    `join_projections`.

    Args:
      model: Model with weights, or abstract.
    """
    for path, module in list(nnx.iter_modules(model)):
        if isinstance(module, Linear) and path[-1] not in _READ_AS_MATRICES:
            module.use_panels()
