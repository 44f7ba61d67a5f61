"""Medusa heads: which row they look ahead from, what they learn from, and their checkpoints."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
from support import failure
from support.models import greedy, make_architecture, make_sharding, make_target, random_module
from support.training import loss_and_gradients, random_batch, weights_of, with_weights

from dflash import errors
from dflash.config.train_schema import LossConfig
from dflash.drafters.base_config import MarginalTree
from dflash.drafters.medusa import Medusa
from dflash.drafters.medusa_config import MedusaArchitecture, MedusaConfig, MedusaShape
from dflash.drafters.parts.blocks import Anchors
from dflash.layers.losses import TrainBatch

BLOCK, LENGTH = 4, 12
ARCH = make_architecture()


@functools.cache
def make_drafter() -> Medusa:
    """Returns heads with random weights, so that they are not the identity."""
    shape = Medusa.architecture_for(ARCH, MedusaArchitecture(block_size=BLOCK))
    model, noise = random_module(Medusa, shape), np.random.default_rng(1)
    return with_weights(
        model,
        {
            path: array + noise.normal(0, 0.3, array.shape).astype(np.float32)
            for path, array in weights_of(model).items()
        },
    )


def make_batch() -> TrainBatch:
    """Returns a row with one document, and a row with two and an unsupervised gap."""
    batch = random_batch([[LENGTH], [5, 6]], LENGTH, taps=1)
    return dataclasses.replace(batch, loss_mask=batch.loss_mask.at[1, 8].set(0))


ANCHORS = Anchors(jnp.asarray([[0, 3, 10], [4, 5, 7]], jnp.int32), jnp.ones((2, 3), bool))


def plain_log_probs(model, feature):
    """Returns the log-probabilities [G, V] of heads 1 … G for one target feature [D]."""
    values = {path: np.asarray(array) for path, array in weights_of(model).items()}
    x = np.asarray(feature, np.float64)
    x = x / np.sqrt(np.mean(x * x) + ARCH.rms_norm_eps) * values["norm.scale"]
    kernel, found = np.asarray(make_target().lm_head.kernel[...], np.float64), []
    for i in range(BLOCK - 1):
        z = x @ values[f"heads.{i}.linear.kernel"]
        found.append(scipy.special.log_softmax((x + z / (1 + np.exp(-z))) @ kernel))
    return np.stack(found)


def test_drafts_come_from_the_row_before_the_anchor():
    model, batch, target = make_drafter(), make_batch(), make_target()
    count, features = np.array([3, 0]), np.asarray(batch.features)

    @jax.jit
    def cycle(state):
        start = jnp.zeros(2, int)
        state = model.observe(state, start, batch.tokens, count, features[:, :-1], None)
        anchor = batch.tokens[:, 3]
        proposal, after = model.draft(state, anchor, count, greedy(2), target)
        assert after is state
        return state, proposal.tokens

    state, drafts = map(np.asarray, cycle(np.ones((2, ARCH.hidden_size), np.float32)))
    np.testing.assert_array_equal(state[0], features[0, 2])
    np.testing.assert_array_equal(state[1], 1.0)  # nothing was committed
    for row, tokens in zip(state, drafts.tolist(), strict=True):
        assert tokens == plain_log_probs(model, row).argmax(-1).tolist()


def test_fresh_heads_say_what_the_target_says_next():
    shape = Medusa.architecture_for(ARCH, None)
    model = random_module(Medusa, shape)
    ahead = np.asarray(jax.jit(model.look_ahead)(make_batch().features))
    assert ahead.shape == (2, LENGTH, shape.block_size, ARCH.hidden_size)
    np.testing.assert_array_equal(ahead, np.broadcast_to(ahead[..., :1, :], ahead.shape))


def test_loss_by_loops():
    """Anchors 0 and 5 begin a document, so nothing comes before them."""
    model, batch, gamma = make_drafter(), make_batch(), 4.5
    loss, metrics, grads = loss_and_gradients(
        model, batch, make_target(), None, LossConfig(gamma=gamma), anchors=ANCHORS
    )
    batch = jax.tree.map(np.asarray, batch)
    total = weights = correct = counted = 0.0
    for b, a in [(0, 3), (0, 10), (1, 4), (1, 7)]:
        log_probs = plain_log_probs(model, batch.features[b, a - 1])
        for k in range(1, BLOCK):
            at = a + k
            inside = at < LENGTH and batch.segment_ids[b, at] == batch.segment_ids[b, a]
            if not (inside and batch.loss_mask[b, at]):
                continue
            label = int(batch.tokens[b, at])
            weight = np.exp(-(k - 1) / gamma)
            total, weights = total - weight * log_probs[k - 1, label], weights + weight
            correct, counted = correct + (log_probs[k - 1].argmax() == label), counted + 1
    np.testing.assert_allclose(loss, total / weights, rtol=1e-4)
    np.testing.assert_allclose(metrics["weight"], weights, rtol=1e-5)
    np.testing.assert_allclose(metrics["token_accuracy"], correct / counted, rtol=1e-5)
    assert int(metrics["blocks"]) == 4
    assert all(np.abs(grad).max() > 0 for grad in grads.values())


def create(hf=None, **options) -> Medusa:
    config = MedusaConfig(**options)
    return Medusa.create(config, hf, ARCH, dtype=jnp.float32, sharding=make_sharding())


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"block_size": 9}, errors.ConfigError, "drafter.block_size: 9 is larger than"),
        ({"block_size": 2, "tree": MarginalTree(budget=49)}, errors.ConfigError,
         "drafter.tree.budget: 49 exceeds the block's capacity of 48"),
        ({"hf": {"hidden_size": 32}}, errors.CheckpointError,
         "missing block_size, vocab_size, num_target_layers, rms_norm_eps"),
        ({"hf": dataclasses.asdict(MedusaShape(5, 32, 50, 9, 1e-6))}, errors.CheckpointError,
         "another target: number of target layers 9 (target: 3), vocabulary 50 (target: 48)"),
    ],
    ids=["block", "tree", "fields", "target"],
)  # fmt: skip
def test_what_does_not_fit_is_one_line(options, kind, message):
    assert message in failure(create, kind=kind, **options)
