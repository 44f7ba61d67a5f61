"""Values of the fields that a config.json leaves out, by its `model_type`.

Files omit a field that has the default of its config class in transformers: older files fields that
did not exist yet, files of multimodal models any field of the language model.

Source: the config classes of transformers 5.24.
"""

from collections.abc import Mapping
from typing import Any

_SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "max_position_embeddings"),
)


def _decoder(*sizes: int | None, rope_theta: float = 1e4, **fields: Any) -> dict[str, Any]:
    """Returns the defaults of a decoder, whose sizes are in the order of `_SIZES`."""
    return dict(zip(_SIZES, sizes, strict=True)) | {"rope_theta": rope_theta} | fields


# fmt: off
_QWEN2 = _decoder(151_936, 4096, 22_016, 32, 32, 32, 32_768)
_DEEPSEEK = _decoder(129_280, 7168, 18_432, 61, 128, 128, 4096, eos_token_id=1) | {
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048, "first_k_dense_replace": 3, "n_group": 8, "topk_group": 4,
    "routed_scaling_factor": 2.5,
}
_HYBRID = {"head_dim": 256, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}
_GEMMA = {"head_dim": 256, "tie_word_embeddings": True, "eos_token_id": 1, "rope_theta": 1e6}
_GPT_OSS = {
    "rope_parameters": {"rope_type": "yarn", "factor": 32.0, "truncate": False,
                        "original_max_position_embeddings": 4096},
    "head_dim": 64, "rms_norm_eps": 1e-5, "num_local_experts": 128, "num_experts_per_tok": 4,
}
_DEFAULTS = {
    "llama": _decoder(32_000, 4096, 11_008, 32, 32, None, 2048, eos_token_id=2),
    "mistral": _decoder(32_000, 4096, 14_336, 32, 32, 8, 131_072, eos_token_id=2)
    | {"sliding_window": 4096},
    "qwen2": _QWEN2,
    "qwen3": _QWEN2 | {"head_dim": 128},
    "qwen3_moe": _decoder(151_936, 2048, 6144, 24, 32, 4, 32_768, num_experts=128)
    | {"num_experts_per_tok": 8, "moe_intermediate_size": 768},
    "smollm3": _decoder(128_256, 2048, 11_008, 36, 16, 4, 32_768, rope_theta=2e6)
    | {"tie_word_embeddings": True, "eos_token_id": 128_001},
    "deepseek_v3": _DEEPSEEK,
    "kimi_k2": _DEEPSEEK,
    "qwen3_next": _decoder(151_936, 2048, 5632, 48, 16, 2, 32_768, num_experts=512)
    | _HYBRID | {"num_experts_per_tok": 10},
    "qwen3_5_text": _decoder(248_320, 4096, 12_288, 32, 16, 4, 32_768, head_dim=256),
    # Has no dense MLP.
    "qwen3_5_moe_text": _decoder(248_320, 2048, 1, 40, 16, 2, 32_768, num_experts=256)
    | _HYBRID | {"num_experts_per_tok": 8},
    "gpt_oss": _decoder(201_088, 2880, 2880, 36, 64, 8, 131_072, rope_theta=1.5e5) | _GPT_OSS,
    "gemma3_text": _decoder(262_208, 2304, 9216, 26, 8, 4, 131_072, sliding_window=4096) | _GEMMA,
    "gemma4_text": _decoder(262_144, 2304, 9216, 30, 8, 4, 131_072, sliding_window=512)
    | _GEMMA | {"hidden_size_per_layer_input": 256},
    "minimax_m2": _decoder(200_064, 3072, 1536, 62, 48, 8, 196_608, rope_theta=5e6, head_dim=128)
    | {"num_local_experts": 256, "num_experts_per_tok": 8, "eos_token_id": 200_020},
    "muse_glimmer_text": _decoder(202_048, 6656, 19_968, 52, 32, 2, 131_072, head_dim=128)
    | {"rms_norm_eps": 1e-5, "eos_token_id": 200_001},
}
# fmt: on


def of(config: Mapping[str, Any], model_type: str, *, sizes: bool = True) -> Mapping[str, Any]:
    """Returns the defaults of the fields of a config.json.

    Args:
      model_type: Type whose defaults apply if the file states none that is known.
      sizes: Whether the sizes have defaults.
    """
    declared = config.get("model_type")
    known = isinstance(declared, str) and declared in _DEFAULTS
    defaults = _DEFAULTS.get(declared if known else model_type, {})
    return {name: defaults[name] for name in defaults if sizes or name not in _SIZES}
