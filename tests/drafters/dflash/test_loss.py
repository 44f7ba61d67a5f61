"""Tests of DFlash's training pass against plain loops, and against its pass when decoding."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
from hypothesis import given, settings
from hypothesis import strategies as st
from support.dflash_cases import CAUSAL, FULL, cut, make_shape
from support.models import make_target, random_module
from support.training import observed, random_batch, weights_of, with_weights

from dflash.config.train_schema import LossConfig
from dflash.drafters.dflash import DFlash
from dflash.drafters.dflash_config import LayerView
from dflash.drafters.parts.blocks import Anchors, sample_anchors

LENGTH, BLOCK = 18, 4
NEAR = LayerView(window=3)


make_batch = functools.partial(random_batch, length=LENGTH, share=0.7)


@functools.cache
def make_drafter(*views):
    """Returns a random drafter for `make_target`, which tests share, so never change it."""
    return random_module(DFlash, make_shape(*views, block_size=BLOCK), seed=1)


def make_anchors(batch, count, seed):
    """Returns random anchors, with the first and last position and some invalid ones."""
    rng = np.random.default_rng(seed)
    index = rng.integers(0, LENGTH, (batch.tokens.shape[0], count))
    index[0, :2] = 0, LENGTH - 1
    valid = rng.random(index.shape) < 0.8
    return Anchors(jnp.asarray(np.where(valid, index, 0), jnp.int32), jnp.asarray(valid))


ROWS = st.lists(
    st.lists(st.integers(1, 8), min_size=1, max_size=4).filter(lambda x: sum(x) <= LENGTH),
    min_size=2,
    max_size=2,
)


@settings(max_examples=40)
@given(rows=ROWS, seed=st.integers(0, 999))
def test_blocks_by_loops(rows, seed):
    batch = make_batch(rows, seed=seed)
    anchors = make_anchors(batch, 6, seed)
    blocks = cut(make_drafter(FULL, NEAR), batch, anchors)
    batch, anchors, blocks = jax.tree.map(np.asarray, (batch, anchors, blocks))
    for b in range(2):
        for j in range(6):
            a, valid = int(anchors.index[b, j]), bool(anchors.valid[b, j])
            assert blocks.tokens[b, j, 0] == (batch.tokens[b, a] if valid else 47)
            assert (blocks.tokens[b, j, 1:] == 47).all()
            for k in range(BLOCK):
                assert blocks.positions[b, j, k] == batch.positions[b, a] + k
            for k in range(1, BLOCK):
                inside = a + k < LENGTH and batch.segment_ids[b, a + k] == batch.segment_ids[b, a]
                supervised = inside and batch.segment_ids[b, a] and batch.loss_mask[b, a + k]
                assert blocks.counted[b, j, k - 1] == bool(valid and supervised)
                if inside:
                    assert blocks.labels[b, j, k - 1] == batch.tokens[b, a + k]


def eligible(batch):
    """Returns the positions whose next token is supervised, found by loops."""
    batch = jax.tree.map(np.asarray, batch)
    return {
        (b, t)
        for b in range(batch.tokens.shape[0])
        for t in range(LENGTH - 1)
        if batch.segment_ids[b, t]
        and batch.segment_ids[b, t] == batch.segment_ids[b, t + 1]
        and batch.loss_mask[b, t + 1]
    }


@settings(max_examples=25)
@given(rows=ROWS, count=st.sampled_from([1, 4, 40]), seed=st.integers(0, 999))
def test_anchors_are_drawn_among_supervised_positions(rows, count, seed):
    batch = make_batch(rows, seed=seed)
    anchors = jax.jit(sample_anchors, static_argnums=1)(batch, count, jax.random.key(seed))
    anchors = jax.tree.map(np.asarray, anchors)
    assert anchors.index.shape == anchors.valid.shape == (2, min(count, LENGTH - 1))
    places = eligible(batch)
    for b in range(2):
        drawn = anchors.index[b][anchors.valid[b]].tolist()
        own = [t for row, t in places if row == b]
        assert len(drawn) == min(count, len(own))
        assert drawn == sorted(set(drawn))
        assert set(drawn) <= set(own)
        assert not anchors.index[b][~anchors.valid[b]].any()


@pytest.mark.parametrize("views", [(FULL, FULL), (NEAR, CAUSAL)])
def test_blocks_are_run_as_the_decode_loop_does(views):
    """Each anchored block equals a draft from a state that observed the document before it."""
    drafter, target = make_drafter(*views), make_target()
    batch = make_batch([[LENGTH], [6, 10]])
    index = [[0, 1, 9, LENGTH - 1], [0, 5, 6, 15]]
    anchors = Anchors(jnp.asarray(index, jnp.int32), jnp.ones((2, 4), bool))
    blocks = cut(drafter, batch, anchors)
    hidden = jax.jit(lambda: drafter.run_blocks(batch, blocks, target))()

    @jax.jit
    def draft(features, token, start, anchor):
        position = (anchor - start)[None]
        rows = jnp.roll(features, -start, axis=0)[None]
        state = observed(drafter, rows, target, count=position, capacity=2 * LENGTH)
        return drafter.run_block(state, token[None], position, target)[0][0]

    for b in range(2):
        for j, anchor in enumerate(index[b]):
            start = anchor - int(batch.positions[b, anchor])
            expected = draft(batch.features[b], batch.tokens[b, anchor], start, anchor)
            np.testing.assert_allclose(hidden[b, j], expected, rtol=1e-4, atol=1e-5)


def log_softmax(hidden, target, temperature):
    logits = np.asarray(target.unembed(hidden), np.float64) / temperature
    return scipy.special.log_softmax(logits, axis=-1)


def loss_by_loops(drafter, target, batch, anchors, options):
    """Loss and metrics, position by position, from the hidden states of the blocks."""
    blocks = cut(drafter, batch, anchors)
    log_probs = log_softmax(hidden_of(drafter)(batch, blocks), target, options.temperature)
    of_target = log_softmax(batch.hidden, target, options.temperature)
    batch, anchors, blocks = jax.tree.map(np.asarray, (batch, anchors, blocks))
    gamma = BLOCK / 2 if options.gamma is None else options.gamma  # a block of 4 is half of 8
    total = weight_sum = correct_sum = counted_sum = 0.0
    for b, j in np.ndindex(*anchors.index.shape):
        a = int(anchors.index[b, j])
        counted = [k for k in range(1, BLOCK) if blocks.counted[b, j, k - 1]]
        nll, cost, correct = {}, {}, {}
        for k in counted:
            label = int(batch.tokens[b, a + k])
            nll[k] = -log_probs[b, j, k, label]
            p, q = of_target[b, a + k - 1], log_probs[b, j, k]
            kl = np.sum(np.exp(p) * (p - q))
            mix = options.kl_weight if options.name == "kl" else 0.0
            cost[k] = (1 - mix) * nll[k] + mix * kl
            correct[k] = log_probs[b, j, k].argmax() == label
        for k in counted:
            weight = np.exp(-(k - 1) / gamma) if gamma else 1.0
            if options.name == "dpace":
                survival = {
                    i: (1 - options.alpha) * np.exp(-nll[i]) + options.alpha for i in counted
                }
                weight = sum(
                    np.prod([survival[i] for i in counted if i <= m]) for m in counted if m >= k
                )
            total, weight_sum = total + weight * cost[k], weight_sum + weight
        correct_sum += sum(correct.values())
        counted_sum += len(counted)
    divisor = batch.tokens.shape[0] if options.name == "dpace" else weight_sum or 1.0
    return {
        "loss": total / divisor,
        "weight": divisor,
        "token_accuracy": correct_sum / (counted_sum or 1),
        "blocks": np.sum(anchors.valid),
    }


@functools.cache
def hidden_of(drafter):
    target = make_target()
    return jax.jit(lambda batch, blocks: drafter.run_blocks(batch, blocks, target))


@functools.cache
def loss_of(drafter, options):
    target = make_target()

    @functools.partial(jax.value_and_grad, has_aux=True)
    def call(weights, batch, anchors):
        copy = with_weights(drafter, weights)
        return copy.loss(batch, target, None, options, anchors=anchors)

    return jax.jit(call)


OPTIONS = [
    LossConfig(),
    LossConfig(gamma=0.0),
    LossConfig(name="dpace", alpha=0.3),
    LossConfig(name="kl", kl_weight=0.6, temperature=1.5),
]


@pytest.mark.parametrize("options", OPTIONS, ids=["decay", "plain", "dpace", "kl"])
@settings(max_examples=4)
@given(rows=ROWS, share=st.sampled_from([0.0, 0.7, 1.0]), seed=st.integers(0, 999))
def test_loss_by_loops(options, rows, share, seed):
    drafter = make_drafter(FULL, NEAR)
    batch = make_batch(rows, seed=seed, share=share)
    anchors = make_anchors(batch, 5, seed)
    # Labels that the drafter would get right, here and there: runs are then longer than none.
    greedy = hidden_of(drafter)(batch, cut(drafter, batch, anchors))
    guesses = np.asarray(make_target().unembed(greedy)).argmax(-1)
    tokens = np.array(batch.tokens)
    for b, j in np.ndindex(*anchors.index.shape):
        first = int(anchors.index[b, j]) + 1
        if seed % 2 and first + 1 < LENGTH:
            tokens[b, first : first + 2] = guesses[b, j, 1:3]
    batch = dataclasses.replace(batch, tokens=jnp.asarray(tokens))
    (loss, metrics), grads = loss_of(drafter, options)(weights_of(drafter), batch, anchors)
    for name, value in loss_by_loops(drafter, make_target(), batch, anchors, options).items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-4, atol=1e-6, err_msg=name)
    np.testing.assert_allclose(loss, metrics["loss"])
    assert all(np.isfinite(grad).all() for grad in grads.values())


def test_a_divergence_needs_the_targets_hidden_states():
    drafter, batch = make_drafter(FULL, NEAR), make_batch([[LENGTH]])
    batch, target = dataclasses.replace(batch, hidden=None), make_target()
    with pytest.raises(ValueError, match="hidden states"):
        jax.eval_shape(
            lambda key: drafter.loss(batch, target, key, LossConfig(name="kl")), jax.random.key(0)
        )
