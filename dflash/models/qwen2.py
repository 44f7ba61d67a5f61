"""Qwen2 and Qwen2.5: the shared decoder, with biases on queries, keys and values."""

from dflash.layers.attention import Attention
from dflash.layers.transformer import grouped_attention
from dflash.models.decoder import Decoder


class Qwen2(Decoder):
    """Target family `Qwen2ForCausalLM`.

    Source: Qwen2.5 technical report, arXiv 2412.15115.
    """

    hf_architectures = ("Qwen2ForCausalLM",)
    hf_model_type = "qwen2"
    qk_norm = False

    def make_attention(self, i, **build) -> Attention:
        return grouped_attention(self.arch, bias=True, **build)
