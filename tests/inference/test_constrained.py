"""Outputs that match grammars: always, whatever the schema, the drafts, the pages and the mesh."""

import dataclasses
import functools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import grammars
from support.engines import (
    completions,
    decode_all,
    drain,
    engine,
    make_requests,
    random_prompts,
    shared_engine,
)
from support.models import drafter

from dflash import errors
from dflash.inference.request import RequestOutput, Tokens
from dflash.inference.scheduler import Scheduler
from dflash.offline import decoding
from dflash.text.grammar import Grammar, Matcher

few = settings(max_examples=8)


@functools.cache
def run(form: str):
    model = None if form == "none" else drafter("dflash", block_size=5, tree=form == "tree")
    return engine(model, batch_size=4, sync_every=4, max_length=128)


CHAIN = functools.partial(shared_engine, "dflash")


def decode(run, prompts, limits, asked, **how) -> list[RequestOutput]:
    """Completions of prompts with grammars, or None."""
    requests = make_requests(prompts, limits, stop_ids=(grammars.END,), **how)
    requests = [
        dataclasses.replace(request, grammar=grammar)
        for request, grammar in zip(requests, asked, strict=True)
    ]
    return decode_all(run, requests)


# --- every schema --------------------------------------------------------------------------------

names = st.sampled_from(["a", "b", "1", "ab"])
leaves = st.one_of(
    st.just({"type": "integer"}),
    st.builds(
        lambda low: {"type": "integer", "minimum": low, "maximum": low + 12}, st.integers(0, 9)
    ),
    st.just({"type": "null"}),
    st.builds(lambda most: {"type": "string", "maxLength": most}, st.integers(0, 5)),
    st.builds(
        lambda found: {"enum": found}, st.lists(names | st.just(12), min_size=1, unique=True)
    ),
    st.just({"const": {"a": [1, 2]}}),
)
schemas = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.builds(
            lambda items, least: {
                "type": "array", "items": items, "minItems": least, "maxItems": least + 2
            },
            inner, st.integers(0, 2),
        ),
        st.builds(
            lambda properties: json.loads(grammars.flat_object(**properties)),
            st.dictionaries(names, inner, max_size=3),
        ),
        st.builds(lambda one, other: {"anyOf": [one, other]}, inner, inner),
    ),
    max_leaves=4,
)  # fmt: skip


def conforms(value, schema) -> bool:
    """Whether a value is what one of the schemas above describes."""
    if "anyOf" in schema:
        return any(conforms(value, one) for one in schema["anyOf"])
    if "enum" in schema:
        return value in schema["enum"]
    if "const" in schema:
        return value == schema["const"]
    if schema["type"] == "array":
        fits = isinstance(value, list) and schema["minItems"] <= len(value) <= schema["maxItems"]
        return fits and all(conforms(item, schema["items"]) for item in value)
    if schema["type"] == "object":
        fits = isinstance(value, dict) and value.keys() == schema["properties"].keys()
        return fits and all(conforms(value[key], schema["properties"][key]) for key in value)
    if schema["type"] == "string":
        return isinstance(value, str) and len(value) <= schema["maxLength"]
    if schema["type"] == "null":
        return value is None
    low, high = schema.get("minimum", -np.inf), schema.get("maximum", np.inf)
    return type(value) is int and low <= value <= high


@few
@given(st.lists(schemas, min_size=4, max_size=4), st.integers(0, 2**31))
def test_every_schema_is_met(found, seed):
    """By a target that knows nothing of JSON, at a high temperature."""
    asked = [Grammar("json_schema", json.dumps(one), grammars.vocabulary()) for one in found]
    prompts = random_prompts([3, 9, 5, 12], seed)
    how = {"temperature": 2.0, "seed": seed}
    done = decode(run("chain"), prompts, 100, asked, **how)
    for one, schema in zip(done, found, strict=True):
        if one.finish_reason == "stop":
            text = grammars.text_of(one.output_ids)
            assert conforms(json.loads(text), schema), (text, schema)
        assert one.finish_reason in ("stop", "length")
    plain = decode(run("none"), prompts, 100, asked, **how)
    assert [one.output_ids for one in plain] == [one.output_ids for one in done]


# --- the loop ------------------------------------------------------------------------------------


def test_others_keep_their_dispatch():
    """A sequence with a grammar takes one cycle of a dispatch, its neighbor all of them."""
    scheduler = Scheduler(shared_engine("none"))
    requests = make_requests(random_prompts([5, 5]), 30, stop_ids=(grammars.END,))
    requests[0] = dataclasses.replace(requests[0], grammar=grammars.regex("a{20,40}"))
    for request in requests:
        scheduler.submit(request)
    sizes: dict[int, set[int]] = {0: set(), 1: set()}
    while not scheduler.idle:
        for event in scheduler.step():
            if isinstance(event, Tokens) and event.acceptance_lengths:
                sizes[event.id].add(len(event.ids))
    assert sizes[0] == {1}
    assert max(sizes[1]) == 2


def test_a_cut_output_says_so():
    (one,) = decode(CHAIN(), random_prompts([4]), 5, [grammars.regex("a{9}")])
    assert one.finish_reason == "length"
    assert grammars.text_of(one.output_ids) == "aaaaa"


def test_an_output_that_cannot_go_on_is_an_error():
    """The grammar wants a letter that no token writes."""
    (one, other) = decode(CHAIN(), random_prompts([4, 6]), 9, [grammars.regex("aaxb"), None])
    assert one.finish_reason == "error"
    assert grammars.text_of(one.output_ids) == "aa"
    assert len(other.output_ids) == 9


@pytest.mark.parametrize("step", ["fill", "advance"])
def test_a_grammar_that_raises_ends_its_own_sequence(step, monkeypatch):
    """An exception of the matcher becomes the error of its request, and the others go on."""
    prompts = random_prompts([5, 7, 3])
    free = decode(CHAIN(), prompts, 12, [None] * 3)
    one = Scheduler(CHAIN())
    given = make_requests(prompts, 12, stop_ids=(grammars.END,))
    given[1] = dataclasses.replace(given[1], grammar=grammars.regex("[a-z]{8,}"))
    for request in given:
        one.submit(request)

    def failing(self, *args, **options):
        raise RuntimeError("the lexer is gone")

    monkeypatch.setattr(Matcher, step, failing)
    done = completions(drain(one))
    assert [done[i].output_ids for i in (0, 2)] == [free[i].output_ids for i in (0, 2)]
    assert done[1].finish_reason == "error"
    message = "prompt 1: its grammar cannot be followed: the lexer is gone"
    assert str(done[1].error) == message
    with pytest.raises(errors.InputError, match=message):
        list(decoding.decode(CHAIN(), given))
