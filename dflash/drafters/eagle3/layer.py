"""Transformer layer of EAGLE-3, with attention for chains, trees and unrolled training steps."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from dflash.config.schema import TargetArchitecture
from dflash.kernels import implementation
from dflash.kernels.block_attention import block_attention, branch_attention
from dflash.kernels.causal_attention import causal_attention
from dflash.kernels.unrolled_attention import unrolled_attention
from dflash.layers.attention import Attention
from dflash.layers.cache import StaticCache, batch_axes
from dflash.layers.linear import RMSNorm
from dflash.layers.mlp import Mlp
from dflash.layers.transformer import Attend
from dflash.parallel.sharding import Sharding


class EagleLayer(nnx.Module):
    """Transformer layer whose attention reads embeddings and features, concatenated."""

    def __init__(self, arch: TargetArchitecture, *, dtype: jnp.dtype, sharding: Sharding):
        build = {"dtype": dtype, "sharding": sharding}
        width, eps = arch.hidden_size, arch.rms_norm_eps
        self.input_layernorm = RMSNorm(width, eps, **build)
        self.hidden_norm = RMSNorm(width, eps, **build)
        self.self_attn = Attention(
            2 * width,
            num_heads=arch.num_attention_heads,
            num_kv_heads=arch.num_key_value_heads,
            head_dim=arch.head_dim,
            eps=eps,
            qk_norm=False,
            output_width=width,
            **build,
        )
        self.post_attention_layernorm = RMSNorm(width, eps, **build)
        self.mlp = Mlp(width, arch.intermediate_size, **build)
        self.sharding = sharding

    def __call__(
        self,
        features: jax.Array,
        embedded: jax.Array,
        cos_sin: tuple[jax.Array, jax.Array],
        attend: Attend,
    ) -> tuple[jax.Array, Any]:
        """Runs the layer.

        Args:
          features: Features, or outputs of an earlier step, [B, T, D].
          embedded: Embeddings of the following tokens, [B, T, D].
          cos_sin: Rotary cos and sin of the rows' positions.
          attend: Function (queries, keys, values) -> (attention output, any other result).
        Returns:
          Outputs [B, T, D], and the second result of `attend`.
        """
        batch, _ = batch_axes(features.shape[0], self.sharding)
        x = jnp.concatenate([self.input_layernorm(embedded), self.hidden_norm(features)], axis=-1)
        attended, auxiliary = attend(*self.self_attn.project(x, cos_sin))
        out = features + self.self_attn.output(attended)
        out = self.sharding.constrain(out, batch, None, None)
        out = out + self.mlp(self.post_attention_layernorm(out))
        return self.sharding.constrain(out, batch, None, None), auxiliary

    def attend_context(self, cache: StaticCache, length: jax.Array) -> Callable[..., jax.Array]:
        """Returns the attention of a chain: over the cache and, causally, over the new rows.

        It is a function (queries, keys, values) -> outputs, for a cache of `length` positions.
        """
        rows, kv_rows, stored, batch = self._layouts(length.shape[0])
        chosen = implementation.on(self.sharding)
        return self._sharded(
            functools.partial(block_attention, causal=True, implementation=chosen),
            (rows, kv_rows, kv_rows, stored, stored, (batch,)),
            (cache.keys[0], cache.values[0], length),
        )

    def attend_branches(self, cache: StaticCache, length: jax.Array) -> Callable[..., jax.Array]:
        """Returns the attention of a tree: over the cache, and over the rows in a mask.

        Returns:
          A function (queries, keys, values, visible) -> outputs. Rows of `keys` and `values` are
          those of all levels, and `visible` is the mask bool [B, queries, keys].
        """
        rows, kv_rows, stored, batch = self._layouts(length.shape[0])
        chosen = implementation.on(self.sharding)
        return self._sharded(
            functools.partial(branch_attention, implementation=chosen),
            (rows, kv_rows, kv_rows, (batch, None, None), stored, stored, (batch,)),
            (cache.keys[0], cache.values[0], length),
        )

    def attend_steps(
        self, pairs: Sequence[tuple[jax.Array, jax.Array]], segment_ids: jax.Array
    ) -> Attend:
        """Returns the attention of an unrolled training step.

        A row attends causally to the rows of the first step, and to its own row of every later
        step.

        Args:
          pairs: Keys and values [B, T, K, H] of each previous step.
          segment_ids: int32 [B, T]; rows of the same document have the same id.
        Returns:
          A function (queries, keys, values) -> (outputs, (keys, values)).
        """
        rows, kv_rows, _, batch = self._layouts(segment_ids.shape[0])
        if not pairs:
            chosen = implementation.for_platform(self.sharding.platform)
            causal = self._sharded(
                functools.partial(causal_attention, implementation=chosen),
                (rows, kv_rows, kv_rows, (batch, None)),
                (segment_ids,),
            )
            return lambda *rows: (causal(*rows), rows[1:])
        later = (batch, None, None, "kv_heads", None)
        unrolled = self._sharded(
            unrolled_attention,
            (rows, later, later, kv_rows, kv_rows, (batch, None)),
            (*pairs[0], segment_ids),
        )

        def attend(queries, keys, values):
            later_steps = zip(*pairs[1:], (keys, values), strict=True)
            stacked = [jnp.stack(steps, axis=2) for steps in later_steps]
            return unrolled(queries, *stacked), (keys, values)

        return attend

    def _layouts(self, batch: int):
        name, _ = batch_axes(batch, self.sharding)
        rows, kv_rows = (name, None, "heads", None), (name, None, "kv_heads", None)
        return rows, kv_rows, (name, "kv_heads", None, None), name

    def _sharded(self, function, layouts, fixed) -> Callable[..., jax.Array]:
        """Binds the last arrays of a kernel, which each device runs on its heads and sequences."""
        scale = self.self_attn.scale
        mapped = self.sharding.map(
            lambda *arrays: (function(*arrays, scale=scale),), layouts, layouts[:1]
        )
        return lambda *arrays: mapped(*arrays, *fixed)[0]
