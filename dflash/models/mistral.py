"""Mistral 7B, Mistral NeMo and Mistral Small, as text models: the shared decoder with a window."""

from dflash.layers.attention import Attention
from dflash.layers.transformer import grouped_attention
from dflash.models.decoder import Decoder
from dflash.models.windows_config import WindowedArchitecture


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
