"""Tests of the gated delta rule and its convolution, against the recurrence in float64."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.token_trees import random_ancestry

from dflash.kernels import gated_delta

BATCH, KEY_HEADS, VALUE_HEADS, KEY_WIDTH, VALUE_WIDTH = 2, 2, 4, 5, 3
ROWS = 9
solve_block = jax.jit(gated_delta.solve_block)
advance = jax.jit(gated_delta.advance)
scan_blocks = jax.jit(gated_delta.scan_blocks, static_argnums=6)
causal_conv = jax.jit(gated_delta.causal_conv)
last_rows = jax.jit(gated_delta.last_rows)


def make_rows(rows, seed=0):
    """Returns the arguments of `solve_block`, with decays from none to almost everything."""
    rng = np.random.default_rng(seed)

    def unit(heads):
        drawn = rng.normal(size=(BATCH, rows, heads, KEY_WIDTH))
        return drawn / np.linalg.norm(drawn, axis=-1, keepdims=True)

    shape = (BATCH, rows, VALUE_HEADS)
    arrays = (
        unit(KEY_HEADS), unit(KEY_HEADS), rng.normal(size=(*shape, VALUE_WIDTH)),
        -np.exp(rng.uniform(-9, 7, shape)), rng.uniform(0, 1, shape),
        rng.normal(size=(BATCH, VALUE_HEADS, KEY_WIDTH, VALUE_WIDTH)),
    )  # fmt: skip
    return tuple(np.float32(array) for array in arrays)


def recurrence(arrays, path, sequence):
    """Runs rows `path` of one sequence one by one; returns the last output and the state."""
    queries, keys, values, log_decay, beta, state = (np.float64(x[sequence]) for x in arrays)
    group = VALUE_HEADS // KEY_HEADS
    queries, keys = (np.repeat(x, group, axis=1) for x in (queries, keys))
    output = None
    for row in path:
        state = state * np.exp(log_decay[row])[:, None, None]
        held = np.einsum("hke,hk->he", state, keys[row])
        update = beta[row][:, None] * (values[row] - held)
        state = state + np.einsum("hk,he->hke", keys[row], update)
        output = np.einsum("hke,hk->he", state, queries[row])
    return output, state


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**20), is_tree=st.booleans(), accepted=st.integers(0, ROWS))
def test_outputs_and_states_of_every_path_are_those_of_the_recurrence(seed, is_tree, accepted):
    arrays = make_rows(ROWS, seed)
    ancestry = np.tril(np.ones((BATCH, ROWS, ROWS), bool))
    if is_tree:
        ancestry = random_ancestry(np.random.default_rng(seed), BATCH, ROWS)
    outputs, block = solve_block(*arrays, ancestry if is_tree else None)
    outputs = np.asarray(outputs)
    paths = [[np.flatnonzero(ancestry[b, row]) for row in range(ROWS)] for b in range(BATCH)]
    for b in range(BATCH):
        for row in range(ROWS):
            wanted, _ = recurrence(arrays, paths[b][row], b)
            np.testing.assert_allclose(outputs[b, row], wanted, rtol=1e-4, atol=1e-5)
    # The second sequence accepts a path of its own, of another length.
    chosen = [paths[0][max(accepted - 1, 0)][:accepted], paths[1][-1]]
    count = np.array([len(path) for path in chosen], np.int32)
    path = np.stack([np.pad(path, (0, ROWS - len(path))) for path in chosen]).astype(np.int32)
    states = advance(arrays[-1], block, count, path if is_tree else None)
    for b in range(BATCH):
        _, wanted = recurrence(arrays, chosen[b], b)
        np.testing.assert_allclose(states[b], wanted, rtol=1e-5, atol=1e-5)
    if not accepted:
        np.testing.assert_array_equal(states[0], arrays[-1][0])


@pytest.mark.parametrize("rows", [1, 8, 21])
def test_a_long_chain_is_computed_block_by_block(rows):
    arrays = make_rows(rows)
    outputs, states = scan_blocks(*arrays, 8)
    for b in range(BATCH):
        last, state = recurrence(arrays, range(rows), b)
        np.testing.assert_allclose(outputs[b, -1], last, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(states[b], state, rtol=1e-5, atol=1e-5)


def test_padding_and_forgetting():
    arrays = make_rows(12)
    *_, log_decay, beta, state = arrays
    log_decay[:, 8:], beta[:, 8:] = 0, 0
    _, states = scan_blocks(*arrays, 5)
    cut = [x[:, :8] for x in arrays[:-1]]
    _, wanted = scan_blocks(*cut, state, 5)
    np.testing.assert_allclose(states, wanted, rtol=1e-5, atol=1e-6)
    # A row that forgets begins a sequence of its own.
    log_decay[:, 3] = gated_delta.FORGET
    outputs, _ = scan_blocks(*arrays, 5)
    fresh = [x[:, 3:] for x in arrays[:-1]]
    wanted, _ = scan_blocks(*fresh, np.zeros_like(state), 5)
    np.testing.assert_allclose(np.asarray(outputs)[:, 3:], wanted, rtol=1e-5, atol=1e-6)


def test_heads_that_do_not_divide_are_an_error():
    queries, keys, *others = make_rows(2)
    three = [np.concatenate([x, x[:, :, :1]], axis=2) for x in (queries, keys)]
    with pytest.raises(ValueError, match="4 value heads for 3 key heads"):
        gated_delta.solve_block(*three, *others)


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**20), is_tree=st.booleans())
def test_convolutions_follow_the_path_to_each_row(seed, is_tree):
    rng = np.random.default_rng(seed)
    width, channels = 4, 3
    before = np.float32(rng.normal(size=(BATCH, width - 1, channels)))
    rows = np.float32(rng.normal(size=(BATCH, ROWS, channels)))
    weights = np.float32(rng.normal(size=(channels, width)))
    ancestry = np.tril(np.ones((BATCH, ROWS, ROWS), bool))
    if is_tree:
        ancestry = random_ancestry(rng, BATCH, ROWS)
    given_mask = ancestry if is_tree else None
    result = np.asarray(causal_conv(rows, before, weights, ancestry=given_mask))
    for b in range(BATCH):
        for row in range(ROWS):
            path = np.concatenate([before[b], rows[b, ancestry[b, row]]])
            np.testing.assert_allclose(
                result[b, row], (path[-width:] * weights.T).sum(axis=0), rtol=1e-5, atol=1e-6
            )
    paths = [np.flatnonzero(ancestry[0, -1]), np.flatnonzero(ancestry[1, 1])]
    path = np.stack([np.pad(each, (0, ROWS - len(each))) for each in paths])
    count = np.array([len(paths[0]), 0])
    kept = np.asarray(last_rows(before, rows, count, path if is_tree else None))
    wanted = np.concatenate([before[0], rows[0, paths[0]]])[1 - width :]
    np.testing.assert_array_equal(kept[0], wanted)
    np.testing.assert_array_equal(kept[1], before[1])


def test_convolutions_do_not_cross_documents():
    rng = np.random.default_rng(0)
    rows, weights = rng.normal(size=(1, 7, 2)), rng.normal(size=(2, 4))
    before = np.zeros((1, 3, 2))
    segments = np.array([[1, 1, 1, 2, 2, 2, 2]])
    result = np.asarray(causal_conv(rows, before, weights, segment_ids=segments))
    alone = causal_conv(rows[:, 3:], before, weights)
    np.testing.assert_allclose(result[:, 3:], alone, rtol=1e-5, atol=1e-6)
