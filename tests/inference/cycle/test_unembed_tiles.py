"""Cycles that take the likeliest tokens tile by tile decode what those with all logits do."""

import functools

import jax
import numpy as np
import pytest
from support.engines import (
    decode,
    engine,
    make_requests,
    occupied,
    outcomes,
    plain_engine,
    random_prompts,
    untraced_cycles,
)
from support.models import drafter

from dflash.inference.cycle import cycle
from dflash.inference.engine import Engine
from dflash.kernels import unembed_tiles

PROMPTS = random_prompts([5, 9, 2])


def force_tiles(monkeypatch) -> list[bool]:
    """Forces tiles of 20 tokens; returns a list that grows by whether each one has noise."""
    found, unembed_argmax = [], unembed_tiles.unembed_argmax

    def unembed(hidden, head, noise, **how):
        found.append(noise is not None)
        return unembed_argmax(hidden, head, noise, largest_tile=20, **how)

    monkeypatch.setattr(unembed_tiles, "unembed_argmax", unembed)
    for name in ("pays", "noise_pays"):
        monkeypatch.setattr(unembed_tiles, name, lambda *_: True)
    return found


def make_engine(monkeypatch, *, tree: bool = False) -> tuple[Engine, list[bool]]:
    """Returns an engine whose cycles are still to be traced, in tiles; see `force_tiles`."""
    plain_engine()  # Compiled before, with all logits.
    return untraced_cycles("dflash", PROMPTS, tree=tree), force_tiles(monkeypatch)


def check(run, *options):
    found, wanted = (decode(base, PROMPTS, 20, each=options) for base in (run, plain_engine()))
    assert outcomes(found) == outcomes(wanted)


@pytest.mark.parametrize("tree", [False, True])
def test_sampled_and_greedy_sequences(tree, monkeypatch):
    run, traced = make_engine(monkeypatch, tree=tree)
    run.program("generate")  # It serves greedy requests, too.
    assert traced == [False, True]
    greedy, sampled = {}, {"temperature": 0.8}
    check(run, greedy, greedy, greedy)
    check(run, greedy, sampled, sampled)
    check(run, greedy, sampled | {"top_k": 5}, sampled)
    check(run, {"presence_penalty": 1.0}, sampled, greedy)
    check(run, greedy, {"logprobs": 2}, sampled)


def test_sampling_from_logits_where_tiles_with_noise_do_not_pay(monkeypatch):
    run, traced = make_engine(monkeypatch)
    monkeypatch.setattr(unembed_tiles, "noise_pays", lambda *_: False)
    judged, judge = [], cycle.judge
    monkeypatch.setattr(cycle, "judge", lambda *how: judged.append(1) or judge(*how))
    run.program("generate")
    assert (traced, judged) == ([False], [1])
    check(run, {}, {"temperature": 0.8}, {})
    check(run, {}, {"temperature": 0.8, "top_k": 5}, {"presence_penalty": 1.0})


def test_greedy_programs_have_no_logits(monkeypatch):
    run, traced = make_engine(monkeypatch)
    monkeypatch.setattr(cycle, "judge", None)
    run.program("generate_greedy")
    assert traced == [False]
    check(run, {}, {}, {})


def test_packed_rows(monkeypatch):
    traced = force_tiles(monkeypatch)
    model = drafter("dspark", block_size=4)
    run = engine(model, batch_size=3, max_length=64, adaptive_blocks=True)
    states = [
        occupied(run, make_requests(PROMPTS, 20, temperature=temperature))
        for temperature in (0.0, 0.8)
    ]
    how = {"rules": run.rules, "block_size": 4, "mean_rows": 2}
    one_cycle = functools.partial(cycle.cycle, run.target, model, **how)
    in_tiles, whole = (jax.jit(lambda state: one_cycle(state)[1]) for _ in range(2))
    found = [in_tiles(state) for state in states]
    assert traced[-2:] == [False, True]  # Those before are of times of cycles.
    monkeypatch.setattr(unembed_tiles, "pays", lambda *_: False)
    jax.tree.map(np.testing.assert_array_equal, found, [whole(state) for state in states])
    assert min(each.count.min() for each in found) > 0
