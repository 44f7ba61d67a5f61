"""Tests of how a DFlash drafter's config.json is read, and how a drafter is made for a target."""

import dataclasses

import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import failure
from support.dflash_cases import BLOCK, FULL, SLIDE, VIEWS, WHOLE, make_config, make_shape
from support.models import make_architecture, make_sharding

from dflash import errors
from dflash.config.schema import RopeScaling
from dflash.drafters.base_config import MarginalTree
from dflash.drafters.dflash import DFlash
from dflash.drafters.dflash_config import (
    DFlashArchitecture,
    DFlashConfig,
    DFlashShape,
    LayerView,
    default_taps,
)

# --- config.json ----------------------------------------------------------------------------------


@pytest.mark.parametrize("form", VIEWS)
def test_views_are_read(form):
    changes, expected = VIEWS[form]
    shape = DFlash.architecture_from_hf(make_config(**changes))
    assert shape.views == expected


def test_a_window_of_the_run_narrows_every_view():
    config = DFlashConfig(checkpoint="drafter", window=4, longest_context=99)
    hf = make_config(layer_types=["full_attention", "sliding_attention"], sliding_window=3)
    build = {"dtype": jnp.float32, "sharding": make_sharding()}
    made = DFlash.create(config, hf, make_architecture(), **build)
    assert [view.window for view in made.shape.views] == [4, 3]
    assert made.longest_context == 99
    plain = DFlash.create(
        dataclasses.replace(config, window=None), hf, make_architecture(), **build
    )
    assert [view.window for view in plain.shape.views] == [None, 3]


def test_windows_to_choose_from_narrow_a_view_and_no_block():
    config = DFlashConfig(checkpoint="drafter", window="auto")
    build = {"dtype": jnp.float32, "sharding": make_sharding()}
    for hf, windows in (
        (make_config(), (64, 256, 1024, 4096)),
        (make_config(layer_types=["sliding_attention"] * 2, sliding_window=300), (64, 256)),
        (make_config(block_size=64), (256, 1024, 4096)),
    ):
        made = DFlash.create(config, hf, make_architecture(), **build)
        assert made.windows == windows
        assert made.shape == DFlash.architecture_from_hf(hf).fit(make_architecture())


def test_both_layouts_say_the_same():
    old = make_config(rope_theta=1e5)
    new = make_config(rope_theta=1e5)
    new["dflash_config"] |= {key: new.pop(key) for key in ("block_size", "num_target_layers")}
    new["rope_parameters"] = {"rope_type": "default", "rope_theta": new.pop("rope_theta")}
    for config in (old, new):
        shape = DFlash.architecture_from_hf(config)
        assert (shape.block_size, shape.num_target_layers, shape.mask_token_id) == (BLOCK, 3, 47)
        assert shape.decoder.rope_theta == 1e5
    assert DFlash.architecture_from_hf(old) == DFlash.architecture_from_hf(new)


def test_taps_may_stand_beside_the_group():
    config = make_config()
    config["target_layer_ids"] = config["dflash_config"].pop("target_layer_ids")
    assert DFlash.architecture_from_hf(config) == DFlash.architecture_from_hf(make_config())


@pytest.mark.parametrize("place", ["beside", "within"])
def test_what_heads_do_may_stand_beside_the_group_or_within(place):
    stated = {"partial_rotary_factor": 0.5, "attention_sink_bias": True, "is_causal": True}
    stated["attention_value_scale"] = 0.612
    config = make_config(**stated) if place == "beside" else make_config(dflash_config=stated)
    shape = DFlash.architecture_from_hf(config)
    assert (shape.rotary.head_dim, shape.decoder.head_dim) == (8, 16)
    assert (shape.attention_sink_bias, shape.attention_value_scale) == (True, 0.612)
    assert all(view.causal for view in shape.views)


def test_null_counts_as_absent():
    config = make_config()
    config["dflash_config"]["block_size"] = config["block_size"]
    config |= {"block_size": None, "rope_theta": None, "rope_parameters": {"rope_theta": 1e5}}
    shape = DFlash.architecture_from_hf(config)
    assert (shape.block_size, shape.decoder.rope_theta) == (BLOCK, 1e5)


@pytest.mark.parametrize("absent", [{}, {"target_layer_ids": None}, {"target_layer_ids": []}])
def test_taps_are_not_guessed(absent):
    config = make_config(num_layers=5, num_target_layers=36)
    del config["dflash_config"]["target_layer_ids"]
    config["dflash_config"] |= absent
    with pytest.raises(errors.CheckpointError, match="missing target_layer_ids"):
        DFlash.architecture_from_hf(config)


WRONG = {
    "missing block_size, mask_token_id": {"block_size": None, "mask_token_id": None},
    "layer_types names 1 layers, num_hidden_layers is 2": {"layer_types": [WHOLE]},
    "layer_types[1]: expected one of full_attention, sliding_attention, got "
    "'chunked_attention'; did you mean 'full_attention'?": {
        "layer_types": [WHOLE, "chunked_attention"]
    },
    "draft_shift: true is not supported, only false": {"draft_shift": True},
    "partial_rotary_factor: 0.1 rotates 1 of 16 head dimensions; expected a positive even number": {
        "partial_rotary_factor": 0.1
    },
    "layer 0 slides, but no sliding_window or swa_window_size is given": {
        "layer_types": [SLIDE, WHOLE]
    },
}


@pytest.mark.parametrize("message", WRONG)
def test_incomplete_configs_are_refused(message):
    config = make_config() | WRONG[message]
    if "mask_token_id" in config:
        del config["dflash_config"]["mask_token_id"]
    assert failure(DFlash.architecture_from_hf, config) == f"config.json: {message}"


@st.composite
def shapes(draw):
    """Draws shapes that a config.json can describe."""
    window = draw(st.integers(1, 4096))
    causal, sliding_causal = draw(st.booleans()), draw(st.booleans())
    sliding = draw(st.lists(st.booleans(), min_size=1, max_size=5))
    views = [
        LayerView(window, causal or sliding_causal) if on else LayerView(None, causal)
        for on in sliding
    ]
    scaling = draw(st.none() | st.just(RopeScaling(8.0, 1.0, 4.0, 8192)))
    return make_shape(
        *views, decoder=make_architecture(num_hidden_layers=len(views), rope_scaling=scaling),
        block_size=draw(st.integers(2, 32)), mask_token_id=draw(st.integers(0, 47)),
        target_layer_ids=tuple(draw(st.lists(st.integers(0, 35), min_size=1, max_size=5))),
        num_target_layers=draw(st.integers(1, 36)),
        partial_rotary_factor=draw(st.sampled_from([1.0, 0.5, 0.25])),
        attention_bias=draw(st.booleans()), attention_sink_bias=draw(st.booleans()),
        attention_value_scale=draw(st.sampled_from([1.0, 0.612])),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("layers", "count", "taps"),
    [
        (36, 5, (1, 9, 17, 25, 33)),  # Qwen3-4B and 8B
        (32, 5, (1, 8, 15, 22, 29)),  # Llama-3.1-8B
        (36, 1, (18,)),
        (5, 2, (1, 2)),
        (6, 3, (1, 2, 3)),
    ],
)
def test_default_taps(layers, count, taps):
    assert default_taps(layers, count) == taps


@given(layers=st.integers(1, 100), count=st.integers(1, 10))
def test_default_taps_exist_and_ascend(layers, count):
    taps = default_taps(layers, count)
    assert len(taps) == count
    assert all(0 <= layer < layers for layer in taps)
    if layers >= 4:
        assert list(taps) == sorted(taps)


# --- a drafter for a target -----------------------------------------------------------------------


def create(config=None, hf=None, **changes):
    config = config or DFlashConfig(checkpoint="random")
    arch = make_architecture(**changes)
    return DFlash.create(config, hf, arch, dtype=jnp.float32, sharding=make_sharding())


def test_fresh_drafters_are_of_the_width_of_their_target():
    options = DFlashArchitecture(num_hidden_layers=2, block_size=8, num_target_features=2)
    drafter = create(DFlashConfig(checkpoint="random", architecture=options), rope_theta=1e4)
    layers = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 128}
    assert drafter.shape == DFlashShape(
        decoder=make_architecture(num_hidden_layers=2, intermediate_size=96, **layers),
        block_size=8,
        mask_token_id=47,
        target_layer_ids=(1, 0),
        num_target_layers=3,
        views=(FULL, FULL),
    )
    assert drafter.fc.kernel.get_value().shape == (64, 32)


def test_options_of_fresh_drafters():
    options = DFlashArchitecture(
        num_hidden_layers=1, mask_token_id=0, target_layer_ids=(2, 0), intermediate_size=8
    )
    drafter = create(DFlashConfig(checkpoint="random", block_size=4, architecture=options))
    assert drafter.feature_layers == (2, 0)
    assert drafter.shape.mask_token_id == 0
    assert drafter.shape.decoder.intermediate_size == 8
    assert (drafter.shape.block_size, drafter.block_size) == (16, 4)


def test_the_budget_of_a_tree_comes_from_the_config():
    options = DFlashArchitecture(num_hidden_layers=1, target_layer_ids=(0,))
    base = DFlashConfig(checkpoint="random", architecture=options, block_size=2)
    assert create(base).tree_budget is None
    most = dataclasses.replace(base, tree=MarginalTree(budget=48))
    assert create(most).num_draft_tokens == 48
    larger = dataclasses.replace(base, tree=MarginalTree(budget=49))
    assert failure(create, larger, kind=errors.ConfigError) == (
        "drafter.tree.budget: 49 exceeds the block's capacity of 48 drafts at 1 draft "
        "position of 48 tokens; lower it, or raise drafter.block_size"
    )


OTHER_TARGETS = {
    "hidden size 32 (target: 64)": {"hidden_size": 64},
    "number of target layers 3 (target: 4), vocabulary 48 (target: 50)": {
        "num_hidden_layers": 4,
        "vocab_size": 50,
    },
}


@pytest.mark.parametrize("differences", OTHER_TARGETS)
def test_drafters_of_other_targets_are_refused(differences):
    said = failure(create, hf=make_config(), **OTHER_TARGETS[differences])
    assert said == f"drafter.checkpoint: trained for another target: {differences}"


@pytest.mark.parametrize("own", [{"target_layer_ids": [0, 3]}, {"mask_token_id": 48}])
def test_taps_and_mask_must_exist_in_the_target(own):
    with pytest.raises(errors.CheckpointError, match="but the target has 3 layers and 48 tokens"):
        create(hf=make_config(dflash_config=own))
