"""OpenAI's gpt-oss, 20b and 120b: attention sinks, windows in every other layer, and experts."""

from collections.abc import Mapping
from typing import Any

from flax import nnx

from dflash.checkpoints import defaults_config, hf_config
from dflash.checkpoints.tensor_map import Source, Untransposed
from dflash.layers import moe
from dflash.layers.attention import Attention
from dflash.layers.linear import Float32RMSNorm
from dflash.layers.mlp import ClampedSwiglu
from dflash.layers.moe import Routing
from dflash.layers.transformer import grouped_attention
from dflash.models.config import GptOssArchitecture
from dflash.models.decoder import Decoder

# Parts of a parameter's path whose names differ from those in checkpoints.
_NAMES = {
    ".mlp.gate.": ".mlp.router.",
    ".attention_sink_bias": ".sinks",
    ".interleaved_proj.": ".gate_up_proj.",
}


class GptOss(Decoder):
    """Target family `GptOssForCausalLM`.

    Source: gpt-oss model card, arXiv 2508.10925.
    """

    hf_architectures = ("GptOssForCausalLM",)
    hf_model_type = "gpt_oss"
    qk_norm = False
    norm_class = Float32RMSNorm
    architecture_class = GptOssArchitecture

    def make_attention(self, i, **build) -> Attention:
        form = {"bias": True, "output_bias": True, "has_sinks": True}
        return grouped_attention(self.arch, window=self.arch.window(i), **form, **build)

    def make_mlp(self, i, **build) -> nnx.Module:
        arch = self.arch
        routing = Routing(arch.num_local_experts, arch.num_experts_per_tok, has_bias=True)
        gate = ClampedSwiglu(arch.swiglu_limit, arch.swiglu_alpha)
        form = moe.ExpertForm(gate, interleaved=True, bias=True)
        sizes = arch.hidden_size, arch.intermediate_size
        return moe.SparseMlp(routing, *sizes, form=form, **build)

    @staticmethod
    def checkpoint_name(path: str) -> Source:
        for name, hf_name in _NAMES.items():
            path = path.replace(name, hf_name)
        if path.endswith(".sinks"):
            return f"model.{path}"
        stem, _, leaf = path.rpartition(".")
        if ".experts." not in path:
            return Decoder.checkpoint_name(path)
        return f"model.{stem}_bias" if leaf == "bias" else Untransposed(f"model.{stem}")

    @classmethod
    def architecture_from_hf(cls, config: Mapping[str, Any]) -> GptOssArchitecture:
        defaults = defaults_config.of(config, cls.hf_model_type)
        return hf_config.read_architecture(config, cls.architecture_class, defaults=defaults)

    @classmethod
    def config_to_hf(cls, arch: GptOssArchitecture) -> dict[str, Any]:
        config = super().config_to_hf(arch) | {"attention_bias": True}
        # A file without scaling has that of transformers' class.
        return config | {"rope_scaling": config["rope_scaling"] or {"rope_type": "default"}}
