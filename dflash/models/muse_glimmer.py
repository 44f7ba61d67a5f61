"""Muse Glimmer: windows, gated attention, norms around each branch, and layers without rotation."""

from typing import Any

import jax
import jax.numpy as jnp

from dflash.layers.attention import GatedAttention
from dflash.layers.linear import Float32RMSNorm, RMSNorm, UnscaledRMSNorm, ZeroCenteredRMSNorm
from dflash.layers.transformer import grouped_attention
from dflash.models.config import MuseGlimmerArchitecture
from dflash.models.decoder import Decoder
from dflash.models.gemma3 import GemmaLayer
from dflash.models.language_model import LanguageModel


class MuseGlimmerLayer(GemmaLayer):
    """Gemma layer whose norms behind the branches have an epsilon of their own."""

    def __init__(self, arch: MuseGlimmerArchitecture, *, norm_class: type[RMSNorm], **options):
        del norm_class  # That of the norm behind the last layer.
        super().__init__(arch, norm_class=ZeroCenteredRMSNorm, **options)
        self.post_attention_layernorm.eps = arch.post_norm_eps
        self.post_feedforward_layernorm.eps = arch.post_norm_eps


class MuseGlimmerText(Decoder):
    """Target family `MuseGlimmerForCausalLM`.

    Source: transformers 5.24, models/muse_glimmer/modeling_muse_glimmer.py.
    """

    hf_architectures = ("MuseGlimmerForCausalLM",)
    hf_model_type = "muse_glimmer_text"
    qk_norm = True
    norm_class = Float32RMSNorm
    layer_class = MuseGlimmerLayer
    architecture_class = MuseGlimmerArchitecture

    def make_attention(self, i, **build) -> GatedAttention:
        arch = self.arch
        return grouped_attention(
            arch,
            GatedAttention,
            qk_norm=True,
            norm_class=UnscaledRMSNorm,
            scale=arch.qk_scale_factor * arch.head_dim**-0.5,  # Rotation keeps the factor of q.
            window=arch.window(i),
            rotated=arch.layer_rope_theta[i] != 0,
            **build,
        )

    def embed(self, tokens: jax.Array) -> jax.Array:
        """Returns normalized embeddings [B, T, D]; images and videos have that of token 0."""
        arch = self.arch
        is_text = (tokens != arch.image_token_id) & (tokens != arch.video_token_id)
        norm = UnscaledRMSNorm(arch.hidden_size, arch.rms_norm_eps)
        return norm(super().embed(jnp.where(is_text, tokens, 0)))

    def finish_logits(self, products: jax.Array) -> jax.Array:
        """Returns logits, scaled and bounded."""
        _, factor, bound = self.arch.lent
        return bound * jnp.tanh(products * factor / bound)

    @classmethod
    def config_to_hf(cls, arch: MuseGlimmerArchitecture) -> dict[str, Any]:
        config = super().config_to_hf(arch)
        return config | {"hidden_activation": config.pop("hidden_act")}


class MuseGlimmer(LanguageModel, MuseGlimmerText):
    """Language model of `MuseGlimmerForConditionalGeneration`, as the published checkpoint is."""

    hf_architectures = ("MuseGlimmerForConditionalGeneration",)
    hf_model_type = "muse_glimmer"
    text_class = MuseGlimmerText
    outer_fields = ("tie_word_embeddings", "image_token_id", "video_token_id")
    tower_names = ("model.vision_tower.*", "model.vision_adapter.*", "model.vision_projection.*")
