"""Names of MaxText's decoder, with layers stacked or one by one.

Source: maxtext/checkpoint_conversion/utils/param_mapping.py of maxtext 0.2.5.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from dflash import errors
from dflash.checkpoints.namings.origin import LAYER_AXIS, Origin, heads_apart, rename


class MaxTextNames:
    """Names of MaxText's decoder; layers are stacked (`scan_layers`) or one by one.

    MaxText rotates adjacent numbers of a head where Hugging Face rotates its halves, and stores
    queries divided by the root of the head's size, in the families with
    `maxtext_interleaves_heads`.
    """

    _RULES = (
        (r"embed_tokens\.embedding", "token_embedder.embedding"),
        (r"norm\.scale", "decoder.decoder_norm.scale"),
        (r"lm_head\.kernel", "decoder.logits_dense.kernel"),
        (r"layers\.(\d+)\.self_attn\.q_(proj\.kernel|norm\.scale)", r"\1|self_attention.query_\2"),
        (r"layers\.(\d+)\.self_attn\.k_(proj\.kernel|norm\.scale)", r"\1|self_attention.key_\2"),
        (r"layers\.(\d+)\.self_attn\.v_(proj\.kernel)", r"\1|self_attention.value_\2"),
        (r"layers\.(\d+)\.self_attn\.o_(proj\.kernel)", r"\1|self_attention.out_\2"),
        (r"layers\.(\d+)\.mlp\.gate_proj\.kernel", r"\1|mlp.wi_0.kernel"),
        (r"layers\.(\d+)\.mlp\.up_proj\.kernel", r"\1|mlp.wi_1.kernel"),
        (r"layers\.(\d+)\.mlp\.down_proj\.kernel", r"\1|mlp.wo.kernel"),
        (r"layers\.(\d+)\.mlp\.gate\.kernel", r"\1|moe_block.gate.kernel"),
        (r"layers\.(\d+)\.mlp\.experts\.gate_proj\.kernel", r"\1|moe_block.wi_0"),
        (r"layers\.(\d+)\.mlp\.experts\.up_proj\.kernel", r"\1|moe_block.wi_1"),
        (r"layers\.(\d+)\.mlp\.experts\.down_proj\.kernel", r"\1|moe_block.wo"),
        (r"layers\.(\d+)\.input_layernorm\.scale", r"\1|pre_self_attention_layer_norm.scale"),
        (
            r"layers\.(\d+)\.post_attention_layernorm\.scale",
            r"\1|post_self_attention_layer_norm.scale",
        ),
    )

    def __init__(self, module: nnx.Module, flat: Mapping[str, Any], *, stacked: bool | None = None):
        """Creates the naming.

        Args:
          flat: Arrays of the tree by dotted path; empty for a tree that is about to be written.
          stacked: Whether layers are stacked; None if the tree shows it.
        """
        self._interleaves = module.maxtext_interleaves_heads
        if self._interleaves is None or len({type(layer.mlp) for layer in module.layers}) > 1:
            raise errors.CheckpointError(
                f"weights: MaxText's form of {module.hf_architectures[0]} is not supported"
            )
        first = next((name for name in flat if name.endswith("token_embedder.embedding")), "")
        self._prefix = first.removesuffix("token_embedder.embedding")
        self._arch = module.arch
        start = f"{self._prefix}decoder.layers."
        self._stacked = any(name.startswith(start) for name in flat) if stacked is None else stacked

    def origin(self, path: str, shape: tuple[int, ...]) -> Origin:
        """Returns the array of a parameter, and its layer in the array if layers are stacked."""
        layer, _, name = rename(self._RULES, path).rpartition("|")
        form, stored = self._form(path, tuple(shape))
        if not layer:
            return Origin((self._prefix + name,), (stored,), form)
        name = name.replace("_proj.", ".")
        if not self._stacked:
            return Origin((f"{self._prefix}decoder.layers_{layer}.{name}",), (stored,), form)
        stored = (*stored[:LAYER_AXIS], self._arch.num_hidden_layers, *stored[LAYER_AXIS:])
        return Origin((f"{self._prefix}decoder.layers.{name}",), (stored,), form, int(layer))

    def ignores(self, name: str) -> bool:
        """Returns False: the decoder has no other arrays."""
        return False

    def _form(self, path: str, shape: tuple[int, ...]) -> tuple["MaxTextForm", tuple[int, ...]]:
        """Returns the form of a parameter and its shape in the tree, without layers."""
        size, attention = self._arch.head_dim, re.search(r"self_attn\.([qk])_proj", path)
        interleaved = self._interleaves and attention is not None
        scale = size**0.5 if interleaved and attention[1] == "q" else 1.0
        return MaxTextForm(shape, interleaved, scale), heads_apart(path, shape, size)


@dataclasses.dataclass(frozen=True)
class MaxTextForm:
    """Converts between an array of MaxText, of one layer, and a parameter.

    Attributes:
      interleaved: The halves of each head alternate in the array.
      scale: Factor from the array to the parameter.
    """

    shape: tuple[int, ...]
    interleaved: bool = False
    scale: float = 1.0

    @property
    def keeps_order(self) -> bool:
        """Returns whether the result has the numbers of one array, in order."""
        return not self.interleaved and self.scale == 1.0

    def __call__(self, array: jax.Array) -> jax.Array:
        if self.interleaved:
            array = jnp.concatenate([array[..., ::2], array[..., 1::2]], axis=-1)
        if self.scale != 1.0:
            array = (array.astype(jnp.float32) * self.scale).astype(array.dtype)
        return array.reshape(self.shape)

    def inverse(self, parameter: jax.Array, stored: tuple[int, ...]) -> jax.Array:
        """Returns the array of a parameter, in its shape in the tree."""
        array = parameter.reshape(stored)
        if self.scale != 1.0:
            array = (array.astype(jnp.float32) / self.scale).astype(array.dtype)
        if self.interleaved:
            halves = jnp.split(array, 2, axis=-1)
            array = jnp.stack(halves, axis=-1).reshape(stored)
        return array
