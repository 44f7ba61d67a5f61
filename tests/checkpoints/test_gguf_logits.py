"""GGUF files of models that transformers made: the logits are those of transformers."""

import gguf
import jax.numpy as jnp
import numpy as np
import pytest
from support import gguf_files
from support.golden import import_transformers, load_target
from support.models import make_cache
from support.parity import check_rows, reference, save_random, step

from dflash.checkpoints import checkpoint

VOCAB = 40
DENSE = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 64, "tie_word_embeddings": False, "rms_norm_eps": 1e-6,
}  # fmt: skip
PLAIN = {"rope_type": "default", "rope_theta": 1e4}
LINEAR_ATTENTION = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4, "full_attention_interval": 2,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "rope_parameters": PLAIN | {"partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]},
}  # fmt: skip
EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 16, "norm_topk_prob": True,
}  # fmt: skip
CONFIGS = {
    "SmolLM3ForCausalLM": {"rope_parameters": PLAIN, "no_rope_layer_interval": 4},
    "Gemma3ForCausalLM": {
        "num_hidden_layers": 6, "sliding_window": 6, "query_pre_attn_scalar": 16,
        "tie_word_embeddings": True, "hidden_size": 32,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": PLAIN,
        },
    },
    "GptOssForCausalLM": {
        "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6,
        "rope_parameters": {
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16,
            "rope_theta": 150000.0, "truncate": False,
        },
    },
    "Qwen3NextForCausalLM": LINEAR_ATTENTION | EXPERTS,
    "Qwen3_5ForCausalLM": LINEAR_ATTENTION,
    "Qwen3_5MoeForCausalLM": LINEAR_ATTENTION | EXPERTS,
}  # fmt: skip


def make_file(name, directory, **written):
    """A random model of transformers, and the GGUF file that llama.cpp's converter makes of it."""
    _, transformers = import_transformers()
    kind = getattr(transformers, name)
    config = kind.config_class(**DENSE | CONFIGS[name], eos_token_id=[3], pad_token_id=None)
    theirs, ours = save_random(kind(config), directory / "saved", std=0.1)
    # Written again, so that experts are separate and config.json has the names that we know.
    checkpoint.save_hf(ours, directory / "m", type(ours).config_to_hf(ours.arch))
    gguf_files.write(directory / "m.gguf", directory / "m", **written)
    return theirs, directory / "m.gguf"


@pytest.mark.parametrize("name", CONFIGS)
def test_transformers_computes_the_same(name, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    theirs, file = make_file(name, tmp_path, more=scaling(name))
    ours = load_target(checkpoint.resolve(str(file)))
    tokens = np.random.default_rng(0).integers(0, VOCAB, 24)
    _, _, logits, _ = step(ours, tokens[None], [0], make_cache(ours, 1, len(tokens)))
    expected, _ = reference(theirs, tokens, ())
    assert np.isfinite(np.asarray(logits)).all()
    check_rows(jnp.asarray(logits), [expected], [len(tokens)])


def scaling(name):
    """Metadata of the rotary scaling."""
    rope = CONFIGS[name]["rope_parameters"]
    rope = rope.get("full_attention", rope)
    if rope["rope_type"] == "default":
        return {}
    arch = gguf.MODEL_ARCH_NAMES[gguf_files.ARCHITECTURES[name]]
    stated = {"type": rope["rope_type"], "factor": rope["factor"]}
    if "original_max_position_embeddings" in rope:
        stated["original_context_length"] = rope["original_max_position_embeddings"]
    return {f"{arch}.rope.scaling.{key}": value for key, value in stated.items()}
