"""Tests of the chunked losses against full logits, and of the weights against loops."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.jaxprs import largest_array
from support.models import make_architecture, make_sharding, make_target, move

from dflash.config.train_schema import LossConfig
from dflash.layers import losses
from dflash.models.dense import Qwen3

BATCH, ROWS, WIDTH, VOCAB = 2, 11, 6, 13


def make_rows(dtype=jnp.float32):
    """Returns hidden states, labels, the target's hidden states, and an output head."""
    rng = np.random.default_rng(0)
    hidden, target = (
        jnp.asarray(rng.normal(size=(BATCH, ROWS, WIDTH)).astype(dtype)) for _ in range(2)
    )
    labels = jnp.asarray(rng.integers(0, VOCAB, (BATCH, ROWS)).astype(jnp.int32))
    return hidden, labels, target, jnp.asarray(rng.normal(size=(WIDTH, VOCAB)).astype(dtype))


def dense(hidden, labels, target, head, kl_weight):
    """Returns objective, nll and correct, computed from full float32 logits."""
    log_probs = jax.nn.log_softmax((hidden @ head).astype(jnp.float32))
    of_target = jax.nn.log_softmax((target @ jax.lax.stop_gradient(head)).astype(jnp.float32))
    of_target = jax.lax.stop_gradient(of_target)
    nll = -jnp.take_along_axis(log_probs, labels[..., None], axis=-1)[..., 0]
    divergence = jnp.sum(jnp.exp(of_target) * (of_target - log_probs), axis=-1)
    objective = (1 - kl_weight) * nll + kl_weight * divergence
    return losses.TokenScores(objective, nll, log_probs.argmax(-1) == labels)


def chunked(hidden, labels, target, head, kl_weight, **options):
    return losses.score_tokens(
        hidden, labels, lambda rows: (rows @ head).astype(jnp.float32), target_hidden=target,
        kl_weight=kl_weight, **options,
    )  # fmt: skip


def weighted(scores):
    """Returns a sum in which every row has another weight."""
    return jnp.sum(scores.objective * jnp.arange(scores.objective.size).reshape(BATCH, ROWS))


@pytest.mark.parametrize(
    ("chunk_tokens", "kl_weight"), [(4, 0.0), (4, 0.3), (4, 1.0), (1, 0.3), (64, 0.3)]
)
@pytest.mark.parametrize("frozen_head", [False, True])
def test_chunks_equal_the_whole(kl_weight, frozen_head, chunk_tokens):
    rows = make_rows()
    ours = functools.partial(chunked, frozen_head=frozen_head, chunk_tokens=chunk_tokens)
    for mine, theirs in zip(ours(*rows, kl_weight), dense(*rows, kl_weight), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)

    def gradient(function, argument):
        return jax.jit(jax.grad(lambda *rows: weighted(function(*rows, kl_weight)), argument))(
            *rows
        )

    # Skip the gradient of a frozen head, which `dense` would compute. The target's must be zero.
    learn = (0, 2) if frozen_head else (0, 2, 3)
    gradients = gradient(ours, learn), gradient(dense, learn)
    for mine, theirs in zip(*gradients, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5)
    assert gradients[0][0].any()
    assert not gradients[0][1].any()


def test_a_frozen_head_does_not_learn():
    hidden, labels, target, head = make_rows()
    loss = lambda head: weighted(  # noqa: E731
        chunked(hidden, labels, target, head, 0.0, frozen_head=True)
    )
    assert not np.asarray(jax.jit(jax.grad(loss))(head)).any()


def test_bfloat16_rows_have_float32_losses():
    rows = make_rows(dtype=jnp.bfloat16)
    for frozen_head in (False, True):
        call = jax.value_and_grad(
            lambda hidden, frozen_head=frozen_head: weighted(
                chunked(hidden, *rows[1:], 0.5, frozen_head=frozen_head)
            )
        )
        value, grad = jax.jit(call)(rows[0])
        assert value.dtype == jnp.float32
        assert grad.dtype == jnp.bfloat16
        expected = jax.jit(jax.grad(lambda hidden: weighted(dense(hidden, *rows[1:], 0.5))))(
            np.asarray(rows[0], np.float32)
        )
        scale = np.abs(expected).max()
        np.testing.assert_allclose(np.asarray(grad, np.float32), expected, atol=0.03 * scale)


def test_large_logits_stay_finite():
    hidden, labels, target, head = make_rows()
    call = jax.value_and_grad(
        lambda hidden: weighted(chunked(hidden, labels, target, 1e4 * head, 0.5))
    )
    scores, grad = jax.jit(call)(hidden)
    assert np.isfinite(scores)
    assert np.isfinite(grad).all()


def test_the_first_of_equal_logits_is_the_most_probable():
    logits = jnp.asarray([[[1.0, 3.0, 3.0], [3.0, 1.0, 3.0], [3.0, 3.0, 3.0]]])
    for label, expected in ((0, [0, 1, 1]), (1, [1, 0, 0]), (2, [0, 0, 0])):
        scores = losses.score_tokens(logits, jnp.full((1, 3), label), lambda rows: rows)
        np.testing.assert_array_equal(scores.correct[0], np.array(expected, bool))


def test_a_divergence_needs_a_target():
    hidden, labels, _, head = make_rows()
    with pytest.raises(ValueError, match="target_hidden"):
        chunked(hidden, labels, None, head, 1.0)


@pytest.mark.parametrize("frozen_head", [False, True])
def test_logits_are_never_whole(frozen_head):
    vocab, length = 64, 96
    hidden, head = jnp.ones((2, length, 4)), jnp.ones((4, vocab))
    labels = jnp.zeros((2, length), jnp.int32)

    def total(hidden, head):
        scores = losses.score_tokens(
            hidden, labels, lambda rows: rows @ head, target_hidden=hidden, kl_weight=0.5,
            frozen_head=frozen_head, chunk_tokens=8,
        )  # fmt: skip
        return scores.objective.sum()

    assert largest_array(jax.grad(total, argnums=(0, 1)), hidden, head) <= 2 * 8 * vocab
    whole = largest_array(lambda hidden, head: hidden @ head, hidden, head)
    assert whole == 2 * length * vocab


@pytest.mark.parametrize("frozen_head", [False, True])
def test_a_split_vocabulary_stays_split(frozen_head):
    target = make_target()
    split = Qwen3(make_architecture(), dtype=jnp.float32, sharding=make_sharding(data=2, tensor=4))
    move(target, split)
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.normal(size=(4, 9, 32)).astype(jnp.float32))
    labels = jnp.asarray(rng.integers(0, 48, (4, 9)).astype(jnp.int32))

    def program(model):
        def total(hidden):
            scores = losses.score_tokens(
                hidden, labels, model.unembed, target_hidden=hidden[:, ::-1], kl_weight=0.5,
                frozen_head=frozen_head, chunk_tokens=4,
            )  # fmt: skip
            return jnp.sum(scores.objective * scores.correct + scores.objective), scores

        return jax.jit(jax.value_and_grad(total, has_aux=True))

    ours, theirs = program(split)(hidden), program(target)(hidden)
    for mine, expected in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(mine, expected, rtol=1e-4, atol=1e-5)
    text = program(split).lower(hidden).compile().as_text()
    gathered = re.findall(r"\[([\d,]*)\]\S* all-gather", text)
    assert not [shape for shape in gathered if shape.split(",")[-1] == "48"]
    assert "all-reduce" in text


@pytest.mark.parametrize(
    ("block_size", "gamma"), [(16, 7.0), (10, 5.0), (8, 4.0), (13, 6.0), (4, 2.0), (22, 9.0)]
)
def test_derived_gamma(block_size, gamma):
    assert losses.derived_gamma(block_size) == pytest.approx(gamma)


def test_decay_weights():
    np.testing.assert_allclose(
        losses.decay_weights(4, 2.0), [1, np.exp(-0.5), np.exp(-1), np.exp(-1.5)], rtol=1e-6
    )
    np.testing.assert_array_equal(losses.decay_weights(3, 0.0), [1, 1, 1])


BLOCKS = st.integers(0, 2**32 - 1).map(lambda seed: np.random.default_rng(seed))


@settings(max_examples=40)
@given(rng=BLOCKS, alpha=st.sampled_from([0.0, 0.5, 1.0]))
def test_dpace_weights_by_loops(rng, alpha):
    nll, counted = rng.exponential(size=(3, 5)), rng.random((3, 5)) < 0.7
    expected = np.zeros((3, 5))
    for block in range(3):
        for k in range(5):
            for m in range(k, 5):
                reach = 1.0
                for i in range(m + 1):
                    if counted[block, i]:
                        reach *= (1 - alpha) * np.exp(-nll[block, i]) + alpha
                expected[block, k] += reach * counted[block, m] * counted[block, k]
    ours = losses.dpace_weights(jnp.asarray(nll), jnp.asarray(counted), alpha)
    np.testing.assert_allclose(ours, expected, rtol=1e-5)


def test_dpace_weights_carry_no_gradient():
    grad = jax.grad(lambda nll: losses.dpace_weights(nll, jnp.ones((2, 3), bool), 0.5).sum())
    assert not grad(jnp.ones((2, 3))).any()


@pytest.mark.parametrize("name", ["cross_entropy", "kl", "dpace"])
def test_nothing_to_learn_from_weighs_nothing(name):
    nll, counted = jnp.ones((2, 3, 4)), jnp.zeros((2, 3, 4), bool)
    weights, divisor = losses.block_weights(nll, counted, LossConfig(name=name))
    assert not weights.any()
    assert float(divisor) > 0


def test_mean_over_nothing_is_zero():
    assert float(losses.mean_over(jnp.ones(3), jnp.zeros(3))) == 0
    assert float(losses.mean_over(jnp.array([1.0, 5.0]), jnp.array([3.0, 1.0]))) == 2
