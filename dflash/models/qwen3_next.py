"""Qwen3-Next: gated DeltaNet in most layers, gated full attention in the others, and experts.

Qwen3.5 and 3.6, dense or with experts, are the same model with other tensors.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx

from dflash.checkpoints import hf_config
from dflash.checkpoints.tensor_map import Source, Stack, TensorRows
from dflash.config.schema import subset
from dflash.layers import moe, rotary
from dflash.layers.attention import GatedAttention
from dflash.layers.gated_delta_net import DeltaShape, GatedDeltaNet
from dflash.layers.linear import ZeroCenteredRMSNorm
from dflash.layers.moe import Routing
from dflash.layers.transformer import TargetAttention, grouped_attention
from dflash.models.config import Qwen3NextArchitecture
from dflash.models.decoder import Decoder
from dflash.models.language_model import LanguageModel


class Qwen3Next(Decoder):
    """Target family `Qwen3NextForCausalLM`, such as Qwen3-Coder-Next.

    Source: Qwen3-Next, transformers 5.24.
    """

    hf_architectures = ("Qwen3NextForCausalLM",)
    hf_model_type = "qwen3_next"
    qk_norm = True
    norm_class = ZeroCenteredRMSNorm
    architecture_class = Qwen3NextArchitecture
    arch: Qwen3NextArchitecture

    def make_attention(self, i: int, **build) -> TargetAttention:
        arch = self.arch
        if arch.is_full(i):
            norms = {"qk_norm": True, "norm_class": self.norm_class}
            return grouped_attention(arch, GatedAttention, **norms, **build)
        shape = DeltaShape(**subset(arch, DeltaShape))
        return GatedDeltaNet(arch.hidden_size, shape, eps=arch.rms_norm_eps, **build)

    def make_mlp(self, i: int, **build) -> nnx.Module:
        arch = self.arch
        if not arch.has_experts(i):
            return super().make_mlp(i, **build)
        routing = Routing(arch.num_experts, arch.num_experts_per_tok, normalize=arch.norm_topk_prob)
        shared = {"shared_hidden": arch.shared_expert_intermediate_size, "gates_shared": True}
        return moe.SparseMlp(
            routing, arch.hidden_size, arch.moe_intermediate_size, **shared, **build
        )

    def rotary_angles(self, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        rotated = dataclasses.replace(self.arch, head_dim=self.arch.rotary_dim)
        return rotary.angles(positions, rotated)

    @property
    def ignored_checkpoint_names(self) -> tuple[str, ...]:
        """Returns names of the multi-token prediction layers, and those that `Decoder` ignores."""
        return (*super().ignored_checkpoint_names, "mtp.*")

    def checkpoint_name(self, path: str) -> Source:
        names = moe.stacked_names(path, self.arch.num_experts)
        if names is not None:
            return Stack(tuple(f"model.{name}" for name in names))
        layer, _, parameter = path.partition(".self_attn.")
        if not parameter:
            return super().checkpoint_name(path.replace(".shared_experts.", ".shared_expert."))
        if not self.arch.is_full(int(layer.rpartition(".")[2])):
            return self._delta_source(f"model.{layer}.linear_attn", parameter)
        parts = {"q_proj.kernel": (0, 1), "gate_proj.kernel": (1, 2)}
        if parameter not in parts:
            return super().checkpoint_name(path)
        # The file has a gate after the query of each head.
        width, heads = self.arch.head_dim, self.arch.num_attention_heads
        begin, end = (width * part for part in parts[parameter])
        return TensorRows(f"model.{layer}.self_attn.q_proj.weight", begin, end, 2 * width, heads)

    def _delta_source(self, prefix: str, parameter: str) -> Source:
        if parameter in ("A_log", "dt_bias"):
            return f"{prefix}.{parameter}"
        shape = DeltaShape(**subset(self.arch, DeltaShape))
        keys, total = shape.key_size, 2 * shape.key_size + shape.value_size
        convolved = {"q_conv": (0, keys), "k_conv": (keys, 2 * keys), "v_conv": (2 * keys, total)}
        if parameter in convolved:
            return TensorRows(f"{prefix}.conv1d.weight", *convolved[parameter], of=total)
        name = parameter.rpartition(".")[0]
        return self._projection_source(prefix, name, shape) or f"{prefix}.{name}.weight"

    def _projection_source(self, prefix: str, name: str, shape: DeltaShape) -> Source | None:
        """Returns the source of a projection of gated DeltaNet; None for those of their own.

        Files of Qwen3-Next have two tensors, each with all rows of one key head after the other.
        """
        heads, width = shape.linear_num_key_heads, shape.linear_key_head_dim
        group = shape.linear_num_value_heads // heads
        values = group * shape.linear_value_head_dim
        small = {"b": (0, group), "a": (group, 2 * group)}
        if name in small:
            return TensorRows(f"{prefix}.in_proj_ba.weight", *small[name], 2 * group, heads)
        ends = {
            "q_proj": (0, width),
            "k_proj": (width, 2 * width),
            "v_proj": (2 * width, 2 * width + values),
            "z_proj": (2 * width + values, 2 * (width + values)),
        }
        if name not in ends:
            return None
        return TensorRows(f"{prefix}.in_proj_qkvz.weight", *ends[name], 2 * (width + values), heads)

    @classmethod
    def architecture_from_hf(cls, config: Mapping[str, Any]) -> Qwen3NextArchitecture:
        """Reads config.json, where `rope_parameters` may hold the rotated fraction."""
        rope = hf_config.read_group(config, "rope_parameters")
        fraction = {key: rope[key] for key in ("partial_rotary_factor",) if key in rope}
        return super().architecture_from_hf({**config, **fraction})

    @classmethod
    def config_to_hf(cls, arch: Qwen3NextArchitecture) -> dict[str, Any]:
        config = super().config_to_hf(arch)
        return config | {"layer_types": config["layer_types"] or None}


class Qwen35Text(Qwen3Next):
    """Target family `Qwen3_5ForCausalLM` and `Qwen3_5MoeForCausalLM`, the language model alone."""

    hf_architectures = ("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM")
    hf_model_type = "qwen3_5_text"

    def _projection_source(self, prefix: str, name: str, shape: DeltaShape) -> Source | None:
        keys, total = shape.key_size, 2 * shape.key_size + shape.value_size
        joined = {"q_proj": (0, keys), "k_proj": (keys, 2 * keys), "v_proj": (2 * keys, total)}
        if name in joined:
            return TensorRows(f"{prefix}.in_proj_qkv.weight", *joined[name], of=total)
        alone = {"z_proj": "in_proj_z", "b": "in_proj_b", "a": "in_proj_a"}
        return f"{prefix}.{alone[name]}.weight" if name in alone else None

    @classmethod
    def config_to_hf(cls, arch: Qwen3NextArchitecture) -> dict[str, Any]:
        config = super().config_to_hf(arch)
        if not arch.num_experts:  # Converters take any field of experts for experts.
            return {
                name: value for name, value in config.items() if not re.search("expert|moe_", name)
            }
        model_type = cls.hf_model_type.replace("qwen3_5", "qwen3_5_moe")
        return config | {"architectures": [cls.hf_architectures[1]], "model_type": model_type}


class Qwen35(LanguageModel, Qwen35Text):
    """Language model of `Qwen3_5ForConditionalGeneration` and its counterpart with experts."""

    hf_architectures = ("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration")
    hf_model_type = "qwen3_5"
    text_class = Qwen35Text
    tower_names = ("model.visual.*",)
