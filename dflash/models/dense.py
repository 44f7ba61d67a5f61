"""Dense families over the shared decoder: Llama 3, Mistral, Qwen2, Qwen3 and SmolLM3."""

from dflash.layers.attention import Attention
from dflash.layers.transformer import grouped_attention
from dflash.models.config import SmolLM3Architecture, WindowedArchitecture
from dflash.models.decoder import Decoder


class Llama3(Decoder):
    """Target family `LlamaForCausalLM`.

    Source: The Llama 3 herd of models, 2024.
    """

    hf_architectures = ("LlamaForCausalLM",)
    hf_model_type = "llama"
    qk_norm = False
    maxtext_interleaves_heads = True


class Mistral(Decoder):
    """Target family `MistralForCausalLM`, with a sliding window if the checkpoint has one.

    Source: Mistral 7B, arXiv 2310.06825.
    """

    hf_architectures = ("MistralForCausalLM",)
    hf_model_type = "mistral"
    qk_norm = False
    architecture_class = WindowedArchitecture

    def make_attention(self, i, **build) -> Attention:
        return grouped_attention(self.arch, window=self.arch.window(i), **build)


class Qwen2(Decoder):
    """Target family `Qwen2ForCausalLM`.

    Source: Qwen2.5 technical report, arXiv 2412.15115.
    """

    hf_architectures = ("Qwen2ForCausalLM",)
    hf_model_type = "qwen2"
    qk_norm = False

    def make_attention(self, i, **build) -> Attention:
        return grouped_attention(self.arch, bias=True, **build)


class Qwen3(Decoder):
    """Target family `Qwen3ForCausalLM`.

    Source: Qwen3 technical report, 2025.
    """

    hf_architectures = ("Qwen3ForCausalLM",)
    hf_model_type = "qwen3"
    qk_norm = True
    maxtext_interleaves_heads = False


class SmolLM3(Decoder):
    """Target family `SmolLM3ForCausalLM`.

    Source: SmolLM3, Hugging Face 2025; layers without positions, Yang et al., arXiv 2501.18795.
    """

    hf_architectures = ("SmolLM3ForCausalLM",)
    hf_model_type = "smollm3"
    qk_norm = False
    architecture_class = SmolLM3Architecture

    def make_attention(self, i, **build) -> Attention:
        return grouped_attention(self.arch, rotated=self.arch.rotates(i), **build)
