"""Tests of reading and writing the decoder part of config.json."""

import copy
import dataclasses
import json
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.models import make_architecture

from dflash import errors
from dflash.checkpoints import hf_config
from dflash.config.schema import RopeScaling, TargetArchitecture, option
from dflash.models.dense import Qwen3

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
NAMED_BY_TYPE = {"type" if key == "rope_type" else key: value for key, value in LLAMA3.items()}


def make_config(**changes):
    """Returns a config.json with only the required fields, and the given changes."""
    config = {
        "vocab_size": 48,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
        "rope_theta": 10000,
    }
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
        num_key_value_heads=2,
        head_dim=16,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        eos_token_id=[3, 7],
        rope_scaling=LLAMA3,
    )
    assert hf_config.read_architecture(config) == make_architecture(
        rope_theta=10000.0,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        eos_token_id=(3, 7),
        rope_scaling=RopeScaling(8.0, 1.0, 4.0, 8192),
    )


@pytest.mark.parametrize(("eos", "expected"), [(None, ()), (0, (0,)), ([5], (5,)), ([], ())])
def test_end_of_sequence_ids(eos, expected):
    assert hf_config.read_architecture(make_config(eos_token_id=eos)).eos_token_id == expected


ROPES = {
    "top level": ({"rope_theta": 5e5}, None),
    "top level, scaling named by type": (
        {"rope_theta": 5e5, "rope_scaling": NAMED_BY_TYPE},
        RopeScaling(),
    ),
    "rope_parameters": ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, None),
    "rope_parameters with scaling": (
        {"rope_parameters": LLAMA3 | {"rope_theta": 5e5}},
        RopeScaling(),
    ),
    "theta above, scaling in rope_parameters": (
        {"rope_theta": 5e5, "rope_parameters": LLAMA3},
        RopeScaling(),
    ),
    "yarn, with what a file may state of it": (
        {"rope_theta": 5e5, "rope_scaling": YARN | {"beta_slow": 2, "mscale": 1.0}},
        RopeScaling(
            factor=4.0,
            original_max_position_embeddings=32,
            rope_type="yarn",
            beta_slow=2.0,
            mscale=1.0,
        ),
    ),
    "null above": ({"rope_theta": None, "rope_parameters": {"rope_theta": 5e5}}, None),
    "null scaling": ({"rope_theta": 5e5, "rope_scaling": None}, None),
}


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
        "rope_theta": 7e4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
        "rope_scaling": YARN,
    },
    "scaling with base": {
        "rope_theta": 7e4,
        "rope_parameters": LLAMA3 | {"rope_theta": 5e5},
        "rope_scaling": YARN | {"rope_theta": 3e4},
    },
    "empty scaling": {"rope_parameters": LLAMA3 | {"rope_theta": 5e5}, "rope_scaling": {}},
}


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
    "num_attention_heads: 4 does not divide into num_key_value_heads=3 groups": {
        "num_key_value_heads": 3
    },
    "rope_parameters: expected a mapping or null, got 5": {"rope_parameters": 5},
    "rope_scaling: factor: expected a number >= 1, got 0": {"rope_scaling": LLAMA3 | {"factor": 0}},
    "rope_scaling.low_freq_factor: 4.0 is not below high_freq_factor=4.0": {
        "rope_scaling": LLAMA3 | {"low_freq_factor": 4.0}
    },
    "eos_token_id[1]: expected an integer >= 0, got null": {"eos_token_id": [1, None]},
    "missing vocab_size, hidden_size": {"vocab_size": None, "hidden_size": None},
    "hidden_act: 'gelu' is not supported, only 'silu'": {"hidden_act": "gelu"},
    "missing rope_theta (neither at the top level nor in rope_parameters)": {"rope_theta": None},
    "rope type 'longrope' is not supported, only one of 'default', 'linear', 'llama3', 'yarn'": {
        "rope_scaling": {"rope_type": "longrope", "factor": 4.0}
    },
    "rope_scaling: attention_factor: expected a number >= 0 or null, got 'high'": {
        "rope_scaling": YARN | {"attention_factor": "high"}
    },
    "rope scaling lacks original_max_position_embeddings, low_freq_factor": {
        "rope_scaling": {"rope_type": "llama3", "factor": 4.0, "high_freq_factor": 4.0}
    },
}


@pytest.mark.parametrize("message", WRONG)
def test_what_cannot_be_served_is_refused(message):
    assert failure(make_config(**WRONG[message])) == f"config.json: {message}"


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


ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([0, -1, 2**31, 2**63, 10**400, 1e308])
    | st.floats()
    | st.text(max_size=4)
    | st.sampled_from(["silu", "llama3", "yarn", "default", "x" * 1000]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [*LLAMA3, "mscale", "beta_fast", "type", "rope_theta", "rope_parameters"]
            )
            | st.text(),
            inner,
        )
    ),
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
    with pytest.raises(errors.CheckpointError) as caught:
        hf_config.read_fields(fields, Heads, group="own_config", file="x.json")
    assert str(caught.value) == f"x.json: own_config: {message}"
