"""Targets as their publishers store them: language models in wrappers, and fused experts."""

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support.golden import import_transformers, load_target
from support.models import make_cache
from support.parity import check_rows, pad, reference, save_random, step

from dflash import errors

TEXT = {
    "vocab_size": 40, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "moe_intermediate_size": 8}
HYBRID = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 6,
    "num_experts_per_tok": 2, "shared_expert_intermediate_size": 8,
}  # fmt: skip
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}
GEMMA4 = {"global_head_dim": 16, "hidden_size_per_layer_input": 0}
GEMMA4 |= {"enable_moe_block": True, "top_k_experts": 2}
QWEN_VISION = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32,
    "patch_size": 4, "num_position_embeddings": 16,
}  # fmt: skip
VISION = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip
GEMMA3_VISION = VISION | {"image_size": 16, "patch_size": 4}
MUSE = {
    "num_hidden_layers": 5,  # Two kinds of attention, with and without rotary embedding.
    "layer_rope_theta": [1e4, 0, 0, 1e4, 0],
    "layer_types": [*["sliding_attention"] * 2, *["full_attention"] * 2, "sliding_attention"],
    "sliding_window": 5,
    "rms_norm_eps": 1e-3,
    "post_norm_eps": 1e-2,
    "qk_scale_factor": 2.5,
    "output_multiplier": 0.4,
    "final_logit_softcapping": 3.0,
}
MUSE_VISION = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "patch_size": 4,
}  # fmt: skip
PLACEHOLDERS = {"image_token_id": 3, "video_token_id": 7}
# Beginning of the classes of transformers, text config, vision config, and their other options.
WRAPPED = {
    "qwen3_5_moe": ("Qwen3_5Moe", TEXT | HYBRID | EXPERTS, QWEN_VISION, {}),
    "gemma4 26B-A4B": ("Gemma4", TEXT | WINDOWS | EXPERTS | GEMMA4, VISION, {"audio_config": None}),
    "gemma3": ("Gemma3", TEXT | WINDOWS, GEMMA3_VISION, {"mm_tokens_per_image": 4}),
    "muse": ("MuseGlimmer", TEXT | MUSE, MUSE_VISION, PLACEHOLDERS),
}
LENGTHS = [11, 3, 24]


def make_wrapped(name):
    _, transformers = import_transformers()
    kind, text, vision, options = WRAPPED[name]
    config = getattr(transformers, f"{kind}Config")(
        text_config=text, vision_config=vision, **options
    )
    return getattr(transformers, f"{kind}ForConditionalGeneration")(config)


def fuse_experts(directory):
    """Stores the experts of each layer in two tensors, as published files of Qwen3.5 do."""
    tensors = load_file(directory / "model.safetensors")
    layers = {name.split(".experts.")[0] for name in tensors if ".experts." in name}
    for layer in layers:
        prefix, count = f"{layer}.experts", EXPERTS["num_experts"]
        gate, up, down = (
            np.stack([tensors.pop(f"{prefix}.{i}.{part}_proj.weight") for i in range(count)])
            for part in ("gate", "up", "down")
        )
        tensors[f"{prefix}.gate_up_proj"] = np.concatenate([gate, up], axis=1)
        tensors[f"{prefix}.down_proj"] = down
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("name", [*WRAPPED, "qwen3_5_moe fused"])
def test_the_language_model_of_a_wrapper(name, tmp_path):
    kind, _, fused = name.partition(" fused")
    theirs, ours = save_random(make_wrapped(kind), tmp_path, std=0.1)
    if fused:
        fuse_experts(tmp_path)
        ours = load_target(tmp_path)
    rng = np.random.default_rng(0)
    tokens = [rng.integers(1, 40, length) for length in LENGTHS]
    _, _, logits, _ = step(
        ours, pad(tokens), [0] * 3, make_cache(ours, 3, max(LENGTHS)), count=LENGTHS
    )
    check_rows(logits, [reference(theirs, each, ())[0] for each in tokens], LENGTHS)


def test_experts_of_another_number_are_named(tmp_path):
    save_random(make_wrapped("qwen3_5_moe"), tmp_path)
    fuse_experts(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace('"num_experts": 4', '"num_experts": 3'))
    with pytest.raises(errors.CheckpointError, match=r"experts\.\w+' has shape \[4, .*\[3, "):
        load_target(tmp_path)
