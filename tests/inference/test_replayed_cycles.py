"""Replays of cycles: what a drafter sees of its prompts, and what is accepted of its drafts."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash.config import loader, schema
from dflash.drafters.base import Proposal
from dflash.inference import replay
from dflash.loading import job as jobs

TREE = Proposal(jnp.array([[9, 5, 6, 6, 7, 4]]), jnp.array([[0, 0, 1, 2, 3, 4]]))
CHAIN = Proposal(jnp.array([[5, 6, 4]]))


def test_the_longest_path_of_a_tree_that_the_text_takes_is_accepted():
    """Text 5 6 7 8; the tree has 5, 9 and 5 6 besides 4, and 9 6 7."""
    tokens = jnp.array([[1, 5, 6, 7, 8]])
    num_accepted = jax.jit(replay.num_accepted)
    assert num_accepted(TREE, tokens).tolist() == [2]
    assert num_accepted(CHAIN, tokens).tolist() == [2]


def test_drafts_count_if_those_before_them_were_accepted():
    """The same tree; the confidence is in whole paths, that of a chain in one draft."""
    tokens, left = jnp.array([[1, 5, 6, 7, 8]]), jnp.array([4])
    confidence = jnp.array([[0.5, 0.4, 0.3, 0.2, 0.1, 0.05]])
    tree = dataclasses.replace(TREE, confidence=confidence)
    found = replay.drafts(tree, tokens, left)
    assert found.depth.tolist() == [[1, 1, 2, 2, 3, 3]]
    assert found.counted.tolist() == [[True, True, False, True, False, True]]
    assert found.accepted.tolist() == [[False, True, False, True, False, False]]
    np.testing.assert_allclose(found.chance[0], [0.5, 0.4, 0.6, 0.5, 1 / 3, 0.25], rtol=1e-6)
    assert replay.drafts(tree, tokens, jnp.array([2])).counted.sum() == 3, "the text ends"
    chain = dataclasses.replace(CHAIN, confidence=confidence[:, :3])
    found = replay.drafts(chain, tokens, left)
    assert found.counted.tolist() == [[True, True, True]]
    assert found.accepted.tolist() == [[True, True, False]]
    np.testing.assert_array_equal(found.chance, confidence[:, :3])


@pytest.mark.parametrize("prompt", [40, 256, 300])
def test_a_prompt_is_observed_in_chunks_of_any_number(prompt):
    """The last chunk of a long prompt has rows past the text's end."""
    config = loader.load("configs/tiny_dflash.yml", ["dtype=float32"], schema.DecodeRun)
    job = jobs.prepare_models(config)
    job.load_weights()
    drafter = job.drafter
    length = -(-(prompt + 4) // 64) * 64
    generator = np.random.default_rng(0)
    width = len(drafter.feature_layers) * job.target.arch.hidden_size
    texts = replay.Texts(
        jnp.array(generator.integers(8, 100, (1, length)), jnp.int32),
        jnp.array([prompt]),
        jnp.array([prompt + 4]),
        jnp.array(generator.normal(size=(1, length, width)), jnp.float32),
        (),
    )

    @jax.jit
    def observe(count):
        some = dataclasses.replace(texts, prompt=count)
        return replay.observe_prompts(drafter, job.target, some, 2 * length)

    @jax.jit
    def observe_all(state):
        rows = texts.tokens, texts.prompt, texts.features
        return drafter.observe(state, jnp.array([0]), *rows, job.target)

    found, whole = observe(texts.prompt), observe_all(observe(jnp.array([0])))
    rows = [state.read_rows(0, 0, prompt) for state in (found, whole)]
    for some, other in zip(*map(jax.tree.leaves, rows), strict=True):
        np.testing.assert_allclose(some, other, rtol=1e-5, atol=1e-5)
