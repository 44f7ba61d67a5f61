"""Tests of the cache-free pass and of the target's own loss."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
from hypothesis import given, settings
from hypothesis import strategies as st
from support import models
from support.models import make_cache, make_sharding, move
from support.parity import step
from support.training import random_batch, weights_of, with_weights

from dflash.models.dense import Llama3, Qwen3

LENGTH = 24
TAPS = (1, 0)
make_target = functools.partial(models.make_target, num_hidden_layers=2)


def make_batch(rows, *, seed=0, mask=None):
    """Returns packed rows, each given as a list of document lengths and padded."""
    batch = dataclasses.replace(random_batch(rows, LENGTH, seed=seed), features=None, hidden=None)
    mask = batch.loss_mask if mask is None else jnp.asarray(mask, jnp.float32)
    return dataclasses.replace(batch, loss_mask=mask)


@functools.cache
def forward(target, remat=False):
    @jax.jit
    def call(batch):
        return target.forward(
            batch.tokens, batch.positions, batch.segment_ids, feature_layers=TAPS, remat=remat
        )

    return call


@pytest.mark.parametrize(
    ("family", "changes"),
    [(Qwen3, {}), (Qwen3, {"tie_word_embeddings": True}), (Llama3, {"num_key_value_heads": 4})],
)
def test_equals_the_pass_with_a_cache(family, changes):
    target = make_target(family, **changes)
    batch = make_batch([[LENGTH], [LENGTH]])
    hidden, features = forward(target)(batch)
    cache = make_cache(target, 2, LENGTH)
    *expected, _, _ = step(target, batch.tokens, [0, 0], cache, feature_layers=TAPS)
    np.testing.assert_allclose(hidden, expected[0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(features, expected[1], rtol=1e-4, atol=1e-5)
    assert features.shape == (2, LENGTH, 2 * 32)


def test_packed_documents_do_not_see_each_other():
    target, lengths = make_target(), [5, 1, 11]
    batch = make_batch([lengths])
    hidden, features = map(np.asarray, forward(target)(batch))
    assert np.isfinite(hidden).all()
    begin = 0
    for length in lengths:
        alone = make_batch([[length]])
        tokens = np.roll(batch.tokens, -begin, axis=1)
        alone = dataclasses.replace(alone, tokens=tokens)
        alone_hidden, alone_features = map(np.asarray, forward(target)(alone))
        rows = slice(begin, begin + length)
        np.testing.assert_allclose(hidden[:, rows], alone_hidden[:, :length], atol=1e-5)
        np.testing.assert_allclose(features[:, rows], alone_features[:, :length], atol=1e-5)
        begin += length


@functools.cache
def value_and_grad(target, remat=False):
    """Returns a function (weights by path, batch) -> loss, metrics and gradients."""

    @functools.partial(jax.value_and_grad, has_aux=True)
    def call(weights, batch):
        return with_weights(target, weights).loss(batch, remat=remat)

    return jax.jit(call)


def loss_by_loops(target, batch):
    """Returns the mean negative log-likelihood and accuracy of supervised tokens, by a loop."""
    hidden, _ = forward(target)(batch)
    logits = np.asarray(target.unembed(hidden), np.float64)
    log_probs, batch = scipy.special.log_softmax(logits, axis=-1), jax.tree.map(np.asarray, batch)
    nll, correct = [], []
    for b, row in enumerate(batch.segment_ids):
        for t in range(1, LENGTH):
            if row[t] and row[t] == row[t - 1] and batch.loss_mask[b, t]:
                token = int(batch.tokens[b, t])
                nll.append(-log_probs[b, t - 1, token])
                correct.append(log_probs[b, t - 1].argmax() == token)
    return (np.mean(nll), np.mean(correct), len(nll)) if nll else (0.0, 0.0, 0)


@settings(max_examples=12)
@given(
    lengths=st.lists(st.integers(1, 8), min_size=1, max_size=3),
    share=st.sampled_from([0.0, 0.5, 1.0]),
    seed=st.integers(0, 999),
)
def test_loss_by_loops(lengths, share, seed):
    target = make_target()
    mask = np.random.default_rng(seed).random((2, LENGTH)) < share
    batch = make_batch([lengths, [LENGTH]], seed=seed, mask=mask)
    (loss, metrics), grads = value_and_grad(target)(weights_of(target), batch)
    expected, accuracy, count = loss_by_loops(target, batch)
    np.testing.assert_allclose(loss, expected, rtol=1e-4)
    np.testing.assert_allclose(metrics["token_accuracy"], accuracy, rtol=1e-6)
    assert float(metrics["weight"]) == count
    assert float(metrics["loss"]) == float(loss)
    assert all(np.isfinite(grad).all() for grad in grads.values())
    assert any(np.any(grad) for grad in grads.values()) == (count > 0)


def test_gradients_equal_those_of_the_plain_loss():
    target = make_target(tie_word_embeddings=True)
    batch = make_batch([[7, 12], [LENGTH]])
    _, grads = value_and_grad(target)(weights_of(target), batch)

    def plain(weights):
        copy = with_weights(target, weights)
        hidden, _ = copy.forward(batch.tokens, batch.positions, batch.segment_ids)
        log_probs = jax.nn.log_softmax(hidden[:, :-1] @ copy.embed_tokens.embedding[...].T)
        nll = -jnp.take_along_axis(log_probs, batch.tokens[:, 1:, None], axis=-1)[..., 0]
        same = batch.segment_ids[:, 1:] == batch.segment_ids[:, :-1]
        counted = same & (batch.segment_ids[:, 1:] != 0)
        return jnp.sum(nll * counted) / counted.sum()

    for path, expected in jax.jit(jax.grad(plain))(weights_of(target)).items():
        scale = np.abs(expected).max()
        np.testing.assert_allclose(grads[path], expected, rtol=0, atol=1e-4 * scale, err_msg=path)


def test_remat_changes_nothing():
    target, batch = make_target(), make_batch([[7, 12], [LENGTH]])
    (loss, _), grads = value_and_grad(target)(weights_of(target), batch)
    (again, _), grads_again = value_and_grad(target, remat=True)(weights_of(target), batch)
    np.testing.assert_allclose(loss, again, rtol=1e-6)
    for path, grad in grads.items():
        np.testing.assert_allclose(grad, grads_again[path], rtol=1e-4, atol=1e-6, err_msg=path)


@pytest.mark.parametrize("axes", [{"data": 2, "fsdp": 2, "tensor": 2}, {"fsdp": 8}])
def test_many_devices_equal_one(axes):
    one = make_target()
    rows = [[7, 12], [LENGTH], [3], [24]] * 2
    batch = make_batch(rows, mask=np.random.default_rng(0).random((8, LENGTH)) < 0.7)
    many = move(one, Qwen3(one.arch, dtype=one.dtype, sharding=make_sharding(**axes)))
    (expected, _), expected_grads = value_and_grad(one)(weights_of(one), batch)
    (loss, _), grads = value_and_grad(many)(weights_of(many), batch)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    for path, grad in grads.items():
        scale = np.abs(expected_grads[path]).max()
        np.testing.assert_allclose(
            np.asarray(grad), expected_grads[path], rtol=0, atol=1e-4 * scale, err_msg=path
        )
