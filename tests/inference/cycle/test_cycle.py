"""Tests of the cycle through the engine, with drafts that are known to be right or wrong."""

import functools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engines import (
    check_plain,
    engine,
    expected,
    make_requests,
    occupied,
    random_prompts,
    redrafted,
)
from support.scripted_drafter import Script, ScriptedDrafter

from dflash.inference.engine import Engine

LENGTH = 96  # positions that a script covers
PROMPTS = random_prompts([1, 16, 9, 17, 5, 2])
LIMITS = [20, 9, 1, 18, 2, 23]
indices = st.integers(0, 2**31 - 100)
few = settings(max_examples=10)


@functools.cache
def scripted_engine(
    block_size: int, tree: bool, batch_size: int, depth: int | None = None
) -> Engine:
    chain = Script.chain(LENGTH, block_size - 1, True)
    blank = ScriptedDrafter(chain, [()] * 6, tree=tree, depth=depth)
    run = engine(blank, batch_size=batch_size, sync_every=3, max_length=40)
    run.program("generate")  # As in `shared_engine`.
    return run


def check(base: Engine, script: Script, *, temperature: float, index: int, stop_ids=()) -> None:
    """Decodes and compares tokens and acceptance lengths with what must come."""
    how = {"temperature": temperature, "first_index": index}
    whole = expected(PROMPTS, [32] * len(PROMPTS), **how)
    texts = [(*prompt, *ids) for prompt, (ids, _) in zip(PROMPTS, whole, strict=True)]
    form = {"tree": base.drafter.tree, "depth": base.drafter.max_depth}
    run = redrafted(base, ScriptedDrafter(script, texts, **form))
    done = check_plain(run, PROMPTS, LIMITS, stop_ids=stop_ids, **how)
    for prompt, one in zip(PROMPTS, done, strict=True):
        lengths = script.acceptance_lengths(len(prompt), len(one.output_ids))
        assert one.acceptance_lengths == lengths, one.id


@few
@given(index=indices, temperature=st.sampled_from([0.0, 0.8]))
@pytest.mark.parametrize(
    ("block_size", "batch_size", "depth"), [(8, 3, None), (5, 1, None), (8, 3, 3)]
)
def test_random_trees(block_size, batch_size, depth, index, temperature):
    script = Script.random_tree(LENGTH, block_size - 1, np.random.default_rng(index), depth)
    base = scripted_engine(block_size, True, batch_size, depth=depth)
    check(base, script, temperature=temperature, index=index)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_stop_token_inside_an_accepted_tree_path_ends_the_sequence(temperature):
    script = Script.chain(LENGTH, 7, False)
    stop_ids = (1, 7)
    check(
        scripted_engine(8, True, 3), script, temperature=temperature, index=300, stop_ids=stop_ids
    )
    how = {"temperature": temperature, "first_index": 300, "stop_ids": stop_ids}
    stops = [len(ids) for ids, reason in expected(PROMPTS, LIMITS, **how) if reason == "stop"]
    assert any(length % 8 > 1 for length in stops), "no stop fell inside a block"


@pytest.mark.parametrize(("tree", "depth"), [(False, None), (True, None), (True, 3)])
def test_cache_and_drafter_state_hold_exactly_the_committed_positions(tree, depth):
    """After every dispatch: what a fresh prefill of the committed tokens would hold."""
    block_size = 8 if tree else 5
    base = scripted_engine(block_size, tree, 3, depth=depth)
    rng = np.random.default_rng(5)
    script = Script.random_tree(LENGTH, block_size - 1, rng, depth)
    if not tree:
        script = Script.chain(LENGTH, block_size - 1, rng.random((LENGTH, block_size)) < 0.3)
    prompts = PROMPTS[1:4]
    outputs = expected(prompts, [20] * 3, temperature=0.8)
    texts = [(*prompt, *ids) for prompt, (ids, _) in zip(prompts, outputs, strict=True)]
    model = ScriptedDrafter(script, [*texts, (), (), ()], tree=tree, depth=depth)
    run = redrafted(base, model)

    requests = make_requests(prompts, 20, temperature=0.8)
    state = occupied(run, requests)
    fresh = occupied(run, make_requests(texts, 1, temperature=0.8))
    dispatches = 0
    fresh = on_host(fresh)
    while np.asarray(state.active).any():
        state, _ = run.generate(state)
        dispatches, now = dispatches + 1, on_host(state)
        for i, text in enumerate(texts):
            held = now.length[i] - 1
            assert now.drafter["count"][i] == held
            np.testing.assert_array_equal(now.drafter["tokens"][i, :held], text[:held])
            np.testing.assert_array_equal(now.drafter["following"][i, :held], text[1 : held + 1])
            features = fresh.drafter["features"][i, :held]
            np.testing.assert_allclose(now.drafter["features"][i, :held], features, atol=1e-4)
            assert now.anchor[i] == text[held]
            for rows, wanted in zip(now.cache.pools, fresh.cache.pools, strict=True):
                held_rows = cached_rows(rows, now.cache.page_table[i], held)
                fresh_rows = cached_rows(wanted, fresh.cache.page_table[i], held)
                np.testing.assert_allclose(held_rows, fresh_rows, atol=1e-4)
    assert dispatches > 2


def on_host(state):
    """A state as numpy arrays, whose parts cost no program each."""
    return jax.tree.map(np.asarray, state)


def cached_rows(pages, table, count: int) -> np.ndarray:
    """Rows 0 … count - 1 of one sequence, [K, count, H]."""
    return pages[:, table].reshape(pages.shape[0], -1, pages.shape[-1])[:, :count]
