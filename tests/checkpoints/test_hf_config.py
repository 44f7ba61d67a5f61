"""Tests of reading and writing the decoder part of config.json."""

import copy
import dataclasses
import json
from typing import Literal

import pytest
import support
from hypothesis import given, settings
from hypothesis import strategies as st
from support.models import make_architecture

from dflash import errors
from dflash.checkpoints import defaults_config, hf_config
from dflash.config import registry
from dflash.config.schema import RopeScaling, TargetArchitecture, option
from dflash.models.dense import Qwen3

LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
NAMED_BY_TYPE = {"type" if key == "rope_type" else key: value for key, value in LLAMA3.items()}


def make_config(**changes):
    """Returns a config.json with only the required fields, and the given changes."""
    config = {
        "vocab_size": 48, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
        "num_attention_heads": 4, "max_position_embeddings": 512, "rope_theta": 10000,
    }  # fmt: skip
    return config | changes


def failure(config):
    with pytest.raises(errors.CheckpointError) as caught:
        hf_config.read_architecture(config)
    return str(caught.value)


def test_least_config():
    assert hf_config.read_architecture(make_config()) == make_architecture(
        num_key_value_heads=4,  # as many as query heads
        head_dim=8,  # of the hidden size, evenly
        rope_theta=10000.0,
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
        eos_token_id=(),
    )


def test_everything_stated():
    config = make_config(
        num_key_value_heads=2, head_dim=16, rms_norm_eps=1e-5, tie_word_embeddings=True,
        eos_token_id=[3, 7], rope_scaling=LLAMA3,
    )  # fmt: skip
    assert hf_config.read_architecture(config) == make_architecture(
        rope_theta=10000.0, rms_norm_eps=1e-5, tie_word_embeddings=True, eos_token_id=(3, 7),
        rope_scaling=RopeScaling(8.0, 1.0, 4.0, 8192),
    )  # fmt: skip


@pytest.mark.parametrize(("eos", "expected"), [(None, ()), (0, (0,)), ([5], (5,)), ([], ())])
def test_end_of_sequence_ids(eos, expected):
    assert hf_config.read_architecture(make_config(eos_token_id=eos)).eos_token_id == expected


ROPES = {
    "top level": ({"rope_theta": 5e5}, None),
    "top level, scaling named by type":
        ({"rope_theta": 5e5, "rope_scaling": NAMED_BY_TYPE}, RopeScaling()),
    "rope_parameters": ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, None),
    "rope_parameters with scaling":
        ({"rope_parameters": LLAMA3 | {"rope_theta": 5e5}}, RopeScaling()),
    "theta above, scaling in rope_parameters":
        ({"rope_theta": 5e5, "rope_parameters": LLAMA3}, RopeScaling()),
    "yarn, with what a file may state of it": (
        {"rope_theta": 5e5, "rope_scaling": YARN | {"beta_slow": 2, "mscale": 1.0}},
        RopeScaling(**YARN, beta_slow=2.0, mscale=1.0),
    ),
    "null above": ({"rope_theta": None, "rope_parameters": {"rope_theta": 5e5}}, None),
    "null scaling": ({"rope_theta": 5e5, "rope_scaling": None}, None),
}  # fmt: skip


@pytest.mark.parametrize("form", ROPES)
def test_forms_of_rotary_settings(form):
    fields, scaling = ROPES[form]
    config = make_config()
    del config["rope_theta"]
    arch = hf_config.read_architecture(config | fields)
    assert (arch.rope_theta, arch.rope_scaling) == (5e5, scaling)


STATED_TWICE = {
    "bases": {"rope_theta": 7e4, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    "scaling without base": {
        "rope_theta": 7e4, "rope_scaling": YARN,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
    },
    "scaling with base": {
        "rope_theta": 7e4, "rope_scaling": YARN | {"rope_theta": 3e4},
        "rope_parameters": LLAMA3 | {"rope_theta": 5e5},
    },
    "empty scaling": {"rope_parameters": LLAMA3 | {"rope_theta": 5e5}, "rope_scaling": {}},
}  # fmt: skip


@pytest.mark.parametrize("form", STATED_TWICE)
def test_rotary_settings_stated_twice_are_read_as_by_transformers(form):
    transformers = pytest.importorskip("transformers")
    fields = copy.deepcopy(STATED_TWICE[form])
    expected = transformers.LlamaConfig(**copy.deepcopy(fields)).rope_parameters
    config = make_config()
    del config["rope_theta"]
    arch = hf_config.read_architecture(config | fields)
    kind = "default" if arch.rope_scaling is None else arch.rope_scaling.rope_type
    assert (arch.rope_theta, kind) == (expected["rope_theta"], expected["rope_type"])
    if arch.rope_scaling is not None:
        assert arch.rope_scaling.factor == expected["factor"]


def test_scaling_added_without_a_base_is_refused():
    """It replaces rope_parameters, which has the only base."""
    config = make_config() | {"rope_parameters": {"rope_theta": 5e5}, "rope_scaling": YARN}
    del config["rope_theta"]
    with pytest.raises(errors.CheckpointError, match="nor in rope_scaling"):
        hf_config.read_architecture(config)


WRONG = {
    "num_attention_heads: expected an integer >= 1, got 0": {"num_attention_heads": 0},
    "num_hidden_layers: expected an integer in [1, 1024], got '8'": {"num_hidden_layers": "8"},
    "hidden_size: expected an integer >= 1, got true": {"hidden_size": True},
    "rms_norm_eps: expected a number >= 0, got nan": {"rms_norm_eps": float("nan")},
    "tie_word_embeddings: expected true or false, got 'no'": {"tie_word_embeddings": "no"},
    "head_dim: expected an even number (rotary halves), got 7": {"head_dim": 7},
    "num_attention_heads: 4 does not divide into num_key_value_heads=3 groups":
        {"num_key_value_heads": 3},
    "rope_parameters: expected a mapping or null, got 5": {"rope_parameters": 5},
    "rope_scaling: factor: expected a number >= 1, got 0": {"rope_scaling": LLAMA3 | {"factor": 0}},
    "rope_scaling.low_freq_factor: 4.0 is not below high_freq_factor=4.0":
        {"rope_scaling": LLAMA3 | {"low_freq_factor": 4.0}},
    "eos_token_id[1]: expected an integer >= 0, got null": {"eos_token_id": [1, None]},
    "missing vocab_size, hidden_size": {"vocab_size": None, "hidden_size": None},
    "hidden_act: 'gelu' is not supported, only 'silu'": {"hidden_act": "gelu"},
    "missing rope_theta (neither at the top level nor in rope_parameters)": {"rope_theta": None},
    "rope type 'longrope' is not supported, only one of 'default', 'linear', 'llama3', 'yarn'":
        {"rope_scaling": {"rope_type": "longrope", "factor": 4.0}},
    "rope_scaling: attention_factor: expected a number >= 0 or null, got 'high'":
        {"rope_scaling": YARN | {"attention_factor": "high"}},
    "rope scaling lacks low_freq_factor":
        {"rope_scaling": {"rope_type": "llama3", "factor": 4.0, "high_freq_factor": 4.0}},
}  # fmt: skip


@pytest.mark.parametrize("message", WRONG)
def test_what_cannot_be_served_is_refused(message):
    assert failure(make_config(**WRONG[message])) == f"config.json: {message}"


MODEL_TYPES = sorted(defaults_config._DEFAULTS.keys() - {"kimi_k2"})  # Not in transformers.
# Fields of transformers' config classes that change nothing that is computed here.
INERT = {
    *("initializer_range", "use_cache", "attention_dropout", "pretraining_tp", "pad_token_id"),
    *("bos_token_id", "output_router_logits", "router_aux_loss_coef", "num_nextn_predict_layers"),
    *("vocab_size_per_layer_input", "_sliding_window_pattern", "max_window_layers"),
    "router_jitter_noise",  # Of training.
}
# Those of some types: a window and layers that use_sliding_window=false leaves without effect, and
# what follows from other fields.
WITHOUT_WINDOW = {"sliding_window", "layer_types"}
INERT_OF = {
    **dict.fromkeys(("qwen2", "qwen3", "qwen3_moe"), WITHOUT_WINDOW),
    "smollm3": WITHOUT_WINDOW | {"no_rope_layer_interval"},
    "gemma4_text": {"use_double_wide_mlp"},  # Of layers that share keys and values.
    "deepseek_v3": {"head_dim", "qk_head_dim", "num_key_value_heads"},
}
OTHER = {"use_bidirectional_attention": "all", "layer_types": ["full_attention"] * 3}


def family_of(model_type):
    kinds = [registry.load(entry.implementation) for entry in registry.TARGETS.values()]
    name = model_type.replace("_moe_text", "_text")
    return next(kind for kind in kinds if kind.hf_model_type == name)


def as_read(kind, config):
    """Fields of the architecture in one form, or the reason why it is refused."""
    try:
        arch = kind.architecture_from_hf({"hidden_size_per_layer_input": 0, **config})
    except errors.CheckpointError as error:
        return str(error)
    layers = range(arch.num_hidden_layers)
    fields = dataclasses.asdict(arch)
    if hasattr(arch, "rotates"):
        fields["no_rope_layers"] = [arch.rotates(layer) for layer in layers]
    if hasattr(arch, "is_full"):
        fields["layer_types"] = [arch.is_full(layer) for layer in layers]
    return fields


def theirs(model_type):
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(model_type).to_dict()
    general = transformers.PreTrainedConfig().to_dict().keys() - {"tie_word_embeddings"}
    config = {k: v for k, v in config.items() if k not in general or k == "eos_token_id"}
    if "hidden_size_per_layer_input" in config:  # Only models without are supported.
        config["hidden_size_per_layer_input"] = 0
    return config | {"model_type": model_type}


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_a_field_that_is_left_out_has_the_default_of_transformers(model_type):
    kind, config = family_of(model_type), theirs(model_type)
    whole = as_read(kind, config)
    assert isinstance(whole, dict), whole
    assert as_read(kind, {"model_type": model_type}) == whole
    for name in config.keys() - {"layer_types", "no_rope_layers", "model_type"}:
        rest = {key: value for key, value in config.items() if key != name}
        assert as_read(kind, rest) == whole, name


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_each_field_of_transformers_is_read_or_refused(model_type):
    kind, config = family_of(model_type), theirs(model_type)
    whole, unread = as_read(kind, config), set()
    for name in config.keys() - INERT - INERT_OF.get(model_type, set()) - {"model_type"}:
        value = config[name]
        if name in OTHER:
            value = OTHER[name]
        elif isinstance(value, bool) or value is None:
            value = not value
        elif isinstance(value, dict):
            value = {"rope_type": "other"}
        else:
            value = {int: 6, float: 3.0, str: "other", list: [0]}[type(value)]
        if as_read(kind, config | {name: value}) == whole:
            unread.add(name)
    assert not unread


def test_each_family_has_defaults():
    kinds = [registry.load(entry.implementation) for entry in registry.TARGETS.values()]
    texts = {getattr(kind, "text_class", kind).hf_model_type for kind in kinds}
    assert texts <= defaults_config._DEFAULTS.keys()


def test_scaling_is_of_the_context_length_unless_it_states_another():
    config = make_config(rope_scaling={"rope_type": "yarn", "factor": 4.0})
    assert hf_config.read_architecture(config).rope_scaling.original_max_position_embeddings == 512


YARN_SCALING = RopeScaling(
    rope_type="yarn", factor=64.0, mscale=1.0, mscale_all_dim=1.0, attention_factor=1.4159
)


@pytest.mark.parametrize("scaling", [None, RopeScaling(), YARN_SCALING])
def test_what_is_written_is_json_and_reads_back(scaling):
    arch = make_architecture(rope_scaling=scaling, eos_token_id=(3, 7))
    text = json.dumps(hf_config.write_architecture(arch))
    assert hf_config.read_architecture(json.loads(text)) == arch


def test_each_unusable_field_has_a_line():
    lines = failure(make_config(hidden_size=-1, vocab_size=10**400)).splitlines()
    assert lines == [
        f"config.json: vocab_size: expected an integer >= 1, got '1{'0' * 99}'",
        "config.json: hidden_size: expected an integer >= 1, got -1",
    ]


NUMBERS = st.integers() | st.sampled_from([0, -1, 2**31, 2**63, 10**400, 1e308]) | st.floats()
TEXTS = st.text(max_size=4) | st.sampled_from(["silu", "llama3", "yarn", "default", "x" * 1000])
KEYS = st.sampled_from([*LLAMA3, "mscale", "beta_fast", "type", "rope_theta", "rope_parameters"])
ANYTHING = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS | st.text(), inner),
    max_leaves=5,
)
EVERY_FIELD = sorted(
    {field.name for field in dataclasses.fields(TargetArchitecture)}
    | {"hidden_act", "rope_parameters", "architectures", "attention_bias", "use_sliding_window"}
)


@settings(max_examples=100)
@given(st.dictionaries(st.sampled_from(EVERY_FIELD), ANYTHING, min_size=1, max_size=3))
def test_any_json_is_read_or_refused_by_field(changes):
    lines = problems(make_config(**changes))
    assert all(line.startswith("config.json: ") and len(line) < 500 for line in lines)


def problems(config):
    try:
        arch = Qwen3.architecture_from_hf(config)
        hf_config.read_classes(config)
    except errors.CheckpointError as error:
        return str(error).splitlines()
    json.dumps(hf_config.write_architecture(arch))
    return []


@dataclasses.dataclass(frozen=True)
class Heads:
    """Fields of a checkpoint that is no decoder."""

    count: int = option(minimum=1)
    kind: Literal["plain", "gated"] = "plain"
    taps: tuple[int, ...] | None = option(None, minimum=0)


def test_any_dataclass_is_read():
    assert hf_config.read_fields({"count": 2, "other": {}, "kind": None}, Heads) == Heads(2)
    stated = {"count": 2, "kind": "gated", "taps": [0, 3]}
    assert hf_config.read_fields(stated, Heads) == Heads(2, "gated", (0, 3))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "missing count"),
        ({"count": 1, "kind": "plian"},
         "kind: expected one of plain, gated, got 'plian'; did you mean 'plain'?"),
        ({"count": 1, "taps": 3}, "taps: expected a list of integers >= 0 or null, got 3"),
        ({"count": 1, "taps": [0, -3]}, "taps[1]: expected an integer >= 0, got -3"),
        ({"count": 1, "taps": {"a": 1}},
         "taps: expected a list of integers >= 0 or null, got a mapping"),
    ],
)  # fmt: skip
def test_messages_name_the_file_and_the_group(fields, message):
    place = {"group": "own_config", "file": "x.json"}
    said = support.failure(hf_config.read_fields, fields, Heads, **place)
    assert said == f"x.json: own_config: {message}"
