"""Tests of the DFlash drafter: its pass against plain loops, and its state."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import failure
from support.dense import dense_attention
from support.dflash_cases import BLOCK, FULL, VIEWS, make_config, make_shape
from support.models import make_sharding, make_target, move, zeros
from support.training import random_weights

from dflash import errors
from dflash.drafters.base import Proposal
from dflash.drafters.dflash import DFlash
from dflash.drafters.dflash_config import LayerView
from dflash.drafters.parts.sampler import Candidates
from dflash.layers import cache as kv
from dflash.parallel import parameters

CAPACITY = 24


@functools.cache
def weights(num_layers, sinks, biases):
    """Returns weights for drafters of any views, with norm scales that differ from 1."""
    shape = make_shape(*[FULL] * num_layers, attention_sink_bias=sinks, attention_bias=biases)
    return random_weights(DFlash(shape, dtype=jnp.float32, sharding=make_sharding()), 0.2)


def weights_for(shape):
    return weights(len(shape.views), shape.attention_sink_bias, shape.attention_bias)


def make_drafter(shape, **options):
    drafter = DFlash(shape, **({"dtype": jnp.float32, "sharding": make_sharding()} | options))
    parameters.assign(drafter, weights_for(shape))
    return drafter


def draw_features(batch, rows):
    return jnp.asarray(np.random.default_rng(0).normal(size=(batch, rows, 64)), jnp.float32)


def observe(drafter, state, position, features):
    position = jnp.asarray(position, jnp.int32)
    tokens = jnp.zeros((features.shape[0], features.shape[1] + 1), jnp.int32)
    count = jnp.full_like(position, features.shape[1])
    return jax.jit(drafter.observe)(state, position, tokens, count, features, None)


def new_state(drafter, batch):
    return zeros(drafter.init_state(batch, CAPACITY - drafter.block_size))


def run_block(drafter, state, anchor, position, heads=None):
    heads = heads or make_target()
    call = jax.jit(lambda *args: drafter.run_block(*args, heads)[0])
    return call(state, jnp.asarray(anchor), jnp.asarray(position))


# --- the pass, in plain loops ---------------------------------------------------------------------


def rms_norm(x, scale):
    return scale * x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + 1e-6)


def rotate(x, positions, theta, share):
    half = int(share * x.shape[-1]) // 2
    turns = np.exp(1j * np.asarray(positions)[:, None, None] * theta ** (-np.arange(half) / half))
    turned = (x[..., :half] + 1j * x[..., half : 2 * half]) * turns
    return np.concatenate([turned.real, turned.imag, x[..., 2 * half :]], axis=-1)


def visible(view, anchor, block):
    """Returns the mask of context positions and block rows that each row attends to."""
    mask = np.zeros((block, anchor + block), bool)
    for row in range(block):
        for position in range(anchor):
            mask[row, position] = position > anchor + row - (view.window or np.inf)
        for other in range(block):
            near = abs(other - row) < (view.window or np.inf)
            mask[row, anchor + other] = near and (other <= row or not view.causal)
    return mask


def plain_block(values, views, features, embedded, shape):
    """Computes the block pass of one sequence in float64, from features [L, C·D] before it."""
    arch, share = shape.decoder, shape.partial_rotary_factor
    w = {path: np.asarray(value, np.float64) for path, value in values.items()}
    anchor, block = len(features), len(embedded)
    context = rms_norm(features @ w["fc.kernel"], w["hidden_norm.scale"])
    x = embedded
    for i, view in enumerate(views):
        layer = {path.split(".", 2)[2]: w[path] for path in w if path.startswith(f"layers.{i}.")}
        normed = rms_norm(x, layer["input_layernorm.scale"])

        def project(rows, name, layer=layer):
            projected = rows @ layer[f"self_attn.{name}_proj.kernel"]
            projected += layer.get(f"self_attn.{name}_proj.bias", 0)
            return projected.reshape(len(rows), -1, arch.head_dim)

        rows = np.concatenate([context, normed])
        queries = rms_norm(project(normed, "q"), layer["self_attn.q_norm.scale"])
        keys = rms_norm(project(rows, "k"), layer["self_attn.k_norm.scale"])
        attended = dense_attention(
            rotate(queries, range(anchor, anchor + block), arch.rope_theta, share),
            rotate(keys, range(anchor + block), arch.rope_theta, share),
            shape.attention_value_scale * project(rows, "v"),
            visible(view, anchor, block),
            arch.head_dim**-0.5,
            layer.get("self_attn.attention_sink_bias"),
        )
        x = x + attended.reshape(block, -1) @ layer["self_attn.o_proj.kernel"]
        x = x + layer.get("self_attn.o_proj.bias", 0)
        normed = rms_norm(x, layer["post_attention_layernorm.scale"])
        gate = normed @ layer["mlp.gate_proj.kernel"]
        up = normed @ layer["mlp.up_proj.kernel"]
        x = x + (gate / (1 + np.exp(-gate)) * up) @ layer["mlp.down_proj.kernel"]
    return rms_norm(x, w["norm.scale"])


def check_block(drafter, views):
    """Runs blocks of ragged sequences and compares each with `views` in plain loops."""
    anchors, positions = (13, 11, 17), (0, 4, 15)
    batch, block = len(positions), drafter.block_size
    features = draw_features(batch, max(positions))
    state = observe(drafter, new_state(drafter, batch), [0] * batch, features)
    hidden = run_block(drafter, state, anchors, positions)
    table = np.asarray(make_target().embed_tokens.embedding[...], np.float64)
    for b, position in enumerate(positions):
        tokens = [anchors[b]] + [drafter.shape.mask_token_id] * (block - 1)
        expected = plain_block(
            weights_for(drafter.shape),
            views,
            np.asarray(features[b, :position], np.float64),
            table[tokens],
            drafter.shape,
        )
        np.testing.assert_allclose(hidden[b], expected, atol=1e-4)


@pytest.mark.parametrize(
    "form", ["nothing", "sliding layers marked causal", "the flag with layer types", "causal"]
)
def test_layers_see_what_config_json_says(form):
    changes, views = VIEWS[form]
    check_block(make_drafter(DFlash.architecture_from_hf(make_config(**changes))), views)


@pytest.mark.parametrize("sinks", [False, True])
def test_chosen_windows_are_those_of_the_shape(sinks):
    """Each sequence sees what a drafter with its window sees; narrower views stay."""
    shape = make_shape(FULL, LayerView(8), attention_sink_bias=sinks)
    drafter, position, windows = make_drafter(shape), [17, 17, 5], (7, 12, 2**30)
    features = draw_features(3, 17)
    state = observe(drafter, new_state(drafter, 3), [0] * 3, features)
    found = run_block(drafter.within(jnp.array(windows)), state, [5, 6, 7], position)
    for b, window in enumerate(windows):
        narrowed = make_drafter(shape.seen_through(window))
        wanted = run_block(narrowed, state, [5, 6, 7], position)
        np.testing.assert_allclose(found[b], wanted[b], atol=1e-5)
    assert not np.allclose(found[0], run_block(drafter, state, [5, 6, 7], position)[0], atol=1e-3)


def test_heads_do_what_config_json_says():
    stated = {"partial_rotary_factor": 0.5, "attention_sink_bias": True, "attention_bias": True}
    config = make_config(**stated, dflash_config={"attention_value_scale": 0.612})
    drafter = make_drafter(DFlash.architecture_from_hf(config))
    check_block(drafter, (FULL, FULL))


@pytest.mark.parametrize("block_size", [2, 5])
def test_smaller_blocks_than_trained(block_size):
    drafter = make_drafter(make_shape(FULL, LayerView(3)), block_size=block_size, short_pass=True)
    assert (drafter.block_size, drafter.num_draft_tokens) == (block_size, block_size - 1)
    check_block(drafter, drafter.shape.views)


def test_a_smaller_block_drafts_the_first_tokens_of_the_whole_one():
    """Unless a short pass is asked for: then its rows see fewer others."""
    features, position, anchor = draw_features(1, 7), np.array([7]), np.array([5])
    heads, drafts, passes = make_target(), [], []
    for options in ({}, {"block_size": 4}, {"block_size": 4, "short_pass": True}):
        drafter = make_drafter(make_shape(FULL, FULL), **options)
        state = observe(drafter, new_state(drafter, 1), [0], features)
        proposal, _ = draft(drafter, state, anchor, position, heads)
        drafts.append(proposal.tokens[0].tolist())
        passes.append(np.asarray(run_block(drafter, state, anchor, position)[0]))
    assert drafts[1] == drafts[0][:3]
    assert len(drafts[2]) == 3
    assert [len(rows) for rows in passes] == [BLOCK, BLOCK, 4]
    np.testing.assert_array_equal(passes[1], passes[0])
    assert not np.allclose(passes[2], passes[0][:4], atol=1e-3)


def test_larger_blocks_than_trained_are_refused():
    larger = functools.partial(make_drafter, block_size=BLOCK + 1)
    assert failure(larger, make_shape(FULL, FULL), kind=errors.ConfigError) == (
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
    expected = run_block(drafter, at_once, [5, 6], position)
    np.testing.assert_allclose(run_block(drafter, in_pieces, [5, 6], position), expected, atol=1e-5)


def test_state_has_room_for_a_block_past_the_end():
    drafter = make_drafter(make_shape(FULL, FULL), block_size=4)
    length = kv.SLOT_TILE  # no slot is left over by rounding up
    abstract = drafter.init_state(3, length)
    assert {leaf.shape for leaf in jax.tree.leaves(abstract)} == {(3, 2, 2 * length, 16)}
    # Written from the last position on, a block does not shift back over what is committed.
    state = jax.tree.map(lambda leaf: leaf + 7, zeros(abstract))
    after = observe(drafter, state, [length] * 3, draw_features(3, 4))
    for leaf in jax.tree.leaves(after):
        np.testing.assert_array_equal(leaf[:, :, :length], 7)
        assert not np.any(leaf[:, :, length : length + 4] == 7)


def test_a_tree_is_no_deeper_than_the_block():
    tree = make_drafter(make_shape(FULL, FULL), tree_budget=9)
    assert (tree.num_draft_tokens, tree.block_size, tree.longest_path) == (9, 10, BLOCK)
    thin = make_drafter(make_shape(FULL, FULL), tree_budget=2)
    assert (thin.block_size, thin.longest_path) == (3, 3)
    # Only a path is ever observed, so that is what the state has room for.
    wide, length = make_drafter(make_shape(FULL, FULL), tree_budget=2 * kv.SLOT_TILE), kv.SLOT_TILE
    shapes = {leaf.shape for leaf in jax.tree.leaves(wide.init_state(3, length))}
    assert shapes == {(3, 2, 2 * length, 16)}


class Greedy:
    """A sampler that takes the largest logits and remembers for which positions."""

    def propose(self, logits, positions):
        self.positions = positions
        return jnp.argmax(logits, axis=-1), None

    def draw(self, hidden, positions, unembed):
        return self.propose(unembed(hidden), positions)

    def candidates(self, logits, positions, count):
        self.positions = positions
        scores, tokens = jax.lax.top_k(jax.nn.log_softmax(logits), count)
        return Candidates(tokens, scores, None)


def draft(drafter, state, anchor, position, heads) -> tuple[Proposal, jax.Array]:
    """Drafts with the largest logits, and checks that drafts are not committed.

    Also returns the positions of the drafts.
    """

    @jax.jit
    def run(state, anchor, position):
        sampler = Greedy()
        proposal, after = drafter.draft(state, anchor, position, sampler, heads)
        assert after is state
        return proposal, sampler.positions

    return run(state, anchor, position)


def test_a_tree_comes_from_the_pass_that_a_chain_comes_from():
    """The most likely path of depth d holds the chain's first d tokens."""
    heads, shape = make_target(), make_shape(FULL, FULL)
    chain, tree = make_drafter(shape), make_drafter(shape, tree_budget=12)
    state = observe(chain, new_state(chain, 2), [0, 0], draw_features(2, 7))
    anchor, position = np.array([5, 6]), np.array([7, 3])
    of_chain, of_tree = (draft(model, state, anchor, position, heads)[0] for model in (chain, tree))
    parents, tokens = np.asarray(of_tree.parents), np.asarray(of_tree.tokens)
    assert tokens.shape == (2, 12)
    for b in range(2):
        row, spine = 0, []
        while row in parents[b]:
            child = int(np.argmax(parents[b] == row))  # the eldest
            spine.append(int(tokens[b, child]))
            row = child + 1
        assert spine
        assert spine == np.asarray(of_chain.tokens)[b, : len(spine)].tolist()


def test_draft_takes_a_token_of_every_row_but_the_first():
    drafter, heads = make_drafter(make_shape(FULL, FULL)), make_target()
    state = observe(drafter, new_state(drafter, 2), [0, 0], draw_features(2, 7))
    anchor, position = jnp.array([5, 6]), jnp.array([7, 3])
    proposal, positions = draft(drafter, state, anchor, position, heads)
    assert (proposal.parents, proposal.probs) == (None, None)
    tokens = proposal.tokens
    logits = heads.unembed(run_block(drafter, state, anchor, position))
    np.testing.assert_array_equal(tokens, jnp.argmax(logits[:, 1:], axis=-1))
    np.testing.assert_array_equal(positions, [[8, 9, 10, 11, 12], [4, 5, 6, 7, 8]])
    # Fewer drafts are the first of these: the whole block is run, as in training.
    sampler = Greedy()
    fewer, _ = drafter.draft_fewer(2, state, anchor, position, sampler, heads)
    np.testing.assert_array_equal(fewer.tokens, tokens[:, :2])
    np.testing.assert_array_equal(sampler.positions, positions[:, :2])


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
        results.append(run_block(model, state, [1, 2, 3, 4], position, borrowed))
    assert len(results[1].sharding.device_set) == 8
    np.testing.assert_allclose(*results, atol=1e-5)
