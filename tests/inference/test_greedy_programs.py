"""Tests of the programs for batches in which all requests are greedy."""

import functools

import pytest
from support import grammars
from support.engines import (
    check_plain,
    count_compilations,
    decode_all,
    expected,
    make_requests,
    outcomes,
    random_prompts,
    shared_engine,
    untraced_cycles,
    watch_dispatches,
    with_programs,
    without_prefix_cache,
)

from dflash.inference.engine import Engine

PROMPTS, LIMITS = random_prompts([5, 9]), [24, 4]


@functools.cache
def for_greedy() -> Engine:
    """The shared engine with the programs that greedy requests need."""
    run = untraced_cycles("dflash", PROMPTS, greedy=True)
    run.compile(map(len, PROMPTS), greedy=True)
    return run


@functools.cache
def for_all() -> Engine:
    """The same with all programs."""
    run = with_programs(shared_engine("dflash"), [("generate",)])
    run._programs._compiled |= for_greedy()._programs._compiled
    return run


def alone() -> Engine:
    return without_prefix_cache(shared_engine("none"))


def test_greedy_requests_need_no_other_programs():
    run = for_greedy()
    with count_compilations() as compilations:
        check_plain(run, PROMPTS, LIMITS)
    assert compilations == []


@pytest.mark.parametrize(
    "other",
    [
        {"temperature": 0.8},
        {"presence_penalty": 1.0},
        {"repetition_penalty": 1.2},
        {"logit_bias": ((3, 2.0),)},
        {"min_new_tokens": 2},
        {"logprobs": 0},
        {"grammar": grammars.regex("[a1]+"), "stop_ids": (grammars.END,)},
    ],
    ids=lambda other: next(iter(other)),
)
def test_a_greedy_request_beside_another_one(other):
    """The dispatches become greedy when the other one, which is shorter, has ended."""
    watched, greedy = watch_dispatches(for_all(), lambda report, *_, **how: how["greedy"])
    requests = make_requests(PROMPTS, LIMITS, each=[{}, other])
    found = outcomes(decode_all(watched, requests))
    assert found[0] == expected(PROMPTS, LIMITS)[0]
    assert found[1:] == outcomes(decode_all(alone(), requests[1:]))
    assert greedy == sorted(greedy)
    assert set(greedy) == {False, True}


def test_a_greedy_program_neither_draws_nor_filters():
    run = for_all()
    for name in ("generate", "generate_greedy"):
        text = run.program(name).as_text()
        parts = ("if_sampled", "if_filtered", "if_shaped", "if_logprobs")
        assert [part in text for part in parts] == [name == "generate"] * len(parts)
