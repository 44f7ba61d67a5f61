"""Fields of config.json that a target family cannot have: one line names each."""

import json

import pytest
from support import failure
from support.models import family_architecture

from dflash.config import registry
from dflash.models.config import FULL, LINEAR, SLIDING

# Family -> field -> a value of it that is not supported, and those that are.
UNSUPPORTED = {
    "qwen3": dict.fromkeys(("attention_bias", "mlp_bias", "use_sliding_window"), (True, "false")),
    "gemma4_text": {
        "hidden_size_per_layer_input": (256, "0"),
        "num_kv_shared_layers": (4, "0"),
        "use_bidirectional_attention": ("all", "null or 'vision'"),
        "hidden_activation": ("silu", "'gelu_pytorch_tanh'"),
    },
    "muse_glimmer_text": {
        "hidden_activation": ("gelu", "'silu'"),
        "attention_bias": (True, "false"),
    },
    "qwen3_next": {"attn_output_gate": (False, "true")},
    "minimax_m2": {
        "attn_type_list": ([1, 0, 1], "[1, 1, 1]"),
        "qk_norm_type": ("per_head", "'per_layer'"),
        "use_qk_norm": (False, "true"),
        "scoring_func": ("softmax", "'sigmoid'"),
        "use_routing_bias": (False, "true"),
        "shared_intermediate_size": (64, "0"),
    },
}
# Family, fields that contradict others, and the message.
INCONSISTENT = [
    ("gemma4", {"text_config": None}, "missing text_config"),
    ("gemma4_text", {"layer_types": [SLIDING] * 3},
     "layer_types: the last layer is 'sliding_attention', expected 'full_attention'"),
    ("gemma4_text", {"layer_types": [SLIDING, FULL]},
     "layer_types: names 2 layers, but num_hidden_layers is 3"),
    ("gemma4_text", {"num_global_key_value_heads": 3},
     "num_global_key_value_heads: num_attention_heads=4 does not divide into 3 groups"),
    ("gemma4_text", {"sliding_window": None},
     "sliding_window: missing, but layer_types[0] is 'sliding_attention'"),
    ("muse_glimmer_text", {"layer_rope_theta": [0, 1]},
     "layer_rope_theta: names 2 layers, but num_hidden_layers is 3"),
    ("muse_glimmer_text", {"layer_types": [FULL]},
     "layer_types: names 1 layers, but num_hidden_layers is 3"),
    ("qwen3_next", {"layer_types": [LINEAR]},
     "layer_types: 1 types for num_hidden_layers=2 layers"),
    ("qwen3_next", {"layer_types": [LINEAR] * 2},
     "layer_types: no layer has full attention; expected at least one 'full_attention' layer"),
    ("qwen3_next", {"linear_num_value_heads": 5},
     "linear_num_value_heads: 5 is no multiple of linear_num_key_heads=2"),
    ("qwen3_next", {"partial_rotary_factor": 0.1},
     "partial_rotary_factor: 0.1 rotates 0 of 8 head dimensions; expected a positive even number"),
    ("qwen3_next", {"num_experts_per_tok": 9}, "num_experts_per_tok: 9 exceeds num_experts=8"),
    ("minimax_m2", {"partial_rotary_factor": None, "rotary_dim": 0},
     "partial_rotary_factor: 0.0 rotates 0 of 8 head dimensions; expected a positive even number"),
    ("minimax_m2", {"num_experts_per_tok": 9},
     "num_experts_per_tok: 9 exceeds num_local_experts=8"),
]  # fmt: skip


def check(family, fields, message):
    kind = registry.load(registry.TARGETS[family].implementation)
    config = json.loads(json.dumps(kind.config_to_hf(family_architecture(family))))
    assert failure(kind.architecture_from_hf, config | fields) == f"config.json: {message}"


@pytest.mark.parametrize(
    ("family", "name"), [(family, name) for family in UNSUPPORTED for name in UNSUPPORTED[family]]
)
def test_what_is_not_supported_is_named(family, name):
    value, supported = UNSUPPORTED[family][name]
    shown = repr(value).lower() if isinstance(value, bool) else repr(value)
    check(family, {name: value}, f"{name}: {shown} is not supported, only {supported}")


@pytest.mark.parametrize(("family", "fields", "message"), INCONSISTENT)
def test_what_is_inconsistent_is_named(family, fields, message):
    check(family, fields, message)
