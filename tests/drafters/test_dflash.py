"""Tests of the DFlash drafter: its pass against plain loops, and how its config.json is read."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense import dense_attention
from helpers import make_architecture, make_sharding, make_target, move, zeros
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash import errors
from dflash.common import parameters
from dflash.config.schema import DFlashArchitecture, DFlashConfig, RopeScaling
from dflash.drafters.dflash import DFlash, DFlashShape, LayerView, default_taps

FULL, CAUSAL = LayerView(), LayerView(causal=True)
CAPACITY = 24
BLOCK = 6


def make_shape(*views, **changes):
    values = {
        "decoder": make_architecture(num_hidden_layers=len(views)),
        "block_size": BLOCK,
        "mask_token_id": 47,
        "target_layer_ids": (0, 2),
        "num_target_layers": 3,
        "views": views,
    }
    return DFlashShape(**(values | changes))


def make_config(num_layers=2, dflash_config=(), **changes):
    """A drafter's config.json in its older layout, which says nothing about windows."""
    config = DFlash.config_to_hf(make_shape(*[FULL] * num_layers))
    for name in ("layer_types", "sliding_window", "sliding_window_non_causal"):
        del config[name]
    own = {key: config["dflash_config"][key] for key in ("mask_token_id", "target_layer_ids")}
    return config | {"dflash_config": own | dict(dflash_config)} | changes


@functools.cache
def weights(num_layers):
    """One set of weights, with norms that are not ones, for drafters of all views."""
    drafter = DFlash(make_shape(*[FULL] * num_layers), dtype=jnp.float32, sharding=make_sharding())
    rng = np.random.default_rng(1)
    values = {}
    for path, param in parameters.named_parameters(drafter):
        mean, std = (1.0, 0.3) if path.endswith("scale") else (0.0, 0.2)
        draws = rng.normal(mean, std, param.get_value().shape)
        values[path] = jnp.asarray(draws, jnp.float32)
    return values


def make_drafter(shape, **options):
    drafter = DFlash(shape, **({"dtype": jnp.float32, "sharding": make_sharding()} | options))
    parameters.assign(drafter, weights(len(shape.views)))
    return drafter


def draw_features(batch, rows, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(batch, rows, 64)), jnp.float32)


def observe(drafter, state, position, features):
    position = jnp.asarray(position, jnp.int32)
    tokens = jnp.zeros((features.shape[0], features.shape[1] + 1), jnp.int32)
    count = jnp.full_like(position, features.shape[1])
    return jax.jit(drafter.observe)(state, position, tokens, count, features)


def new_state(drafter, batch):
    return zeros(drafter.init_state(batch, CAPACITY - drafter.block_size))


def paint(drafter, state, anchor, position, heads=None):
    heads = heads or make_target()
    call = jax.jit(lambda *args: drafter.paint(*args, heads)[0])
    return call(state, jnp.asarray(anchor), jnp.asarray(position))


# --- the pass, in plain loops ---------------------------------------------------------------------


def rms_norm(x, scale, eps=1e-6):
    return scale * x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps)


def rotate(x, positions, theta):
    half = x.shape[-1] // 2
    turns = np.exp(1j * np.asarray(positions)[:, None, None] * theta ** (-np.arange(half) / half))
    turned = (x[..., :half] + 1j * x[..., half:]) * turns
    return np.concatenate([turned.real, turned.imag], axis=-1)


def visible(view, anchor, block):
    """Which of positions 0 … anchor - 1 and of the block's own rows each row sees."""
    mask = np.zeros((block, anchor + block), bool)
    for row in range(block):
        for position in range(anchor):
            mask[row, position] = view.window is None or position >= anchor - view.window
        for other in range(block):
            mask[row, anchor + other] = other <= row or not view.causal
    return mask


def plain_paint(values, views, features, embedded, arch):
    """The block pass of one sequence in float64; features [L, C·D] of all positions before it."""
    w = {path: np.asarray(value, np.float64) for path, value in values.items()}
    anchor, block = len(features), len(embedded)
    context = rms_norm(features @ w["fc.kernel"], w["hidden_norm.scale"])
    x = embedded
    for i, view in enumerate(views):
        layer = {path.split(".", 2)[2]: w[path] for path in w if path.startswith(f"layers.{i}.")}
        normed = rms_norm(x, layer["input_layernorm.scale"])

        def project(rows, name, layer=layer):
            projected = rows @ layer[f"self_attn.{name}_proj.kernel"]
            return projected.reshape(len(rows), -1, arch.head_dim)

        rows = np.concatenate([context, normed])
        queries = rms_norm(project(normed, "q"), layer["self_attn.q_norm.scale"])
        keys = rms_norm(project(rows, "k"), layer["self_attn.k_norm.scale"])
        attended = dense_attention(
            rotate(queries, range(anchor, anchor + block), arch.rope_theta),
            rotate(keys, range(anchor + block), arch.rope_theta),
            project(rows, "v"),
            visible(view, anchor, block),
            arch.head_dim**-0.5,
        )
        x = x + attended.reshape(block, -1) @ layer["self_attn.o_proj.kernel"]
        normed = rms_norm(x, layer["post_attention_layernorm.scale"])
        gate = normed @ layer["mlp.gate_proj.kernel"]
        up = normed @ layer["mlp.up_proj.kernel"]
        x = x + (gate / (1 + np.exp(-gate)) * up) @ layer["mlp.down_proj.kernel"]
    return rms_norm(x, w["norm.scale"])


def check_paint(drafter, views, *, anchors=(13, 11, 17), positions=(0, 4, 15)):
    """Paints ragged sequences and compares each with `views` in plain loops."""
    batch, block = len(positions), drafter.block_size
    features = draw_features(batch, max(positions))
    state = observe(drafter, new_state(drafter, batch), [0] * batch, features)
    hidden = paint(drafter, state, anchors, positions)
    table = np.asarray(make_target().embed_tokens.embedding[...], np.float64)
    for b, position in enumerate(positions):
        tokens = [anchors[b]] + [drafter.shape.mask_token_id] * (block - 1)
        expected = plain_paint(
            weights(len(views)),
            views,
            np.asarray(features[b, :position], np.float64),
            table[tokens],
            drafter.shape.decoder,
        )
        np.testing.assert_allclose(hidden[b], expected, atol=1e-4)


# What config.json says -> what its two layers see.
SLIDE, WHOLE = "sliding_attention", "full_attention"
VIEWS = {
    "nothing": ({}, (FULL, FULL)),
    "a window, but no layer that slides": ({"sliding_window": 3}, (FULL, FULL)),
    "layer types": (
        {"layer_types": [SLIDE, WHOLE], "sliding_window": 3},
        (LayerView(3), FULL),
    ),
    "sliding layers marked causal": (
        {"layer_types": [WHOLE, SLIDE], "sliding_window": 3, "sliding_window_non_causal": False},
        (FULL, LayerView(3, causal=True)),
    ),
    "sliding layers marked bidirectional": (
        {"layer_types": [WHOLE, SLIDE], "sliding_window": 3, "sliding_window_non_causal": True},
        (FULL, LayerView(3)),
    ),
    "the flag alone": (
        {"dflash_config": {"use_swa": True, "swa_window_size": 5}},
        (LayerView(5), LayerView(5)),
    ),
    "the flag with layer types": (
        {
            "layer_types": [WHOLE, SLIDE],
            "sliding_window": 3,
            "dflash_config": {"use_swa": True, "swa_window_size": 5},
        },
        (FULL, LayerView(5)),
    ),
    "the flag with the window beside it": (
        {"sliding_window": 4, "dflash_config": {"use_swa": True}},
        (LayerView(4), LayerView(4)),
    ),
    "the flag off": (
        {"dflash_config": {"use_swa": False, "swa_window_size": 5}},
        (FULL, FULL),
    ),
    "causal": ({"dflash_config": {"causal": True}}, (CAUSAL, CAUSAL)),
    "causal and sliding": (
        {
            "layer_types": [SLIDE, WHOLE],
            "sliding_window": 3,
            "dflash_config": {"causal": True},
        },
        (LayerView(3, causal=True), CAUSAL),
    ),
}


@pytest.mark.parametrize("form", VIEWS)
def test_views_are_read(form):
    changes, expected = VIEWS[form]
    shape = DFlash.architecture_from_hf(make_config(**changes))
    assert shape.views == expected


@pytest.mark.parametrize(
    "form", ["nothing", "sliding layers marked causal", "the flag with layer types", "causal"]
)
def test_layers_see_what_config_json_says(form):
    changes, views = VIEWS[form]
    check_paint(make_drafter(DFlash.architecture_from_hf(make_config(**changes))), views)


@pytest.mark.parametrize("block_size", [2, 5])
def test_smaller_blocks_than_trained(block_size):
    drafter = make_drafter(make_shape(FULL, LayerView(3)), block_size=block_size)
    assert (drafter.block_size, drafter.num_draft_tokens) == (block_size, block_size - 1)
    check_paint(drafter, drafter.shape.views)


def test_a_causal_block_is_the_head_of_a_longer_one():
    """No row of a causal block can tell how long the block is; rows of a full one can."""
    features, position = draw_features(1, 7), [7]
    heads = []
    for view in (CAUSAL, FULL):
        runs = []
        for block_size in (3, BLOCK):
            drafter = make_drafter(make_shape(view, view), block_size=block_size)
            state = observe(drafter, new_state(drafter, 1), [0], features)
            runs.append(paint(drafter, state, [5], position)[0, :3])
        heads.append(np.allclose(*runs, atol=1e-5))
    assert heads == [True, False]


def test_larger_blocks_than_trained_are_refused():
    with pytest.raises(errors.ConfigError) as caught:
        make_drafter(make_shape(FULL, FULL), block_size=BLOCK + 1)
    assert str(caught.value) == (
        "drafter.block_size: 7 is larger than the block size 6 that the drafter was trained with"
    )


# --- state ----------------------------------------------------------------------------------------


def test_context_may_arrive_in_pieces_and_with_stale_rows():
    drafter = make_drafter(make_shape(FULL, LayerView(3)))
    features = draw_features(2, 11)
    at_once = observe(drafter, new_state(drafter, 2), [0, 0], features)
    # Pieces of four rows; of each only `counts` are committed, the others are overwritten later.
    in_pieces, position = new_state(drafter, 2), np.zeros(2, int)
    for counts in ([4, 1], [2, 4], [1, 2], [4, 4]):
        piece = np.full((2, 4, 64), 100.0, np.float32)
        for b, count in enumerate(counts):
            piece[b, :count] = features[b, position[b] : position[b] + count]
        in_pieces = observe(drafter, in_pieces, position, jnp.asarray(piece))
        position += counts
    assert position.tolist() == [11, 11]
    expected = paint(drafter, at_once, [5, 6], position)
    np.testing.assert_allclose(paint(drafter, in_pieces, [5, 6], position), expected, atol=1e-5)


def test_state_has_room_for_a_block_past_the_end():
    drafter = make_drafter(make_shape(FULL, FULL), block_size=4)
    abstract = drafter.init_state(3, 10)
    assert {leaf.shape for leaf in jax.tree.leaves(abstract)} == {(3, 2, 14, 16)}
    # Written from the last position on, a block does not shift back over what is committed.
    state = jax.tree.map(lambda leaf: leaf + 7, zeros(abstract))
    after = observe(drafter, state, [10] * 3, draw_features(3, 4))
    for leaf in jax.tree.leaves(after):
        np.testing.assert_array_equal(leaf[:, :, :10], 7)
        assert not np.any(leaf[:, :, 10:] == 7)


class Greedy:
    """A sampler that takes the largest logits and remembers for which positions."""

    def propose(self, logits, positions):
        self.positions = positions
        return jnp.argmax(logits, axis=-1), None


def test_draft_takes_a_token_of_every_slot_but_the_first():
    drafter, heads = make_drafter(make_shape(FULL, FULL)), make_target()
    state = observe(drafter, new_state(drafter, 2), [0, 0], draw_features(2, 7))
    anchor, position = jnp.array([5, 6]), jnp.array([7, 3])

    @jax.jit
    def draft(state, anchor, position):
        sampler = Greedy()
        proposal, after = drafter.draft(state, anchor, position, sampler, heads)
        assert (proposal.parents, proposal.probs) == (None, None)
        assert after is state  # drafts are not committed
        return proposal.tokens, sampler.positions

    tokens, positions = draft(state, anchor, position)
    logits = heads.unembed(paint(drafter, state, anchor, position))
    np.testing.assert_array_equal(tokens, jnp.argmax(logits[:, 1:], axis=-1))
    np.testing.assert_array_equal(positions, [[8, 9, 10, 11, 12], [4, 5, 6, 7, 8]])


def test_eight_devices_equal_one():
    shape = make_shape(FULL, LayerView(3, causal=True))
    drafter, position = make_drafter(shape), np.array([0, 9, 4, 7])
    sharding = make_sharding(data=2, fsdp=2, tensor=2)
    spread = move(drafter, DFlash(shape, dtype=jnp.float32, sharding=sharding))
    target = make_target()
    heads = move(target, type(target)(target.arch, dtype=jnp.float32, sharding=sharding))
    features, results = draw_features(4, 9), []
    for model, borrowed in ((drafter, target), (spread, heads)):
        state = observe(model, new_state(model, 4), [0] * 4, features)
        results.append(paint(model, state, [1, 2, 3, 4], position, borrowed))
    assert len(results[1].sharding.device_set) == 8
    np.testing.assert_allclose(*results, atol=1e-5)


# --- config.json ----------------------------------------------------------------------------------


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


def test_null_counts_as_absent():
    config = make_config()
    config["dflash_config"]["block_size"] = config["block_size"]
    config |= {"block_size": None, "rope_theta": None, "rope_parameters": {"rope_theta": 1e5}}
    shape = DFlash.architecture_from_hf(config)
    assert (shape.block_size, shape.decoder.rope_theta) == (BLOCK, 1e5)


def test_taps_are_spread_where_config_json_is_silent():
    config = make_config(num_layers=5, num_target_layers=36)
    del config["dflash_config"]["target_layer_ids"]
    assert DFlash.architecture_from_hf(config).target_layer_ids == (1, 9, 17, 25, 33)


WRONG = {
    "missing block_size, mask_token_id": {"block_size": None, "mask_token_id": None},
    "missing num_target_layers": {"num_target_layers": None},
    "layer_types names 1 layers, num_hidden_layers is 2": {"layer_types": [WHOLE]},
    "layer_types[1]: 'chunked_attention' is not known": {
        "layer_types": [WHOLE, "chunked_attention"]
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
    with pytest.raises(errors.CheckpointError) as caught:
        DFlash.architecture_from_hf(config)
    assert str(caught.value) == f"config.json: {message}"


@st.composite
def shapes(draw):
    """Shapes that a config.json can state."""
    window = draw(st.integers(1, 4096))
    causal, sliding_causal = draw(st.booleans()), draw(st.booleans())
    sliding = draw(st.lists(st.booleans(), min_size=1, max_size=5))
    views = [
        LayerView(window, causal or sliding_causal) if on else LayerView(None, causal)
        for on in sliding
    ]
    scaling = draw(st.none() | st.just(RopeScaling(8.0, 1.0, 4.0, 8192)))
    return make_shape(
        *views,
        decoder=make_architecture(num_hidden_layers=len(views), rope_scaling=scaling),
        block_size=draw(st.integers(2, 32)),
        mask_token_id=draw(st.integers(0, 47)),
        target_layer_ids=tuple(draw(st.lists(st.integers(0, 35), min_size=1, max_size=5))),
        num_target_layers=draw(st.integers(1, 36)),
    )


@settings(deadline=None, derandomize=True, database=None)
@given(shapes())
def test_config_round_trip(shape):
    assert DFlash.architecture_from_hf(DFlash.config_to_hf(shape)) == shape


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


def test_fresh_drafters_follow_their_target():
    options = DFlashArchitecture(num_hidden_layers=2, block_size=8, num_target_features=2)
    drafter = create(DFlashConfig(checkpoint="random", architecture=options), rope_theta=1e4)
    target = make_architecture(rope_theta=1e4)
    assert drafter.shape == DFlashShape(
        decoder=dataclasses.replace(target, num_hidden_layers=2),
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


OTHER_TARGETS = {
    "hidden size 32 (target: 64)": {"hidden_size": 64},
    "number of target layers 3 (target: 4), vocabulary 48 (target: 50)": {
        "num_hidden_layers": 4,
        "vocab_size": 50,
    },
}


@pytest.mark.parametrize("differences", OTHER_TARGETS)
def test_drafters_of_other_targets_are_refused(differences):
    with pytest.raises(errors.CheckpointError) as caught:
        create(hf=make_config(), **OTHER_TARGETS[differences])
    assert str(caught.value) == (f"drafter.checkpoint: trained for another target: {differences}")


@pytest.mark.parametrize(
    "own", [{"target_layer_ids": [0, 3]}, {"target_layer_ids": [-1]}, {"mask_token_id": 48}]
)
def test_taps_and_mask_must_exist_in_the_target(own):
    with pytest.raises(errors.CheckpointError, match="but the target has 3 layers and 48 tokens"):
        create(hf=make_config(dflash_config=own))


def test_checkpoint_names():
    drafter = make_drafter(make_shape(FULL))
    names = {drafter.checkpoint_name(path) for path, _ in parameters.named_parameters(drafter)}
    attention = [f"{kind}_{part}" for kind in "qk" for part in ("proj", "norm")]
    inner = [f"self_attn.{name}" for name in (*attention, "v_proj", "o_proj")]
    inner += [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
    inner += ["input_layernorm", "post_attention_layernorm"]
    stems = ["fc", "hidden_norm", "norm", *(f"layers.0.{name}" for name in inner)]
    assert names == {f"{stem}.weight" for stem in stems}
