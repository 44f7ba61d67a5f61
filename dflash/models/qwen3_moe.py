"""Qwen3 MoE, such as Qwen3-30B-A3B and Qwen3-Coder-30B-A3B: Qwen3 with routed experts."""

from flax import nnx

from dflash.checkpoints.tensor_map import Source, Stack
from dflash.layers import moe
from dflash.layers.moe import Routing
from dflash.models.config import Qwen3MoeArchitecture
from dflash.models.dense import Qwen3


class Qwen3Moe(Qwen3):
    """Target family `Qwen3MoeForCausalLM`.

    Source: Qwen3 technical report, 2025.
    """

    hf_architectures = ("Qwen3MoeForCausalLM",)
    hf_model_type = "qwen3_moe"
    architecture_class = Qwen3MoeArchitecture

    def make_mlp(self, i, **build) -> nnx.Module:
        if not self.arch.has_experts(i):
            return super().make_mlp(i, **build)
        arch = self.arch
        routing = Routing(arch.num_experts, arch.num_experts_per_tok, normalize=arch.norm_topk_prob)
        return moe.SparseMlp(routing, arch.hidden_size, arch.moe_intermediate_size, **build)

    def checkpoint_name(self, path: str) -> Source:
        names = moe.stacked_names(path, self.arch.num_experts)
        if names is None:
            return super().checkpoint_name(path)
        return Stack(tuple(f"model.{name}" for name in names))
