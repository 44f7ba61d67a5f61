"""Qwen3, dense, 0.6B to 32B: the shared decoder with RMS norms on each query and key head."""

from dflash.models.decoder import Decoder


class Qwen3(Decoder):
    """Target family `Qwen3ForCausalLM`.

    Source: Qwen3 technical report, 2025.
    """

    hf_architectures = ("Qwen3ForCausalLM",)
    hf_model_type = "qwen3"
    qk_norm = True
    maxtext_interleaves_heads = False
