"""Targets of random shapes, of every family: transformers computes the same.

The cases of test_decoder.py are chosen by hand; these are what nobody thought of. Each compiles a
model, so there are few, drawn anew from the seeds named here.
"""

import numpy as np
import pytest
from support.models import make_cache
from support.parity import check_rows, make_pair, pad, reference, step

FAMILIES = (
    "Qwen3",
    "Llama",
    "Qwen3Moe",
    "DeepseekV3",
    "Qwen2",
    "Mistral",
    "SmolLM3",
    "Gemma3",
    "Gemma4",
    "GptOss",
    "Gemma4 with experts",
)
VOCAB = 40


def draw_dense(rng):
    """Fields that every family has."""
    kv_heads = int(rng.choice([1, 2, 3]))
    return {
        "vocab_size": VOCAB,
        "hidden_size": 8 * int(rng.integers(2, 7)),
        "intermediate_size": int(rng.integers(9, 50)),
        "num_hidden_layers": int(rng.integers(1, 4)),
        "num_key_value_heads": kv_heads,
        "num_attention_heads": kv_heads * int(rng.choice([1, 2, 4])),
        "head_dim": 2 * int(rng.integers(2, 10)),
        "max_position_embeddings": 64,
        "rms_norm_eps": float(rng.choice([1e-5, 1e-6])),
        "tie_word_embeddings": bool(rng.integers(2)),
        "rope_parameters": draw_rope(rng),
    }


def draw_rope(rng):
    rope = {"rope_type": "default", "rope_theta": float(rng.choice([1e3, 1e4, 1e6]))}
    if rng.integers(2):
        rope |= {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    return rope


def draw_experts(rng):
    """Draws a Qwen3 MoE shape, with its sparse layers."""
    experts = int(rng.integers(2, 12))
    return {
        "num_experts": experts,
        "num_experts_per_tok": int(rng.integers(1, min(experts, 4) + 1)),
        "moe_intermediate_size": 4 * int(rng.integers(2, 8)),  # transformers wants fours
        "norm_topk_prob": bool(rng.integers(2)),
        "decoder_sparse_step": int(rng.choice([1, 2])),
        "mlp_only_layers": [0] if rng.integers(2) else [],
    }


def draw_latent(rng, shared, groups):
    """Draws a DeepSeek shape with the given numbers of shared experts and of groups."""
    heads = int(rng.choice([1, 2, 5]))
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "first_k_dense_replace": int(rng.integers(2)),
        "moe_intermediate_size": 4 * int(rng.integers(2, 8)),  # transformers wants fours
        "num_local_experts": 4 * int(rng.integers(2, 4)),
        "num_experts_per_tok": int(rng.integers(1, 4)),
        "n_group": groups,
        "topk_group": 1 if groups == 1 else 3,
        "n_shared_experts": shared,
        "norm_topk_prob": bool(rng.integers(2)),
        "routed_scaling_factor": float(rng.choice([1.0, 2.5])),
        "q_lora_rank": [None, 12][rng.integers(2)],
        "kv_lora_rank": int(rng.integers(6, 30)),
        "qk_nope_head_dim": int(rng.integers(4, 20)),
        "qk_rope_head_dim": 2 * int(rng.integers(2, 8)),
        "v_head_dim": int(rng.integers(4, 20)),
        "rope_interleave": bool(rng.integers(2)),
    }


def draw_unrotated(rng, layers):
    """Draws the layers of SmolLM3 that have no positions."""
    stated = [int(rng.integers(2)) for _ in range(layers)]
    return {"no_rope_layers": stated if rng.integers(2) else None, "no_rope_layer_interval": 2}


def draw_windows(rng, layers):
    """Draws Gemma's kinds of layers, and a rotary embedding for each."""
    linear = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e5}
    return {
        "layer_types": [
            str(rng.choice(["sliding_attention", "full_attention"])) for _ in range(layers)
        ],
        "sliding_window": int(rng.integers(1, 20)),
        "rope_parameters": {
            "full_attention": draw_rope(rng) if rng.integers(2) else linear,
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
        },
        "final_logit_softcapping": 2.0 if rng.integers(2) else None,
    }


def draw_gpt_oss(rng):
    """Draws experts, a window, and a scaling whose bounds are not rounded."""
    experts = int(rng.integers(2, 12))
    scaled = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    return {
        "num_local_experts": experts,
        "num_experts_per_tok": int(rng.integers(1, min(experts, 4) + 1)),
        "sliding_window": int(rng.integers(1, 20)),
        "intermediate_size": 4 * int(rng.integers(2, 8)),  # transformers wants fours
        "swiglu_limit": float(rng.choice([0.1, 7.0])),
        "rope_parameters": scaled | {"rope_theta": 150000.0, "truncate": False},
    }


def draw_full_layers(rng, config):
    """Draws what sets the full layers of Gemma 4 apart; the last layer is one."""
    heads = config["num_attention_heads"]
    kv_heads = [count for count in range(1, heads + 1) if heads % count == 0]
    full = {"rope_type": "proportional", "rope_theta": 1e3, "partial_rotary_factor": 0.25}
    return {
        "layer_types": [*config["layer_types"][:-1], "full_attention"],
        "rope_parameters": config["rope_parameters"] | {"full_attention": full},
        "global_head_dim": 8 * int(rng.integers(1, 5)),
        "attention_k_eq_v": bool(rng.integers(2)),
        "num_global_key_value_heads": int(rng.choice(kv_heads)),
        "hidden_size_per_layer_input": 0,
    }


def draw_experts_beside(rng):
    """Draws the experts that Gemma 4 has beside the MLP of each layer."""
    experts = int(rng.integers(2, 12))
    return {
        "enable_moe_block": True,
        "num_experts": experts,
        "top_k_experts": int(rng.integers(1, min(experts, 4) + 1)),
        "moe_intermediate_size": 4 * int(rng.integers(2, 8)),  # transformers wants fours
    }


def draw(family, seed):
    rng = np.random.default_rng([FAMILIES.index(family), seed])
    config = draw_dense(rng)
    if family == "Qwen3Moe":
        config |= draw_experts(rng)
    if family == "DeepseekV3":
        del config["head_dim"]
        config |= draw_latent(rng, shared=seed % 3, groups=(1, 4)[seed % 2])
    if family == "Mistral":
        config["sliding_window"] = int(rng.integers(1, 20)) if rng.integers(4) else None
    if family.startswith("Gemma4"):
        config |= draw_windows(rng, config["num_hidden_layers"])
        config |= draw_full_layers(rng, config)
    if family == "Gemma4 with experts":
        config |= draw_experts_beside(rng)
    if family == "Gemma3":
        config |= draw_windows(rng, config["num_hidden_layers"])
        config["hidden_size"] = 8 * config["num_attention_heads"]  # transformers wants a multiple
        config["query_pre_attn_scalar"] = int(rng.integers(4, 40))
    if family == "GptOss":
        config |= draw_gpt_oss(rng)
    if family == "SmolLM3":
        config |= draw_unrotated(rng, config["num_hidden_layers"])
    return config


@pytest.mark.parametrize(
    ("family", "seed"),
    [
        *[("Qwen3", seed) for seed in range(2)],
        ("Llama", 0),
        *[("Qwen3Moe", seed) for seed in range(3)],
        *[("DeepseekV3", seed) for seed in range(4)],
        *[(family, seed) for family in FAMILIES[4:] for seed in range(10)],
    ],
)
def test_transformers_computes_the_same(family, seed, tmp_path):
    config = draw(family, seed)
    if family == "Llama":
        config["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4}
    theirs, ours = make_pair(family.partition(" ")[0], config, tmp_path, seed)
    rng = np.random.default_rng(seed)
    lengths = [1, *rng.integers(2, 30, 2)]
    tokens = [rng.integers(0, VOCAB, length) for length in lengths]
    _, _, logits, _ = step(ours, pad(tokens), [0] * len(tokens), make_cache(ours, 3, max(lengths)))
    expected = [reference(theirs, each, ())[0] for each in tokens]
    assert np.isfinite(logits).all()
    check_rows(logits, expected, lengths)
    if seed:
        check_rows(in_two_chunks(ours, pad(tokens)), expected, lengths)


def in_two_chunks(ours, tokens):
    """Logits of padded rows, of which a second call runs the second half."""
    cut, cache = tokens.shape[1] // 2, make_cache(ours, *tokens.shape)
    _, _, first, cache = step(ours, tokens[:, :cut], [0] * len(tokens), cache)
    _, _, second, _ = step(ours, tokens[:, cut:], [cut] * len(tokens), cache)
    return np.concatenate([first, second], axis=1)
