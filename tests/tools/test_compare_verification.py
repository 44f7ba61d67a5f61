"""The expectation in tools/compare_verification.py, against how often the rules accept."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import scripts
from support.rejection import make_params

from dflash.inference.cycle import verify

SAMPLES, DRAFTS, VOCAB = 20_000, 4, 3


@pytest.fixture(scope="module")
def tool():
    return scripts.load("tools/compare_verification.py")


@pytest.mark.parametrize("seed", [1, 2, 4])
def test_drafts_are_accepted_as_often_as_expected(tool, seed):
    rng = np.random.default_rng(seed)
    logits = jnp.asarray(rng.normal(size=(1, DRAFTS + 1, VOCAB)).astype(jnp.float32))
    probs = jax.nn.softmax(jnp.asarray(rng.normal(size=(1, DRAFTS, VOCAB)).astype(jnp.float32)))
    draft = jnp.asarray(rng.integers(0, VOCAB, (1, DRAFTS)).astype(jnp.int32))
    one = verify.chain_probabilities(draft, probs, logits, make_params(1))
    expected = tool.survival(one)
    assert not np.allclose(*expected)
    params = make_params(SAMPLES, seed=seed)
    drafts, probs, logits = (jnp.repeat(x, SAMPLES, axis=0) for x in (draft, probs, logits))
    positions = jnp.broadcast_to(jnp.arange(DRAFTS + 1), (SAMPLES, DRAFTS + 1))
    for rule, chances in zip((verify.rejection_chain, verify.block_chain), expected, strict=True):
        accepted = jax.jit(rule)(drafts, probs, logits, positions, params).num_accepted
        found = (np.asarray(accepted)[:, None] > np.arange(DRAFTS)).mean(axis=0)
        np.testing.assert_allclose(found, chances[0], atol=5 * 0.5 / SAMPLES**0.5)
