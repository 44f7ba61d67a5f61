"""Files of speculators and other writers: tests/golden/eagle3_flags_v24/README.md."""

import dataclasses
import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import failure
from support.golden import GOLDEN, golden, load
from support.models import check_same_weights, greedy, make_architecture, zeros
from support.training import observed, whole_rows

from dflash import errors
from dflash.checkpoints import checkpoint
from dflash.config.train_schema import LossConfig
from dflash.drafters.eagle3.drafter import Eagle3
from dflash.drafters.eagle3_config import BeamTree, Eagle3Shape

FLAGS = "eagle3_flags_v24"
SETTINGS = ("fc_norm", "own_embedding", "three_layers", "window", "parallel", "parallel_norms")
IDS = "eagle_aux_hidden_state_layer_ids"


def config_of(setting):
    return json.loads((GOLDEN / FLAGS / setting / "draft" / "config.json").read_text())


def drafter_of(setting, **options):
    return load(Eagle3, GOLDEN / FLAGS / setting / "draft", **options)


@pytest.mark.parametrize("setting", SETTINGS)
def test_drafts_of_every_setting(setting):
    vectors, model = golden(f"{FLAGS}/{setting}"), drafter_of(setting)
    heads = types.SimpleNamespace(
        table_rows=lambda tokens: jnp.asarray(vectors["embedding"])[tokens]
    )
    count, sampler = jnp.array([len(vectors["features"])]), greedy(1)

    @jax.jit
    def draft(tokens, features):
        state = observed(model, features[None], heads, tokens=tokens[None])
        proposal, _ = model.draft(state, tokens[-1:], count, sampler, heads)
        fewer, _ = model.draft_fewer(1, state, tokens[-1:], count, sampler, heads)
        return proposal.tokens[0], fewer.tokens[0], model.draft_logits(state.hidden)[0]

    drafts, fewer, logits = draft(jnp.asarray(vectors["tokens"], jnp.int32), vectors["features"])
    assert drafts.tolist() == vectors["draft_tokens"].tolist()
    assert fewer.tolist() == drafts[:1].tolist()
    np.testing.assert_allclose(logits, vectors["draft_logits"][0], rtol=0, atol=1e-4)


@pytest.mark.parametrize("setting", ["fc_norm", "own_embedding", "three_layers"])
def test_training_sees_what_decoding_sees(setting):
    """The first step over true features, and the second at the last pair, which drafts."""
    vectors, model = golden(f"{FLAGS}/{setting}"), drafter_of(setting, training_steps=2)
    table, count = jnp.asarray(vectors["embedding"]), len(vectors["features"])
    heads = types.SimpleNamespace(table_rows=lambda tokens: table[tokens])
    tokens = jnp.asarray([*vectors["tokens"], vectors["draft_tokens"][0]], jnp.int32)[None]
    features = jnp.pad(jnp.asarray(vectors["features"])[None], ((0, 0), (0, 2), (0, 0)))
    batch = whole_rows(tokens, features)

    @jax.jit
    def both():
        state, start = zeros(model.init_state(1, 32)), jnp.zeros(1, jnp.int32)
        embedded = model.embed(tokens[:, 1:], heads)
        observed = model.project(features[:, :count]), embedded[:, :count]
        first, cache = model.run(*observed, state.cache, start)
        second, _ = model.run(first[:, -1:], embedded[:, -1:], cache, start + count)
        return first[0], second[0, 0], model.unroll(batch, heads)

    first, second, (unrolled, fed_back) = both()
    np.testing.assert_allclose(unrolled[0, :count], first, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(fed_back[0, count - 1], second, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("setting", SETTINGS)
def test_configs_written_are_read_back(setting):
    shape = Eagle3.architecture_from_hf(config_of(setting))
    written = json.loads(json.dumps(Eagle3.config_to_hf(shape)))
    assert Eagle3.architecture_from_hf(written) == shape
    flat = dataclasses.replace(shape, layout="eagle", speculative_tokens=None)
    if shape.target_layer_ids is None or min(shape.target_layer_ids) >= 0:
        assert Eagle3.architecture_from_hf(Eagle3.config_to_hf(flat)) == flat


def test_files_written_have_the_names_of_their_layout(tmp_path):
    for setting, layout, first in (
        ("own_embedding", "speculators", "layers.0."),
        ("own_embedding", "eagle", "midlayer."),
        ("three_layers", "eagle", "layers.0."),
    ):
        model, directory = drafter_of(setting), tmp_path / f"{setting}_{layout}"
        model.shape = dataclasses.replace(model.shape, layout=layout, target_layer_ids=(1, 2, 3, 4))
        checkpoint.save(model, directory, Eagle3.config_to_hf(model.shape))
        names = set(checkpoint.stored_tensors(directory))
        assert {f"{first}hidden_norm.weight", "fc.weight"} <= names
        assert ("embed_tokens.weight" in names) == (setting == "own_embedding")


@pytest.mark.parametrize("prefix", ["", "model."])
def test_the_first_layer_may_have_either_name(prefix, tmp_path):
    from safetensors import numpy as safetensors

    model = drafter_of("fc_norm")
    checkpoint.save(model, tmp_path / "out", Eagle3.config_to_hf(model.shape))
    path = tmp_path / "out" / "model.safetensors"
    tensors = {
        prefix + name.replace("layers.0.", "midlayer."): tensor
        for name, tensor in safetensors.load_file(path).items()
    }
    safetensors.save_file(tensors, path)
    check_same_weights(load(Eagle3, tmp_path / "out"), model)


# --- config.json ---------------------------------------------------------------------------------

FLAT = {
    "architectures": ["LlamaForCausalLMEagle3"], "vocab_size": 48, "hidden_size": 32,
    "intermediate_size": 40, "num_hidden_layers": 1, "num_attention_heads": 4,
    "max_position_embeddings": 512,
}  # fmt: skip


@pytest.mark.parametrize(
    ("ids", "outputs"),
    [
        ([1, 17, 32], (1, 17, 32)),  # ModelOpt, SpecForge: outputs, for 36 layers
        ([1, 46, 90], (1, 46, 90)),  # Qwen3-235B
        ([1, 29, 57], (1, 29, 57)),  # DeepSeek-V3
        ([2, 30, 58], (1, 29, 57)),  # inputs
        ([24, 30, 36], (23, 29, 35)),  # gpt-oss-120b-Eagle3-v3: the last is the last layer's output
    ],
)
@pytest.mark.parametrize("grouped", [True, False])
def test_numbers_of_tapped_layers_follow_their_writer(ids, outputs, grouped):
    stated = {"eagle_config": {IDS: ids, "use_aux_hidden_state": True}} if grouped else {IDS: ids}
    assert Eagle3Shape.from_hf(FLAT | stated).target_layer_ids == outputs
    explicit = FLAT | stated | {"target_layer_ids": [3]}
    assert Eagle3Shape.from_hf(explicit).target_layer_ids == (3,)


def test_files_of_speculators_number_the_inputs_of_layers():
    config = config_of("own_embedding")
    assert Eagle3Shape.from_hf(config).target_layer_ids == (-1, 1, 4, 7)
    assert Eagle3Shape.from_hf(config | {IDS: [1, 4, 7]}).target_layer_ids == (0, 3, 6)
    default = Eagle3Shape.from_hf(config | {IDS: None})
    target = make_architecture(
        vocab_size=24, hidden_size=16, num_hidden_layers=8, num_attention_heads=2
    )
    assert default.target_layer_ids is None
    assert default.fit(target).target_layer_ids == (1, 3, 4)


def test_fields_of_speculators_and_their_defaults():
    config = config_of("fc_norm")
    shape = Eagle3Shape.from_hf(config)
    assert (shape.fc_norm, shape.norm_output, shape.qk_norm, shape.num_drafts) == (True,) * 3 + (4,)
    older = {key: config[key] for key in config if not key.startswith(("norm", "fc_norm", "draft"))}
    older["transformer_layer_config"] = config["transformer_layer_config"] | {"vocab_size": 64_000}
    older["speculators_model_type"] = "qwen3"  # As in the file for Qwen3-32B.
    read = Eagle3Shape.from_hf(older)
    assert (read.norm_before_residual, read.fc_norm) == (False, False)
    assert read.draft_vocab_size == 32_000


def test_rotary_embeddings_of_speculators():
    config = config_of("fc_norm")
    sliding = {"rope_type": "default", "rope_theta": 7.0, "partial_rotary_factor": 0.5}
    full = sliding | {"rope_theta": 9.0}
    only_full = {"full_attention": full}
    for rope, base in ((only_full | {"sliding_attention": sliding}, 7.0), (only_full, 9.0)):
        decoder = config["transformer_layer_config"] | {"rope_parameters": rope}
        shape = Eagle3Shape.from_hf(config | {"transformer_layer_config": decoder})
        assert (shape.decoder.rope_theta, shape.partial_rotary_factor) == (base, 0.5)
        assert shape.rotary.head_dim == shape.decoder.head_dim // 2


def test_masks_of_flat_files():
    for stated in ({"ptd_token_id": 5}, {"pard_token": 5}, {"dflash_config": {"mask_token_id": 5}}):
        shape = Eagle3Shape.from_hf(FLAT | stated)
        assert (shape.mask_token_id, shape.embed_requires_grad) == (5, True)


REFUSED = {
    "has_router: unknown field, which may change the drafts; remove it if it does not": {
        "has_router": True
    },
    "model_type: expected one of llama, qwen3, got 'gpt_oss'": {
        "transformer_layer_config": {"model_type": "gpt_oss"}
    },
    "algorithm: expected one of eagle3, peagle, got 'dflash'": {
        "speculators_config": {"algorithm": "dflash"}
    },
    "missing mask_token_id": {"speculators_config": {"algorithm": "peagle"}},
    "fc_norm: true is not supported beside norm_before_fc": {"norm_before_fc": True},
    "proposal_methods: expected a mapping or null, got 3": {
        "speculators_config": {"proposal_methods": [3]}
    },
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_files_of_speculators_may_not_say(message):
    config = config_of("fc_norm") | REFUSED[message]
    assert failure(Eagle3.architecture_from_hf, config) == f"config.json: {message}"


@pytest.mark.parametrize("setting", ["window", "parallel"])
def test_trees_and_training_that_a_file_rules_out(setting):
    with pytest.raises(errors.ConfigError, match=r"drafter\.tree: .* draft chains only"):
        drafter_of(setting, tree=BeamTree(budget=3, top_k=2, depth=2))
    with pytest.raises(errors.ConfigError, match="is not trained here"):
        drafter_of(setting).loss(None, None, None, LossConfig())


# What is known of published files.
LLAMA = {"model_type": "llama", "num_hidden_layers": 1, "hidden_act": "silu", "mlp_bias": False}
QWEN3_32B = {
    "architectures": ["Eagle3Speculator"],
    "speculators_model_type": "qwen3",
    "speculators_version": "0.7.0.dev80",
    "has_no_defaults_at_init": False,
    "draft_vocab_size": 32_000,
    "norm_before_residual": True,
    "target_hidden_size": None,
    "tie_word_embeddings": False,
    "speculators_config": {
        "algorithm": "eagle3",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
    },
    "transformer_layer_config": LLAMA | {
        "vocab_size": 151_936, "hidden_size": 5120, "intermediate_size": 25_600,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128,
        "rms_norm_eps": 1e-6, "rope_theta": 1_000_000, "rope_scaling": None,
        "max_position_embeddings": 40_960, "attention_bias": False, "pretraining_tp": 1,
    },
}  # fmt: skip
GPT_OSS = {
    "vocab_size": 201_088, "hidden_size": 2880, "intermediate_size": 2880,
    "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "rms_norm_eps": 1e-5,
    "rope_theta": 10_000, "max_position_embeddings": 131_072,
}  # fmt: skip
GPT_OSS_20B = QWEN3_32B | {
    "architectures": ["Eagle3DraftModel"], "draft_vocab_size": 64_000, "norm_before_fc": True,
    IDS: None, "transformer_layer_config": LLAMA | GPT_OSS,
}  # fmt: skip
NVIDIA = LLAMA | GPT_OSS | {"architectures": ["LlamaForCausalLMEagle3"]}
P_EAGLE = NVIDIA | {"num_hidden_layers": 4, "ptd_token_id": 201_020}


def test_published_files():
    shape = Eagle3Shape.from_hf(QWEN3_32B)
    assert (shape.norm_before_residual, shape.norm_before_fc, shape.num_drafts) == (True, False, 3)
    sizes = make_architecture(vocab_size=151_936, hidden_size=5120, num_hidden_layers=64)
    assert shape.fit(sizes).target_layer_ids == (1, 31, 60)
    shape = Eagle3Shape.from_hf(GPT_OSS_20B)
    sizes = make_architecture(vocab_size=201_088, hidden_size=2880, num_hidden_layers=24)
    assert (shape.norm_before_fc, shape.draft_vocab_size) == (True, 64_000)
    assert shape.fit(sizes).target_layer_ids == (1, 11, 20)
    last = {"norm_before_fc": True, "eagle_config": {IDS: [24, 30, 36]}}
    assert Eagle3Shape.from_hf(NVIDIA | last).target_layer_ids == (23, 29, 35)
    parallel = Eagle3Shape.from_hf(P_EAGLE)
    assert (parallel.mask_token_id, parallel.decoder.num_hidden_layers) == (201_020, 4)
    with pytest.raises(errors.CheckpointError, match="use_aux_hidden_state: false is not"):
        Eagle3Shape.from_hf(NVIDIA | {"eagle_config": {"use_aux_hidden_state": False}})
