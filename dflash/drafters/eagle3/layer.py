"""Transformer layers of EAGLE-3, with attention for chains, trees and unrolled training steps."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dflash.config.schema import TargetArchitecture
from dflash.drafters.eagle3_config import Eagle3Shape
from dflash.kernels import implementation
from dflash.kernels.block_attention import block_attention, branch_attention
from dflash.kernels.causal_attention import causal_attention
from dflash.kernels.unrolled_attention import unrolled_attention
from dflash.layers.attention import Attend, Attention
from dflash.layers.cache import batch_axes
from dflash.layers.linear import RMSNorm
from dflash.layers.transformer import TransformerLayer, grouped_attention

KeysValues = tuple[jax.Array, jax.Array]


class DraftLayer(TransformerLayer):
    """Transformer layer whose attention has the forms of drafting and of training.

    Attributes:
      window: Positions that a row sees, its own included; None for all.
    """

    def __init__(
        self, arch: TargetArchitecture, *, attention: Attention, window: int | None, **build
    ):
        super().__init__(arch, attention=attention, **build)
        self.window = window

    def attend_context(self, cached: KeysValues, length: jax.Array) -> Callable[..., jax.Array]:
        """Returns the attention of a chain: over the cache and, causally, over the new rows.

        Args:
          cached: Keys and values of the layer, each [B, K, L, H].
          length: int32 [B]; number of cached positions.
        Returns:
          A function (queries, keys, values) -> outputs.
        """
        rows, kv_rows, stored, batch = self._layouts(length.shape[0])
        chosen = implementation.on(self.sharding)
        return self._sharded(
            functools.partial(
                block_attention, causal=True, window=self.window, implementation=chosen
            ),
            (rows, kv_rows, kv_rows, stored, stored, (batch,)),
            (*cached, length),
        )

    def attend_branches(self, cached: KeysValues, length: jax.Array) -> Callable[..., jax.Array]:
        """Returns the attention of a tree: over the cache, and over the rows in a mask.

        The arguments are those of `attend_context`.

        Returns:
          A function (queries, keys, values, visible) -> outputs. Rows of `keys` and `values` are
          those of all levels, and `visible` is the mask bool [B, queries, keys].
        """
        rows, kv_rows, stored, batch = self._layouts(length.shape[0])
        chosen = implementation.on(self.sharding)
        return self._sharded(
            functools.partial(branch_attention, implementation=chosen),
            (rows, kv_rows, kv_rows, (batch, None, None), stored, stored, (batch,)),
            (*cached, length),
        )

    def attend_steps(self, pairs: Sequence[KeysValues], segment_ids: jax.Array) -> Attend:
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


class EagleLayer(DraftLayer):
    """First layer of the drafter, whose attention reads embeddings and features, concatenated."""

    def __init__(self, shape: Eagle3Shape, **build):
        arch, width = shape.decoder, shape.decoder.hidden_size
        attention = grouped_attention(
            dataclasses.replace(arch, hidden_size=2 * width), output_width=width,
            **attention_form(shape), **build,
        )  # fmt: skip
        super().__init__(arch, attention=attention, window=shape.layer_windows[0], **build)
        self.hidden_norm = RMSNorm(width, arch.rms_norm_eps, **build)
        self.norm_before_residual = shape.norm_before_residual

    def __call__(
        self,
        x: tuple[jax.Array, jax.Array],
        angles: tuple[jax.Array, jax.Array],
        attend: Attend,
    ) -> tuple[jax.Array, Any]:
        """Runs the layer.

        Args:
          x: Features, or outputs of an earlier step; and the embeddings of the tokens that follow.
            Both are [B, T, D].
          angles: Rotary cos and sin of the rows' positions.
          attend: Function (queries, keys, values) -> (attention output, any other result).
        Returns:
          Outputs [B, T, D], and the second result of `attend`.
        """
        features, embedded = x
        normed = self.hidden_norm(features)
        rows = jnp.concatenate([self.input_layernorm(embedded), normed], axis=-1)
        branch, auxiliary = self.attention_branch(rows, angles, attend)
        batch, _ = batch_axes(features.shape[0], self.sharding)
        out = (normed if self.norm_before_residual else features) + branch
        out = self.sharding.constrain(out, batch, None, None)
        out = out + self.mlp_branch(self.mlp_norm(out))
        return self.sharding.constrain(out, batch, None, None), auxiliary


def attention_form(shape: Eagle3Shape) -> dict[str, bool]:
    """Returns the arguments of `Attention` that all layers of a drafter share."""
    bias = shape.attention_bias
    return {"qk_norm": shape.qk_norm, "bias": bias, "output_bias": bias}


def make_layer(shape: Eagle3Shape, i: int, **build) -> DraftLayer:
    """Returns layer i of a drafter, 0 < i."""
    attention = grouped_attention(shape.decoder, **attention_form(shape), **build)
    return DraftLayer(shape.decoder, attention=attention, window=shape.layer_windows[i], **build)
