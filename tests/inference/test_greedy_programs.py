"""Tests of the programs for batches in which all requests are greedy."""

import dataclasses
import functools

import pytest
from support import grammars
from support.engines import (
    Watched,
    count_compilations,
    decode_all,
    expected,
    make_requests,
    random_prompts,
    shared_engine,
    with_programs,
    without_prefix_cache,
)

from dflash.inference.engine import Engine

PROMPTS, LIMITS = random_prompts([5, 9]), [24, 4]


@functools.cache
def for_greedy() -> Engine:
    """The shared engine with the programs that greedy requests need."""
    base = shared_engine("dflash")
    names = base.program_names(map(len, PROMPTS), greedy=True)
    run = with_programs(base, [name for name in names if name != ("generate_greedy",)])
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


class Watch(Watched):
    """An engine that notes which dispatches are greedy."""

    def generate(self, state, *bucket, **how):
        self.seen.append(how["greedy"])
        return self._inner.generate(state, *bucket, **how)


def outputs(run, requests) -> list[tuple]:
    return [(one.output_ids, one.finish_reason) for one in decode_all(run, requests)]


def test_greedy_requests_need_no_other_programs():
    run = for_greedy()
    with count_compilations() as compilations:
        found = outputs(run, make_requests(PROMPTS, LIMITS))
    assert found == expected(PROMPTS, LIMITS)
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
    watch, requests = Watch(for_all()), make_requests(PROMPTS, LIMITS)
    (second,) = make_requests(PROMPTS[1:], LIMITS[1:], **other)
    requests[1] = dataclasses.replace(second, id=1)
    found = outputs(watch, requests)
    assert found[0] == expected(PROMPTS, LIMITS)[0]
    assert found[1] == outputs(alone(), requests[1:])[0]
    assert watch.seen == sorted(watch.seen)
    assert set(watch.seen) == {False, True}


def test_a_greedy_program_neither_draws_nor_filters():
    run = for_all()
    for name in ("generate", "generate_greedy"):
        text = run.program(name).as_text()
        parts = ("if_sampled", "if_filtered", "if_shaped", "if_logprobs")
        assert [part in text for part in parts] == [name == "generate"] * len(parts)
