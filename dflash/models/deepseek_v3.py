"""DeepSeek-V3 and Kimi K2: latent attention, with routed and shared experts."""

import dataclasses

import jax
from flax import nnx

from dflash.checkpoints.tensor_map import Source, Stack, TensorRows
from dflash.config.schema import subset
from dflash.layers import moe, rotary
from dflash.layers.latent_attention import LatentAttention, LatentShape
from dflash.layers.moe import Routing
from dflash.models.config import DeepseekV3Architecture
from dflash.models.decoder import Decoder
from dflash.models.language_model import LanguageModel


class DeepseekV3(Decoder):
    """Target family `DeepseekV3ForCausalLM`, which includes Kimi K2.

    Source: DeepSeek-V3 technical report, arXiv 2412.19437.
    """

    hf_architectures = ("DeepseekV3ForCausalLM", "KimiK2ForCausalLM")
    hf_model_type = "deepseek_v3"
    qk_norm = False
    architecture_class = DeepseekV3Architecture

    def make_attention(self, i, **build) -> LatentAttention:
        shape = LatentShape(**subset(self.arch, LatentShape))
        scale = attention_scale(self.arch)
        return LatentAttention(self.arch.hidden_size, shape, scale=scale, **build)

    def make_mlp(self, i, **build) -> nnx.Module:
        is_dense = i < self.arch.first_k_dense_replace
        return super().make_mlp(i, **build) if is_dense else self._experts(**build)

    def rotary_angles(self, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        rotary_part = dataclasses.replace(self.arch, head_dim=self.arch.qk_rope_head_dim)
        return rotary.angles(positions, rotary_part)

    def _experts(self, **build) -> moe.SparseMlp:
        arch = self.arch
        routing = Routing(
            arch.n_routed_experts,
            arch.num_experts_per_tok,
            scoring="sigmoid",
            normalize=arch.norm_topk_prob,
            scale=arch.routed_scaling_factor,
            num_groups=arch.n_group,
            groups_per_token=arch.topk_group,
            has_correction=True,
        )
        width = arch.moe_intermediate_size
        shared = arch.n_shared_experts * width
        return moe.SparseMlp(routing, arch.hidden_size, width, shared_hidden=shared, **build)

    def checkpoint_name(self, path: str) -> Source:
        """Returns the source of a parameter; see `Decoder.checkpoint_name`.

        Checkpoints store experts one by one, and keys and values in one tensor.
        """
        names = moe.stacked_names(path, self.arch.n_routed_experts)
        if names is not None:
            return Stack(tuple(f"model.{name}" for name in names))
        if path.endswith(".e_score_correction_bias"):
            return f"model.{path}"
        layer, _, projection = path.rpartition(".")[0].rpartition(".")
        keys, values = self.arch.qk_nope_head_dim, self.arch.v_head_dim
        ranges = {"k_b_proj": (0, keys), "v_b_proj": (keys, keys + values)}
        if projection in ranges:
            return TensorRows(
                f"model.{layer}.kv_b_proj.weight",
                *ranges[projection],
                of=keys + values,
                groups=self.arch.num_attention_heads,
            )
        return super().checkpoint_name(path)


def attention_scale(arch: DeepseekV3Architecture) -> float:
    """Returns the factor on attention scores, which includes YaRN's growth of the logits."""
    scale = (arch.qk_nope_head_dim + arch.qk_rope_head_dim) ** -0.5
    scaling = arch.rope_scaling
    if scaling is None or not scaling.mscale_all_dim:
        return scale
    return scale * rotary.mscale(scaling, scaling.mscale_all_dim) ** 2


class _KimiK2(DeepseekV3):
    hf_architectures = ("KimiK2ForCausalLM",)
    hf_model_type = "kimi_k2"


class KimiK25(LanguageModel, DeepseekV3):
    """Language model of `KimiK25ForConditionalGeneration`; its vision tower is not read."""

    hf_architectures = ("KimiK25ForConditionalGeneration",)
    hf_model_type = "kimi_k25"
    text_class = _KimiK2
    tower_names = ("vision_tower.*", "mm_projector.*")

    def _within(self, name: str) -> str:
        return f"language_model.{name}"
