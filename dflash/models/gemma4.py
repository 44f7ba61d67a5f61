"""Gemma 4: Gemma 3 with wider heads and shared keys and values in full layers."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from dflash import errors
from dflash.checkpoints import hf_config
from dflash.layers import rotary
from dflash.layers.attention import Attention
from dflash.layers.linear import Float32RMSNorm
from dflash.layers.transformer import grouped_attention
from dflash.models.gemma3 import ROPE, Gemma, GemmaLayer
from dflash.models.gemma4_config import Gemma4Architecture
from dflash.models.language_model import LanguageModel
from dflash.models.windows_config import FULL, SLIDING
from dflash.parallel import parameters

_BIDIRECTIONAL, _BY_LAYER = "use_bidirectional_attention", "per_layer_config"
_PROPORTIONAL = "proportional"  # Rotary embedding of the first pairs of a head.


class SharedValueAttention(Attention):
    """Attention whose values come from the projection of keys, before their norm and rotation."""

    def __init__(self, width: int, **options):
        super().__init__(width, **options)
        del self.v_proj
        self.products = ("q", "k")

    def project(self, x, cos_sin):
        """Projects rows to queries, keys and values; see `Attention`."""
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
        """Maps rows and returns the auxiliary result; see `TransformerLayer`."""
        x, auxiliary = super().__call__(x, angles, attend)
        return x * self.layer_scalar[...], auxiliary


class Gemma4Text(Gemma):
    """Target family `Gemma4ForCausalLM`: the models without embeddings for each layer.

    Source: transformers 5.24, models/gemma4/modeling_gemma4.py.
    """

    hf_architectures = ("Gemma4ForCausalLM",)
    hf_model_type = "gemma4_text"
    norm_class = Float32RMSNorm
    layer_class = ScaledLayer
    architecture_class = Gemma4Architecture

    def make_attention(self, i, **build) -> Attention:
        """Returns the attention of layer `i`, sliding or full."""
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

    def checkpoint_name(self, path: str) -> str:
        """Returns the checkpoint's name of a parameter; see `Decoder.checkpoint_name`."""
        return f"model.{path}" if path.endswith("layer_scalar") else super().checkpoint_name(path)

    @classmethod
    def architecture_from_hf(cls, config: Mapping[str, Any]) -> Gemma4Architecture:
        """Reads config.json, which may state the sizes of full layers one by one."""
        if config.get(_BIDIRECTIONAL) == "all":
            raise errors.CheckpointError(
                f"{hf_config.FILE}: {_BIDIRECTIONAL}: 'all' is not supported, only null or 'vision'"
            )
        config = {**config, **_sizes_of_full_layers(config)}
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
        """Returns the config.json of a checkpoint with this architecture."""
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
    own = hf_config.read_group(layers, next(iter(layers), ""))
    return {
        "global_head_dim": own.get("head_dim", config.get("head_dim")),
        "num_global_key_value_heads": own.get("num_key_value_heads"),
    }
