"""Cycles that take the likeliest tokens tile by tile decode what those with all logits do."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from support.engines import (
    decode_all,
    engine,
    make_requests,
    occupied,
    plain_engine,
    random_prompts,
)
from support.models import drafter

from dflash.inference.cycle import cycle
from dflash.kernels import unembed_tiles

PROMPTS = random_prompts([5, 9, 2])


@pytest.fixture
def traced(monkeypatch) -> list[bool]:
    """Forces tiles of 20 tokens; returns a list that grows by whether each one has noise."""
    plain_engine()  # Compiled before, with all logits.
    found, unembed_argmax = [], unembed_tiles.unembed_argmax

    def unembed(hidden, head, noise, **how):
        found.append(noise is not None)
        return unembed_argmax(hidden, head, noise, largest_tile=20, **how)

    monkeypatch.setattr(unembed_tiles, "unembed_argmax", unembed)
    for name in ("pays", "noise_pays"):
        monkeypatch.setattr(unembed_tiles, name, lambda *_: True)
    return found


def requests(*options):
    made = [
        make_requests([prompt], 20, **one)[0] for prompt, one in zip(PROMPTS, options, strict=True)
    ]
    return [dataclasses.replace(one, id=i) for i, one in enumerate(made)]


def check(run, *options):
    found, wanted = (decode_all(base, requests(*options)) for base in (run, plain_engine()))
    assert [one.output_ids for one in found] == [one.output_ids for one in wanted]


@pytest.mark.parametrize("tree", [False, True])
def test_sampled_and_greedy_sequences(tree, traced):
    run = engine(drafter("dflash", block_size=4, tree=tree), batch_size=3, max_length=64)
    run.program("generate")  # It serves greedy requests, too.
    assert traced == [False, True]
    greedy, sampled = {}, {"temperature": 0.8}
    check(run, greedy, greedy, greedy)
    check(run, greedy, sampled, sampled)
    check(run, greedy, sampled | {"top_k": 5}, sampled)
    check(run, {"presence_penalty": 1.0}, sampled, greedy)
    check(run, greedy, {"logprobs": 2}, sampled)


def test_sampling_from_logits_where_tiles_with_noise_do_not_pay(traced, monkeypatch):
    monkeypatch.setattr(unembed_tiles, "noise_pays", lambda *_: False)
    judged, judge = [], cycle.judge
    monkeypatch.setattr(cycle, "judge", lambda *how: judged.append(1) or judge(*how))
    run = engine(drafter("dflash", block_size=4), batch_size=3, max_length=64)
    run.program("generate")
    assert (traced, judged) == ([False], [1])
    check(run, {}, {"temperature": 0.8}, {})
    check(run, {}, {"temperature": 0.8, "top_k": 5}, {"presence_penalty": 1.0})


def test_greedy_programs_have_no_logits(traced, monkeypatch):
    run = engine(drafter("dflash", block_size=4), batch_size=3, max_length=64)
    monkeypatch.setattr(cycle, "judge", None)
    run.program("generate_greedy")
    assert traced == [False]
    check(run, {}, {}, {})


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_packed_rows(temperature, traced, monkeypatch):
    model = drafter("dspark", block_size=4)
    run = engine(model, batch_size=3, max_length=64, adaptive_blocks=True)
    state = occupied(run, make_requests(PROMPTS, 20, temperature=temperature))
    how = {"rules": run.rules, "block_size": 4, "mean_rows": 2}
    one_cycle = functools.partial(cycle.cycle, run.target, model, **how)
    found = jax.jit(lambda state: one_cycle(state)[1])(state)
    assert traced[-2:] == [False, True]  # Those before are of times of cycles.
    monkeypatch.setattr(unembed_tiles, "pays", lambda *_: False)
    expected = jax.jit(lambda state: one_cycle(state)[1])(state)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert found.count.min() > 0
