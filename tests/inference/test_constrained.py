"""Sequences with grammars: their dispatches, their ends, and grammars that fail.

Random schemas are met in text/chat_formats/test_formats.py; drafts under grammars in the contract.
"""

import functools

import pytest
from support import grammars
from support.engines import (
    completions,
    decode,
    drain,
    make_requests,
    random_prompts,
    shared_engine,
)

from dflash import errors
from dflash.inference.request import Tokens
from dflash.inference.scheduler import Scheduler
from dflash.offline import decoding
from dflash.text.grammar import Matcher

CHAIN = functools.partial(shared_engine, "dflash")


def matching(pattern: str) -> dict:
    """The options of a request for an output that a regular expression matches."""
    return {"grammar": grammars.regex(pattern), "stop_ids": (grammars.END,)}


def test_others_keep_their_dispatch():
    """A sequence with a grammar takes one cycle of a dispatch, its neighbor all of them."""
    scheduler = Scheduler(shared_engine("none"))
    each = [matching("a{20,40}"), {"stop_ids": (grammars.END,)}]
    for request in make_requests(random_prompts([5, 5]), 30, each=each):
        scheduler.submit(request)
    sizes: dict[int, set[int]] = {0: set(), 1: set()}
    while not scheduler.idle:
        for event in scheduler.step():
            if isinstance(event, Tokens) and event.acceptance_lengths:
                sizes[event.id].add(len(event.ids))
    assert sizes[0] == {1}
    assert max(sizes[1]) == 2


def test_a_cut_output_says_so():
    (one,) = decode(CHAIN(), random_prompts([4]), 5, **matching("a{9}"))
    assert one.finish_reason == "length"
    assert grammars.text_of(one.output_ids) == "aaaaa"


def test_an_output_that_cannot_go_on_is_an_error():
    """The grammar wants a letter that no token writes."""
    one, other = decode(CHAIN(), random_prompts([4, 6]), 9, each=[matching("aaxb"), {}])
    assert one.finish_reason == "error"
    assert grammars.text_of(one.output_ids) == "aa"
    assert len(other.output_ids) == 9


@pytest.mark.parametrize("step", ["fill", "advance"])
def test_a_grammar_that_raises_ends_its_own_sequence(step, monkeypatch):
    """An exception of the matcher becomes the error of its request, and the others go on."""
    prompts = random_prompts([5, 7, 3])
    free = decode(CHAIN(), prompts, 12)
    one = Scheduler(CHAIN())
    given = make_requests(prompts, 12, each=[{}, matching("[a-z]{8,}"), {}])
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
