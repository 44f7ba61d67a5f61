"""Targets with recurrent state: Qwen3-Next and Qwen3.5, beside transformers' own."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.golden import load_target
from support.models import (
    check_same_weights,
    family_architecture,
    make_cache,
    packed_rows,
    random_module,
)
from support.parity import step
from support.token_trees import random_ancestry

from dflash.checkpoints import checkpoint
from dflash.models.qwen3_next import Qwen3Next, Qwen35Text


@functools.cache
def tiny(family="qwen3_next"):
    kind = {"qwen3_next": Qwen3Next, "qwen3_5": Qwen35Text}[family]
    return random_module(kind, family_architecture(family))


def test_packed_documents_are_computed_apart():
    model, rng = tiny(), np.random.default_rng(0)
    tokens = rng.integers(0, 48, (1, 90))
    ids, positions = packed_rows([[5, 70, 9]], 90)
    hidden, _ = jax.jit(model.forward)(tokens, positions, ids)
    assert np.isfinite(hidden).all()
    for begin, end in ((5, 75), (75, 84)):
        part = tokens[:, begin:end]
        alone, *_ = step(model, part, [0], make_cache(model, 1, end - begin))
        np.testing.assert_allclose(hidden[0, begin:end], alone[0], atol=1e-4)


@functools.cache
def verify_and_commit(family, is_tree):
    model = tiny(family)

    @jax.jit
    def run(cache, tokens, start, count, ancestry, path):
        depth = ancestry.sum(-1) - 1
        mask = ancestry if is_tree else None
        output = model(tokens, start[:, None] + depth, cache, tree_mask=mask)
        return output.cache.commit(start, count, path if is_tree else None, model.sharding)

    return run


@pytest.mark.parametrize(
    ("family", "cycles"), [("qwen3_next", 5), ("qwen3_next", 20), ("qwen3_5", 20)]
)
@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 2**20), is_tree=st.booleans())
def test_states_after_cycles_are_those_of_a_fresh_prefill(family, cycles, seed, is_tree):
    """Random trees and acceptances, none of a block among them, through the whole model."""
    model, rng, batch, rows = tiny(family), np.random.default_rng(seed), 3, 7
    capacity = 8 * cycles + 8
    cache, texts = make_cache(model, batch, capacity), [[] for _ in range(batch)]
    for _ in range(cycles):
        ancestry = np.tril(np.ones((batch, rows, rows), bool))
        if is_tree:
            ancestry = random_ancestry(rng, batch, rows)
        tokens = rng.integers(0, 48, (batch, rows))
        start = np.array([len(text) for text in texts], np.int32)
        paths = [np.flatnonzero(ancestry[b, rng.integers(rows)]) for b in range(batch)]
        paths = [path[: rng.integers(len(path) + 1)] for path in paths]
        count = np.array([len(path) for path in paths], np.int32)
        path = np.stack([np.pad(path, (0, rows - len(path))) for path in paths]).astype(np.int32)
        cache = verify_and_commit(family, is_tree)(cache, tokens, start, count, ancestry, path)
        for b in range(batch):
            texts[b] += tokens[b, paths[b]].tolist()
    lengths = np.array([len(text) for text in texts])
    whole = np.stack([np.pad(text, (0, 8 * cycles - len(text))) for text in texts])
    *_, fresh = step(model, whole, [0] * batch, make_cache(model, batch, capacity), count=lengths)
    for state, wanted in zip(cache.states, fresh.states, strict=True):
        for mine, theirs in zip(jax.tree.leaves(state), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-5 * np.abs(theirs).max())


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5"])
def test_what_was_written_is_read_back(family, tmp_path):
    model = tiny(family)
    config = type(model).config_to_hf(model.arch)
    checkpoint.save(model, tmp_path / "out", config)
    again = load_target(tmp_path / "out")
    assert again.arch == dataclasses.replace(model.arch, eos_token_id=again.arch.eos_token_id)
    check_same_weights(again, model)
