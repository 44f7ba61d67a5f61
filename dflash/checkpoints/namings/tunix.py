"""Names of the models of Tunix, LoRA included.

Source: tunix/models/{qwen2,qwen3,llama3,gemma3,gemma4}/ of google-tunix 0.1.7.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from dflash import errors
from dflash.checkpoints.namings.origin import Origin, heads_apart, rename

LORA_A, LORA_B = "_lora_a", "_lora_b"
_TUNIX_RULES = (
    (r"embed_tokens\.embedding", "embedder.input_embedding"),
    (r"norm\.scale", "final_norm.w"),
    (r"lm_head\.kernel", "lm_head.w"),
    (r"(layers\.\d+)\.self_attn\.(\w_proj)\.kernel", r"\1.attn.\2.w"),
    (r"(layers\.\d+)\.self_attn\.(\w)_proj\.bias", r"\1.attn.\2_bias"),
    (r"(layers\.\d+)\.self_attn\.(\w_norm)\.scale", r"\1.attn.\2.w"),
    (r"(layers\.\d+\.\w+_layernorm)\.scale", r"\1.w"),
    (r"(layers\.\d+\.mlp\.\w+_proj\.kernel)", r"\1"),
    (r"(layers\.\d+\.mlp)\.gate\.kernel", r"\1.router.kernel"),
    (r"(layers\.\d+\.mlp)\.experts\.(\w+_proj)\.kernel", r"\1.\2"),
)
_GEMMA_RULES = (
    (r"norm\.scale", "final_norm.scale"),
    (r"(layers\.\d+)\.self_attn\.q_norm\.scale", r"\1.attn._query_norm.scale"),
    (r"(layers\.\d+)\.self_attn\.k_norm\.scale", r"\1.attn._key_norm.scale"),
    (r"(layers\.\d+)\.self_attn\.([qkv])_proj\.kernel", r"\1.attn.\2_einsum.w"),
    (r"(layers\.\d+)\.self_attn\.o_proj\.kernel", r"\1.attn.attn_vec_einsum.w"),
    (r"(layers\.\d+)\.input_layernorm\.scale", r"\1.pre_attention_norm.scale"),
    (r"(layers\.\d+)\.post_attention_layernorm\.scale", r"\1.post_attention_norm.scale"),
    (r"(layers\.\d+)\.(\w+)_feedforward_layernorm\.scale", r"\1.\2_ffw_norm.scale"),
    *_TUNIX_RULES,
)
_GEMMA4_RULES = (
    (r"(layers\.\d+)\.layer_scalar", r"\1.skip_scale"),
    (r"(layers\.\d+)\.post_feedforward_layernorm_1\.scale", r"\1.dense_post_ffw_norm.scale"),
    (r"(layers\.\d+)\.(\w+)_feedforward_layernorm_2\.scale", r"\1.moe_\2_ffw_norm.scale"),
    (r"(layers\.\d+)\.router\.kernel", r"\1.moe.router_logits"),
    (r"(layers\.\d+)\.router\.norm\.scale", r"\1.moe.router_scale"),
    (r"(layers\.\d+)\.router\.(per_expert_scale)", r"\1.moe.\2"),
    (r"(layers\.\d+)\.experts\.(gate|up)_proj\.kernel", r"\1.moe.\2_einsum"),
    (r"(layers\.\d+)\.experts\.down_proj\.kernel", r"\1.moe.linear"),
)
# Arrays of several parameters, in order.
_JOINED_HEADS = ("kv", "qkv")
_JOINED_EXPERTS = ("gate", "up")


class TunixNames:
    """Names of the models of Tunix, whose projections to heads keep one dimension per head.

    Gemma's projections to heads are stored as [N, D, H], and keys and values, or all three, in one
    array; its experts' projections to gate and up as one array [E, 2, F, D].
    """

    def __init__(self, module: nnx.Module, flat: Mapping[str, Any], lora_alpha: float | None):
        self._arch, self._layers = module.arch, module.layers
        gemma = (*_GEMMA4_RULES, *_GEMMA_RULES)
        self._rules = gemma if "final_norm.scale" in flat else _TUNIX_RULES
        self._names, self._lora_alpha = flat.keys(), lora_alpha
        ranks = {name[: -len(LORA_A)]: array for name, array in flat.items() if LORA_A in name}
        self._ranks = {name: array.shape[-1] for name, array in ranks.items()}
        if self._ranks and lora_alpha is None:
            raise errors.CheckpointError(
                f"weights: {min(self._ranks)}{LORA_A!s}: LoRA parameters need their scale; give "
                "lora_alpha"
            )

    def origin(self, path: str, shape: tuple[int, ...]) -> Origin:
        """Returns the array of a parameter, with those of its LoRA if it has one."""
        shape, name = tuple(shape), rename(self._rules, path)
        stored, form = heads_apart(path, shape, self._head_dim(path)), TunixForm(shape)
        heads = re.fullmatch(r"(.*\.)([qkv])_einsum\.w", name)
        experts = re.fullmatch(r"(.*\.moe\.)(gate|up)_einsum", name)
        if heads:
            stored, form = (stored[1], stored[0], stored[2]), TunixForm(shape, swapped=(0, 1))
            for joined in _JOINED_HEADS:
                name_of_all = f"{heads[1]}{joined}_einsum.w"
                if heads[2] in joined and name_of_all in self._names:
                    name, stored = name_of_all, (len(joined), *stored)
                    form = dataclasses.replace(form, part=(0, joined.index(heads[2])))
        elif experts:
            name, stored = f"{experts[1]}gating_einsum", (shape[0], 2, shape[2], shape[1])
            part = 1, _JOINED_EXPERTS.index(experts[2])
            form = TunixForm(shape, part=part, swapped=(1, 2))
        if name not in self._ranks:
            return Origin((name,), (stored,), form)
        form = dataclasses.replace(form, lora_scale=self._lora_alpha / self._ranks[name])
        return Origin((name, name + LORA_A, name + LORA_B), (stored, None, None), form)

    def ignores(self, name: str) -> bool:
        """Returns False: the models have no other arrays."""
        return False

    def _head_dim(self, path: str) -> int:
        """Returns the width of a head, which layers of one model may not share."""
        layer = re.match(r"layers\.(\d+)\.self_attn\.", path)
        attention = self._layers[int(layer[1])].self_attn if layer else None
        return getattr(attention, "head_dim", self._arch.head_dim)


@dataclasses.dataclass(frozen=True)
class TunixForm:
    """Converts an array of Tunix to a parameter.

    Attributes:
      part: Dimension that counts the parameters of an array, and the parameter's index in it; None
        for an array of its own.
      swapped: Two dimensions of the array, without that of parts, to swap; None to keep the order.
      lora_scale: Factor of the product of LoRA parameters.
    """

    shape: tuple[int, ...]
    part: tuple[int, int] | None = None
    swapped: tuple[int, int] | None = None
    lora_scale: float = 0.0

    @property
    def keeps_order(self) -> bool:
        """Returns whether the result has the numbers of one array, in order."""
        return self.part is None and self.swapped is None and not self.lora_scale

    def __call__(self, array: jax.Array, *lora: jax.Array) -> jax.Array:
        if lora:
            array = array + self.lora_scale * self._product(*lora).reshape(array.shape)
        if self.part is not None:
            axis, index = self.part
            array = jax.lax.index_in_dim(array, index, axis, keepdims=False)
        if self.swapped is not None:
            array = array.swapaxes(*self.swapped)
        return array.reshape(self.shape)

    def _product(self, a: jax.Array, b: jax.Array) -> jax.Array:
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        product = jnp.tensordot(a, b, axes=1, precision="highest")
        return product if self.swapped is None else jnp.moveaxis(product, 0, -2)
