"""Llama 3.1 and 3.2: the shared decoder, with rotary frequencies scaled for long contexts."""

from dflash.models.decoder import Decoder


class Llama3(Decoder):
    """Target family `LlamaForCausalLM`.

    Source: The Llama 3 herd of models, 2024.
    """

    hf_architectures = ("LlamaForCausalLM",)
    hf_model_type = "llama"
    qk_norm = False
    maxtext_interleaves_heads = True
