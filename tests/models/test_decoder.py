"""Tests of targets: transformers computes the same, and what a tree or a mesh must not change."""

import dataclasses
import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file
from support.golden import GOLDEN, load_target
from support.models import (
    OWN_FIELDS,
    family_architecture,
    make_cache,
    make_sharding,
    make_target,
    move,
    zeros,
)
from support.parity import WEIGHTS, check_rows, make_pair, pad, reference, save_weights, step

from dflash.config import registry
from dflash.config.schema import RopeScaling
from dflash.models.dense import Qwen3

FAMILIES = {name: registry.load(entry.implementation) for name, entry in registry.TARGETS.items()}
SHAPE = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,  # transformers norms what it shows of the last one
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
# Scaled so early that even the tests' short sequences feel it.
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
}  # fmt: skip
YARN_ROPE = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32,
}  # fmt: skip
EXPERTS = {
    "head_dim": 16, "num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
    "norm_topk_prob": True, "mlp_only_layers": [],
}  # fmt: skip
LATENT = {
    "first_k_dense_replace": 1, "moe_intermediate_size": 24, "num_local_experts": 8,
    "num_experts_per_tok": 3, "n_group": 1, "topk_group": 1, "n_shared_experts": 1,
    "routed_scaling_factor": 2.5, "q_lora_rank": 12, "kv_lora_rank": 20, "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8, "v_head_dim": 10, "num_key_value_heads": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}  # fmt: skip


def gemma(*kinds, full, **own):
    """Options of Gemma with layers that slide or see all, which `full` rotates."""
    sliding = {"rope_type": "default", "rope_theta": 1e3}
    return own | {
        "head_dim": 16,
        "sliding_window": 6,
        "final_logit_softcapping": 3.0,
        "layer_types": [f"{kind}_attention" for kind in kinds],
        "rope_parameters": {
            "sliding_attention": sliding,
            "full_attention": {"rope_theta": 1e4} | full,
        },
    }


GEMMA3 = gemma(
    "sliding",
    "full",
    "sliding",
    full={"rope_type": "linear", "factor": 8.0},
    query_pre_attn_scalar=24,
)
GEMMA4 = gemma(
    "sliding",
    "sliding",
    "full",
    global_head_dim=24,
    num_global_key_value_heads=1,
    full={"rope_type": "proportional", "partial_rotary_factor": 0.5},
    attention_k_eq_v=True,
    hidden_size_per_layer_input=0,
)
CHECKPOINTS = {
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3 scaled by YaRN": ("Qwen3", {"head_dim": 16, "rope_parameters": YARN_ROPE}),
    "qwen3 tied, one kv head": (
        "Qwen3",
        {"head_dim": 8, "tie_word_embeddings": True, "num_key_value_heads": 1},
    ),
    "qwen3 with experts": ("Qwen3Moe", EXPERTS),
    "qwen3 with experts in every second layer, but the last, and raw weights": (
        "Qwen3Moe",
        EXPERTS
        | {"decoder_sparse_step": 2, "norm_topk_prob": False, "num_hidden_layers": 5}
        | {"mlp_only_layers": [3], "tie_word_embeddings": True},
    ),
    "deepseek": ("DeepseekV3", LATENT),
    "deepseek scaled by YaRN, in groups of experts, of plain queries": (
        "DeepseekV3",
        LATENT
        | {"rope_parameters": YARN_ROPE | {"mscale": 0.7, "mscale_all_dim": 1.0}}
        | {"n_group": 4, "topk_group": 2, "n_shared_experts": 2, "q_lora_rank": None},
    ),
    "deepseek of sparse layers alone, pairs half a head apart, wide values": (
        "DeepseekV3",
        LATENT | {"rope_interleave": False, "first_k_dense_replace": 0, "v_head_dim": 24},
    ),
    "llama3 scaled": ("Llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama3 scaled and tied, a kv head each": (
        "Llama",
        {"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True, "num_key_value_heads": 4},
    ),
    "qwen2": ("Qwen2", {"head_dim": 16}),
    "mistral with a window": ("Mistral", {"sliding_window": 6}),
    "gemma3": ("Gemma3", GEMMA3),
    "gpt-oss": (
        "GptOss",
        {
            "head_dim": 16, "num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 6,
            "rope_parameters": YARN_ROPE | {"truncate": False},
        },
    ),
    "gemma4": ("Gemma4", GEMMA4),
    "minimax-m2": (
        "MiniMaxM2",
        {
            "head_dim": 16, "num_local_experts": 7, "num_experts_per_tok": 3, "rotary_dim": 4,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 0, 1], "head_dim": 8}),
}  # fmt: skip
EIGHT = make_sharding(data=2, fsdp=2, tensor=2)
STORED = GOLDEN / "targets.npz"  # What transformers computes; see `test_stored_logits`.
STORED_LENGTHS = [5, 17, 1]
FEATURE_LAYERS = (1, 0)  # in the order asked for, not that of depth


@pytest.fixture(scope="module", params=CHECKPOINTS)
def pair(request, tmp_path_factory):
    """A random model of transformers, and ours with the weights that it saved."""
    family, options = CHECKPOINTS[request.param]
    directory = tmp_path_factory.mktemp("checkpoint")
    theirs, ours = make_pair(family, SHAPE | options, directory)
    theirs.case, theirs.directory = request.param, directory
    return theirs, ours


def draw_tokens(lengths=STORED_LENGTHS, vocab=48):
    rng = np.random.default_rng(0)
    return [rng.integers(0, vocab, length) for length in lengths]


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_stored_logits(name, tmp_path):
    """A ragged batch in one call, against what transformers has computed."""
    with np.load(STORED) as arrays:
        config, shapes = json.loads(str(arrays[f"{name}/checkpoint"]))
        expected = [arrays[f"{name}/{part}"] for part in ("logits", "features")]
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_weights(shapes, tmp_path)
    ours, tokens = load_target(tmp_path), draw_tokens(STORED_LENGTHS)
    cache = make_cache(ours, len(tokens), max(STORED_LENGTHS))
    layers = {"feature_layers": FEATURE_LAYERS}
    _, features, logits, _ = step(ours, pad(tokens), [0] * len(tokens), cache, **layers)
    assert logits.dtype == jnp.float32
    assert max(np.abs(each).max() for each in expected[0]) > 1, "too small to compare"
    ends = np.cumsum(STORED_LENGTHS)[:-1]
    for mine, theirs in zip((logits, features), expected, strict=True):
        check_rows(mine, np.split(theirs, ends), STORED_LENGTHS)


def test_stored_logits_are_those_of_transformers(pair):
    """Writes them anew if the variable WRITE_GOLDEN is set."""
    theirs, _ = pair
    name, directory = theirs.case, theirs.directory
    rows = [reference(theirs, each, FEATURE_LAYERS) for each in draw_tokens(STORED_LENGTHS)]
    logits, features = (np.concatenate(each) for each in zip(*rows, strict=True))
    if "WRITE_GOLDEN" in os.environ:
        config = json.loads((directory / "config.json").read_text())
        shapes = {name: array.shape for name, array in load_file(directory / WEIGHTS).items()}
        kept = dict(np.load(STORED)) if STORED.exists() else {}
        kept[f"{name}/checkpoint"] = np.array(json.dumps([config, shapes]))
        kept |= {f"{name}/logits": logits, f"{name}/features": features}
        np.savez_compressed(STORED, **kept)
    with np.load(STORED) as stored:
        np.testing.assert_allclose(stored[f"{name}/logits"], logits, atol=1e-5)
        np.testing.assert_allclose(stored[f"{name}/features"], features, atol=1e-5)


def test_transformers_reads_our_config(pair):
    theirs, ours = pair
    config = type(theirs.config).from_dict(type(ours).config_to_hf(ours.arch))
    assert type(ours).architecture_from_hf(config.to_dict()) == ours.arch
    read, stated = config.to_dict(), theirs.config.to_dict()
    names = "head_dim", "rms_norm_eps", "tie_word_embeddings", "eos_token_id", "rope_parameters"
    for name in (*SHAPE, *names):
        assert read[name] == stated[name], name


positive = st.integers(1, 2**20)
scalings = st.builds(
    RopeScaling, factor=st.floats(1, 64), low_freq_factor=st.floats(0, 4),
    high_freq_factor=st.floats(5, 9), original_max_position_embeddings=positive,
)  # fmt: skip


@given(
    name=st.sampled_from(sorted(FAMILIES)),
    scaling=st.none() | scalings,
    tied=st.booleans(),
    eos=st.lists(st.integers(0, 47), max_size=3).map(tuple),
    theta=st.floats(1, 1e8),
    eps=st.floats(0, 1e-2),
    sizes=st.fixed_dictionaries(
        {
            "vocab_size": positive,
            "hidden_size": positive,
            "head_dim": st.integers(1, 2**15).map(lambda half: 2 * half),
            "num_key_value_heads": st.sampled_from([1, 2, 4]),
        }
    ),
)
def test_config_round_trip(name, scaling, tied, eos, theta, eps, sizes):
    arch = family_architecture(
        name, rope_scaling=scaling, tie_word_embeddings=tied, eos_token_id=eos, rope_theta=theta,
        rms_norm_eps=eps,
        **sizes | {key: OWN_FIELDS[name][key] for key in sizes if key in OWN_FIELDS.get(name, ())},
    )  # fmt: skip
    config = FAMILIES[name].config_to_hf(arch)
    assert FAMILIES[name].architecture_from_hf(config) == arch
    assert config["architectures"] == [FAMILIES[name].hf_architectures[0]]


def test_no_features_unless_asked_for():
    target = make_target()
    _, features, _, _ = step(target, [[1, 2]], [0], make_cache(target, 1, 8))
    assert features.shape == (1, 2, 0)


@pytest.mark.parametrize(
    ("batch", "tied"),
    [(4, False), (1, True)],  # one sequence cannot be split: all replicas run it
)
def test_eight_devices_equal_one(batch, tied):
    target = make_target(num_hidden_layers=2, tie_word_embeddings=tied)
    spread = move(target, Qwen3(target.arch, dtype=jnp.float32, sharding=EIGHT))
    tokens = np.stack(draw_tokens([10] * batch))
    results = []
    for model in (target, spread):
        cache = whole_cache(model) if batch == 1 else make_cache(model, batch, 16)
        # Two calls of one shape: the second reads what the first wrote.
        *_, cache = step(model, tokens[:, :5], [0] * batch, cache, feature_layers=(1, 0))
        results.append(step(model, tokens[:, 5:], [5] * batch, cache, feature_layers=(1, 0))[:3])
    for one, eight in zip(*results, strict=True):
        assert len(eight.sharding.device_set) == 8
        np.testing.assert_allclose(eight, one, rtol=1e-4, atol=1e-4)


def whole_cache(target):
    """Returns the cache of one sequence, of which every data replica has a full copy."""
    abstract = target.new_cache(batch=1, pages_per_sequence=2, num_pages=3, page_size=8)
    table = jax.device_put(np.array([[2, 1]], np.int32), abstract.page_table.sharding)
    return dataclasses.replace(zeros(abstract), page_table=table)
