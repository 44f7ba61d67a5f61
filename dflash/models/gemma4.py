"""Gemma 4: Gemma 3 with wider heads and shared keys and values in full layers, and experts."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dflash import errors
from dflash.checkpoints import defaults_config, hf_config
from dflash.checkpoints.tensor_map import Source, Stack
from dflash.layers import moe, rotary
from dflash.layers.attention import Attention
from dflash.layers.linear import Float32RMSNorm
from dflash.layers.mlp import gated
from dflash.layers.moe import Router, Routing
from dflash.layers.transformer import grouped_attention
from dflash.models.config import FULL, SLIDING, Gemma4Architecture
from dflash.models.gemma3 import ROPE, Gemma, GemmaLayer
from dflash.models.language_model import LanguageModel
from dflash.parallel import parameters

_BIDIRECTIONAL, _BY_LAYER = "use_bidirectional_attention", "per_layer_config"
_PROPORTIONAL = "proportional"  # Rotary embedding of the first pairs of a head.
_EXPERT_FORM = moe.ExpertForm(functools.partial(gated, activation="gelu_pytorch_tanh"))
_EXPERT_NORMS = (
    "post_feedforward_layernorm_1",
    "pre_feedforward_layernorm_2",
    "post_feedforward_layernorm_2",
)
# Parameters whose names in checkpoints are not those of `Decoder`.
_NAMES = {
    ".router.kernel": ".router.proj.weight",
    ".router.norm.scale": ".router.scale",
    ".router.per_expert_scale": ".router.per_expert_scale",
    ".layer_scalar": ".layer_scalar",
}


class SharedValueAttention(Attention):
    """Attention whose values come from the projection of keys, before their norm and rotation."""

    def __init__(self, width: int, **options):
        super().__init__(width, **options)
        del self.v_proj
        self.products = ("q", "k")

    def project(self, x, cos_sin):
        product = self.k_proj(x)
        (queries,) = self._heads(self.q_proj(x), "q", cos_sin)
        return (queries, *(self._heads(product, part, cos_sin)[0] for part in "kv"))


class ScaledLayer(GemmaLayer):
    """Gemma layer whose output is multiplied by a learned number."""

    def __init__(self, arch: Gemma4Architecture, **options):
        super().__init__(arch, **options)
        build = {name: options[name] for name in ("dtype", "sharding")}
        self.layer_scalar = parameters.declare((1,), (None,), stddev=None, **build)

    def __call__(self, x, angles, attend):
        x, auxiliary = super().__call__(x, angles, attend)
        return x * self.layer_scalar[...], auxiliary


class ScaledRouter(Router):
    """Router that normalizes its rows, and scales the weights of each expert."""

    def __init__(self, arch: Gemma4Architecture, **build):
        super().__init__(arch.hidden_size, Routing(arch.num_experts, arch.top_k_experts), **build)
        self.norm = Float32RMSNorm(arch.hidden_size, arch.rms_norm_eps, **build)
        count = (arch.num_experts,)
        self.per_expert_scale = parameters.declare(count, (None,), stddev=None, **build)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        experts, weights = super().__call__(self.norm(x) * x.shape[-1] ** -0.5)
        return experts, weights * self.per_expert_scale[...].astype(jnp.float32)[experts]


class ExpertLayer(ScaledLayer):
    """Layer with an MLP and routed experts side by side, each with norms of its own."""

    def __init__(self, arch: Gemma4Architecture, **options):
        super().__init__(arch, **options)
        build = {name: options[name] for name in ("dtype", "sharding")}
        self.router = ScaledRouter(arch, **build)
        sizes = arch.hidden_size, arch.moe_intermediate_size
        self.experts = moe.Experts(self.router.routing, *sizes, _EXPERT_FORM, **build)
        for name in _EXPERT_NORMS:
            setattr(self, name, Float32RMSNorm(arch.hidden_size, arch.rms_norm_eps, **build))

    def mlp_norm(self, x):
        """Returns the residual stream, which each branch normalizes on its own."""
        return x

    def mlp_branch(self, x):
        """Returns the normalized sum of the outputs of MLP and experts."""
        dense = self.mlp(self.pre_feedforward_layernorm(x))
        routed = self.experts(self.pre_feedforward_layernorm_2(x), *self.router(x))
        total = self.post_feedforward_layernorm_1(dense) + self.post_feedforward_layernorm_2(routed)
        return self.post_feedforward_layernorm(total)


class Gemma4Text(Gemma):
    """Target family `Gemma4ForCausalLM`: the models without embeddings for each layer.

    Source: transformers 5.24, models/gemma4/modeling_gemma4.py.
    """

    hf_architectures = ("Gemma4ForCausalLM",)
    hf_model_type = "gemma4_text"
    norm_class = Float32RMSNorm
    architecture_class = Gemma4Architecture

    def make_attention(self, i, **build) -> Attention:
        arch = self.arch
        is_sliding = arch.is_sliding(i)
        shares = arch.attention_k_eq_v and not is_sliding
        return grouped_attention(
            arch,
            SharedValueAttention if shares else Attention,
            num_kv_heads=arch.kv_heads(i),
            head_dim=arch.head_dim if is_sliding else arch.global_head_dim,
            qk_norm=True,
            v_norm=True,
            norm_class=self.norm_class,
            scale=1.0,
            window=arch.window(i),
            **build,
        )

    def rotary_angles(self, positions: jax.Array) -> dict[str, Any]:
        """Returns cos and sin by kind of layer; full layers rotate the first pairs of a head."""
        arch = self.arch
        freqs = rotary.frequencies(arch.global_head_dim, arch.rope_theta, arch.rope_scaling)
        rotated = int(arch.partial_rotary_factor * arch.global_head_dim) // 2
        freqs = np.where(np.arange(len(freqs)) < rotated, freqs, 0)
        local = rotary.frequencies(arch.head_dim, arch.rope_local_base_freq)
        return {
            FULL: rotary.angles_at(positions, freqs),
            SLIDING: rotary.angles_at(positions, local),
        }

    def make_layer(self, i: int, **build) -> nnx.Module:
        kind = ExpertLayer if self.arch.enable_moe_block else ScaledLayer
        modules = {"attention": self.make_attention(i, **build), "mlp": self.make_mlp(i, **build)}
        return kind(self.arch, norm_class=self.norm_class, **modules, **build)

    def checkpoint_name(self, path: str) -> Source:
        names = moe.stacked_names(path, self.arch.num_experts)
        if names is not None:
            return Stack(tuple(f"model.{name}" for name in names))
        for name, hf_name in _NAMES.items():
            if path.endswith(name):
                return f"model.{path.removesuffix(name)}{hf_name}"
        return super().checkpoint_name(path)

    @classmethod
    def architecture_from_hf(cls, config: Mapping[str, Any]) -> Gemma4Architecture:
        """Reads config.json, which may state the sizes of full layers one by one."""
        if config.get(_BIDIRECTIONAL) == "all":
            raise errors.CheckpointError(
                f"{hf_config.FILE}: {_BIDIRECTIONAL}: 'all' is not supported, only null or 'vision'"
            )
        config = {**defaults_config.of(config, cls.hf_model_type), **config}
        config |= _sizes_of_full_layers(config)
        rope = dict(hf_config.read_group(config, ROPE))
        full = dict(hf_config.read_group(rope, FULL))
        if full:
            config["partial_rotary_factor"] = full.get("partial_rotary_factor", 1.0)
        if full.get("rope_type") == _PROPORTIONAL:
            full["rope_type"] = "linear" if "factor" in full else "default"
            config[ROPE] = rope | {FULL: full}
        return super().architecture_from_hf(config)

    @classmethod
    def config_to_hf(cls, arch: Gemma4Architecture) -> dict[str, Any]:
        config = super().config_to_hf(arch)
        full = config[ROPE][FULL]
        full["partial_rotary_factor"] = config.pop("partial_rotary_factor")
        if full["rope_type"] in ("default", "linear"):
            full["rope_type"] = _PROPORTIONAL
        return config | {"hidden_size_per_layer_input": 0}


class Gemma4(LanguageModel, Gemma4Text):
    """Language model of `Gemma4ForConditionalGeneration`, as the published checkpoints are."""

    hf_architectures = ("Gemma4ForConditionalGeneration",)
    hf_model_type = "gemma4"
    text_class = Gemma4Text
    tower_names = (
        *("model.vision_tower.*", "model.embed_vision.*"),
        *("model.audio_tower.*", "model.embed_audio.*"),
    )


def _sizes_of_full_layers(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of full layers from `per_layer_config`, which transformers writes.

    It names the layers whose sizes differ from those of the whole model.
    """
    layers = hf_config.read_group(config, _BY_LAYER)
    if _BY_LAYER not in config:
        return {}
    sizes = hf_config.read_group(layers, next(iter(layers), ""))
    return {
        "global_head_dim": sizes.get("head_dim", config.get("head_dim")),
        "num_global_key_value_heads": sizes.get("num_key_value_heads"),
    }
