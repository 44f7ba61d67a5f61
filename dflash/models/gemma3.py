"""Gemma 3: windows in most layers, norms before and after each branch, scaled embeddings."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from dflash.checkpoints import defaults_config, hf_config
from dflash.layers import rotary
from dflash.layers.attention import Attention
from dflash.layers.linear import RMSNorm, ZeroCenteredRMSNorm
from dflash.layers.mlp import Mlp
from dflash.layers.transformer import TransformerLayer, grouped_attention
from dflash.models.config import FULL, SLIDING, Gemma3Architecture, WindowedArchitecture
from dflash.models.decoder import Decoder
from dflash.models.language_model import LanguageModel

ROPE = "rope_parameters"


class GemmaLayer(TransformerLayer):
    """Transformer layer with norms before and after each branch."""

    def __init__(self, arch: WindowedArchitecture, *, norm_class: type[RMSNorm], **options):
        super().__init__(arch, norm_class=norm_class, **options)
        build = {name: options[name] for name in ("dtype", "sharding")}
        self.pre_feedforward_layernorm = norm_class(arch.hidden_size, arch.rms_norm_eps, **build)
        self.post_feedforward_layernorm = norm_class(arch.hidden_size, arch.rms_norm_eps, **build)

    def attention_branch(self, normed, angles, attend):
        branch, auxiliary = super().attention_branch(normed, angles, attend)
        return self.post_attention_layernorm(branch), auxiliary

    def mlp_norm(self, x):
        return self.pre_feedforward_layernorm(x)

    def mlp_branch(self, normed):
        return self.post_feedforward_layernorm(super().mlp_branch(normed))


class Gemma(Decoder):
    """Base of the Gemma families."""

    qk_norm = True
    layer_class = GemmaLayer

    def make_mlp(self, i, **build) -> nnx.Module:
        arch = self.arch
        return Mlp(
            arch.hidden_size, arch.intermediate_size, activation="gelu_pytorch_tanh", **build
        )

    def rotary_angles(self, positions: jax.Array) -> dict[str, Any]:
        local = dataclasses.replace(
            self.arch, rope_theta=self.arch.rope_local_base_freq, rope_scaling=None
        )
        return {FULL: rotary.angles(positions, self.arch), SLIDING: rotary.angles(positions, local)}

    def layer_angles(self, i, angles):
        return angles[SLIDING if self.arch.is_sliding(i) else FULL]

    def embed(self, tokens: jax.Array) -> jax.Array:
        """Returns embeddings [B, T, D], scaled by the square root of D in their dtype."""
        scale = jnp.asarray(self.arch.hidden_size**0.5, self.dtype)
        return super().embed(tokens) * scale

    def finish_logits(self, products: jax.Array) -> jax.Array:
        """Returns logits, bounded if the architecture says so."""
        bound = self.arch.final_logit_softcapping
        return products if bound is None else bound * jnp.tanh(products / bound)

    @classmethod
    def architecture_from_hf(cls, config: Mapping[str, Any]) -> WindowedArchitecture:
        """Reads config.json, whose rotary embedding may be stated by kind of layer."""
        config = {**defaults_config.of(config, cls.hf_model_type), **config}
        config["layer_types"] = config.get("layer_types") or _pattern(config)
        rope = hf_config.read_group(config, ROPE)
        if SLIDING in rope or FULL in rope:
            config[ROPE] = hf_config.read_group(rope, FULL)
            local = hf_config.read_group(rope, SLIDING)
            if "rope_theta" in local:
                config["rope_local_base_freq"] = local["rope_theta"]
        return hf_config.read_architecture(config, cls.architecture_class)

    @classmethod
    def config_to_hf(cls, arch: WindowedArchitecture) -> dict[str, Any]:
        config = super().config_to_hf(arch)
        full = {"rope_type": "default"} | (config.pop("rope_scaling") or {})
        full["rope_theta"] = config.pop("rope_theta")
        local = {"rope_type": "default", "rope_theta": config.pop("rope_local_base_freq")}
        del config["hidden_act"]
        return config | {
            "hidden_activation": "gelu_pytorch_tanh",
            ROPE: {FULL: full, SLIDING: local},
        }


class Gemma3Text(Gemma):
    """Target family `Gemma3ForCausalLM`.

    Source: Gemma 3 technical report, arXiv 2503.19786.
    """

    hf_architectures = ("Gemma3ForCausalLM",)
    hf_model_type = "gemma3_text"
    norm_class = ZeroCenteredRMSNorm
    architecture_class = Gemma3Architecture

    def make_attention(self, i, **build) -> Attention:
        return grouped_attention(
            self.arch,
            qk_norm=True,
            norm_class=self.norm_class,
            scale=self.arch.query_pre_attn_scalar**-0.5,
            window=self.arch.window(i),
            **build,
        )


class Gemma3(LanguageModel, Gemma3Text):
    """Language model of `Gemma3ForConditionalGeneration`, as checkpoints of 4B and more are."""

    hf_architectures = ("Gemma3ForConditionalGeneration",)
    hf_model_type = "gemma3"
    text_class = Gemma3Text
    text_prefix = "language_model.model."
    tower_names = ("vision_tower.*", "multi_modal_projector.*")


def _pattern(config: Mapping[str, Any]) -> list[str]:
    """Returns the kinds of layers of older files, which state the interval of full ones."""
    fields = hf_config.read_fields(config, _Pattern)
    layers = range(1, fields.num_hidden_layers + 1)
    return [SLIDING if i % fields.sliding_window_pattern else FULL for i in layers]


@dataclasses.dataclass(frozen=True)
class _Pattern:
    num_hidden_layers: int
    sliding_window_pattern: int = 6
