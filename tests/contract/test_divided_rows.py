"""The contract of rows divided among sequences: whatever each verifies, plain decoding's output.

Chains and trees whose strategies state their confidence, in batches with mixed needs, with too few
pages for all slots, over buckets of slots and over replicas. What a strategy states is a matter of
test_strategy_contract.py; here is one of each kind.
"""

import functools
import itertools

import numpy as np
import pytest
from support import grammars
from support.engines import (
    change_often,
    check_plain,
    completions,
    divide_always,
    engine,
    make_requests,
    outcomes,
    plain_engine,
    random_prompts,
)
from support.forms import KINDS, Form
from support.models import drafter, takes

from dflash.config import registry
from dflash.drafters.base import Drafter
from dflash.inference.engine import Engine
from dflash.inference.request import RequestOutput, Tokens
from dflash.offline import decoding


def states_confidence(form: Form) -> bool:
    kind = registry.load(registry.DRAFTERS[form.name].implementation)
    states = form.tree or kind.has_confidence is not Drafter.has_confidence
    return states and takes(form.name, "block_size")


FORMS = [*filter(states_confidence, KINDS)]
PROMPTS, LIMITS = random_prompts([31, 30, 29, 28, 27, 5]), [32, 32, 31, 32, 32, 20]
ALONE = (1, 1, 1)


def make_engine(form: Form, *, mesh=ALONE) -> Engine:
    """Returns an engine whose sequences get in each other's way; see `test_drafter_contract`."""
    model = drafter(form.name, block_size=4, tree=form.tree, mesh=mesh)
    few = {"num_pages": 16 if mesh == ALONE else None, "partial_dispatches": mesh == ALONE}
    options = {"batch_size": 5 if mesh == ALONE else 4, "sync_every": 2, "max_length": 64} | few
    assert model.has_confidence
    return engine(model, mesh=mesh, adaptive_blocks=True, **options)


def mixed(run: Engine, temperature: float) -> tuple[list[RequestOutput], list]:
    """Outputs of requests of which every third has a grammar, log-probabilities, or nothing.

    Also returns the log-probabilities of each.
    """
    how = {"temperature": temperature, "seed": 3, "stop_ids": (grammars.END,)}
    asked = [
        {"grammar": grammars.regex("(a|1|tru){12,31}"), "presence_penalty": 1.0},
        {"logprobs": 3, "frequency_penalty": 0.6, "logit_bias": ((3, 1.0),)},
        {},
    ]
    events = list(decoding.decode(run, make_requests(PROMPTS, LIMITS, each=asked * 2, **how)))
    logprobs = [[] for _ in PROMPTS]
    for event in events:
        if isinstance(event, Tokens):
            logprobs[event.id] += event.logprobs
    return completions(events), logprobs


@functools.cache
def plain_mixed(temperature: float) -> tuple[list[RequestOutput], list]:
    return mixed(plain_engine(), temperature)


def check_mixed(run: Engine, temperature: float) -> list[RequestOutput]:
    """Asserts that outputs and log-probabilities are those of plain decoding; returns the first."""
    (done, mine), (wanted, plain) = mixed(run, temperature), plain_mixed(temperature)
    assert outcomes(done) == outcomes(wanted)
    assert [len(each) for each in mine] == [len(each) for each in plain]
    assert any(mine)
    for one, other in zip(itertools.chain(*mine), itertools.chain(*plain), strict=True):
        np.testing.assert_allclose(one.top_logprobs, other.top_logprobs, atol=1e-4)
        np.testing.assert_allclose(one.logprob, other.logprob, atol=1e-4)
        np.testing.assert_allclose(one.sampled_logprob, other.sampled_logprob, atol=1e-4)
    return done


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_output_is_that_of_plain_decoding(form):
    run, sizes = make_engine(form), []
    for way in (divide_always, change_often):
        way(run)
        for temperature in (0.0, 0.8):
            done = check_mixed(run, temperature)
            sizes.append({size for one in done for size in one.block_sizes})
            assert sum(one.preemptions for one in done) > 0, "nothing was interrupted"
    assert all(len(found) > 2 for found in sizes[:2]), "all sequences verify as many rows"
    assert any(1 in found for found in sizes[2:]), "nothing decoded plainly"
    # These have a program of their own.
    for way in (divide_always, change_often):
        way(run)
        check_plain(run, PROMPTS, LIMITS)


@pytest.mark.parametrize("form", [Form("dspark"), Form("dflash2", tree=True)], ids=str)
def test_replicas_divide_rows_of_their_own(form):
    run = make_engine(form, mesh=(2, 1, 2))
    divide_always(run)
    for temperature in (0.0, 0.8):
        how = {"temperature": temperature, "logprobs": 2, "presence_penalty": 1.5}
        done = check_plain(run, PROMPTS, LIMITS, **how)
        assert len({size for one in done for size in one.block_sizes}) > 2
