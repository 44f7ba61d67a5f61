"""SmolLM3: the shared decoder, in which some layers have no position embedding."""

from dflash.layers.attention import Attention
from dflash.layers.transformer import grouped_attention
from dflash.models.decoder import Decoder
from dflash.models.smollm3_config import SmolLM3Architecture


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
