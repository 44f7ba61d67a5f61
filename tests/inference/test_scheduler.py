"""Tests of offline decoding: the order of events, pages, refusals, and the counts it reports."""

import dataclasses
import functools
import math

import numpy as np
import pytest
from support.engines import engine, expected, random_prompts
from support.models import ARCHITECTURE, drafter

from dflash import errors
from dflash.inference import scheduler
from dflash.inference.engine import Engine
from dflash.inference.pages import PagePool
from dflash.inference.scheduler import Completion, Request, Tokens

LENGTHS = [5, 1, 16, 9, 12, 3, 7]
LIMITS = [20, 1, 2, 32, 11, 1, 17]
STOP_IDS = (8, 2)


@functools.cache
def run(sync_every: int = 3) -> Engine:
    model = drafter("dflash", block_size=4)
    return engine(model, batch_size=3, sync_every=sync_every, max_length=48, stop_ids=STOP_IDS)


def requests(lengths=LENGTHS, limits=LIMITS) -> list[Request]:
    prompts = random_prompts(lengths)
    pairs = zip(prompts, limits, strict=True)
    return [Request(i, prompt, limit) for i, (prompt, limit) in enumerate(pairs)]


@pytest.fixture
def pools(monkeypatch):
    """Every pool that the scheduler makes; each checks what it is given back."""
    made = []

    class Checked(PagePool):
        spare = 0

        def __init__(self, num_shares, pages_per_share):
            pages_per_share -= self.spare
            super().__init__(num_shares, pages_per_share)
            self.size, self.held, self.refusals = pages_per_share - 1, [], 0
            made.append(self)

        def take(self, share, count):
            pages = super().take(share, count)
            if pages is None:
                self.refusals += 1
            else:
                self.held.append((share, pages))
            return pages

        def give_back(self, share, pages):
            self.held.remove((share, pages))
            super().give_back(share, pages)

    monkeypatch.setattr(scheduler, "PagePool", Checked)
    return made, Checked


def test_events_come_in_order_and_add_up(pools):
    open_requests: dict[int, list[int]] = {}
    done: dict[int, Completion] = {}
    for event in scheduler.decode(run(), requests()):
        assert event.index not in done, "an event after the completion"
        if isinstance(event, Tokens):
            assert event.ids, "an event without news"
            if event.index not in open_requests:
                assert len(event.ids) == 1, "the first token comes by itself, from the prefill"
            open_requests.setdefault(event.index, []).extend(event.ids)
        else:
            done[event.index] = event
    assert sorted(done) == list(range(len(LENGTHS)))
    # Requests begin in the order in which they came.
    assert list(open_requests) == sorted(open_requests)
    wanted = expected(random_prompts(LENGTHS), LIMITS, temperature=0.0, stop_ids=STOP_IDS)
    assert {reason for _, reason in wanted} == {"stop", "length"}
    for index, one in done.items():
        assert one.output_ids == tuple(open_requests[index])
        assert (one.output_ids, one.finish_reason) == wanted[index]
        assert sum(one.acceptance_lengths) == len(one.output_ids) - 1
        assert one.prefill_ms > 0
        assert one.decode_ms >= 0
    for pool in pools[0]:
        assert pool.held == []
        assert pool.num_free(0) == pool.size


def test_tau_is_the_mean_acceptance_length():
    (one,) = [e for e in scheduler.decode(run(), requests([5], [20])) if isinstance(e, Completion)]
    assert one.tau == np.mean(one.acceptance_lengths)
    assert math.isnan(dataclasses.replace(one, acceptance_lengths=()).tau)


def test_a_request_of_one_token_takes_no_cycle():
    events = list(scheduler.decode(run(), requests([5], [1])))
    assert [type(event) for event in events] == [Tokens, Completion]
    assert events[1].acceptance_lengths == ()
    assert events[1].decode_ms == 0


def test_no_requests_no_events():
    assert list(scheduler.decode(run(), [])) == []


def test_requests_wait_while_pages_are_short(pools):
    made, kind = pools
    layout = run().layout
    kind.spare = 2 * layout.pages_per_sequence  # what remains serves one long request at a time
    events = list(scheduler.decode(run(), requests()))
    done = {event.index: event for event in events if isinstance(event, Completion)}
    wanted = expected(random_prompts(LENGTHS), LIMITS, temperature=0.0, stop_ids=STOP_IDS)
    assert [(done[i].output_ids, done[i].finish_reason) for i in range(len(LENGTHS))] == wanted
    assert made[0].refusals > 0, "the pool was never short"
    assert made[0].held == []


def test_a_bad_request_is_refused_before_any_other_begins():
    bad = Request(9, (1,) * 48, 1)
    with pytest.raises(errors.InputError, match="prompt 9: 48 prompt tokens"):
        next(scheduler.decode(run(), [*requests(), bad]))


@pytest.mark.parametrize("taken", [1, 4, 9])
def test_a_run_may_be_broken_off(taken):
    """And the engine serves the next one."""
    events = scheduler.decode(run(), requests())
    for _ in range(taken):
        next(events)
    events.close()
    done = [e for e in scheduler.decode(run(), requests()[:3]) if isinstance(e, Completion)]
    wanted = expected(random_prompts(LENGTHS), LIMITS, temperature=0.0, stop_ids=STOP_IDS)[:3]
    assert [(e.output_ids, e.finish_reason) for e in sorted(done, key=lambda e: e.index)] == wanted


def test_acceptance_lengths_do_not_depend_on_the_dispatch_length():
    def lengths(engine_):
        done = [e for e in scheduler.decode(engine_, requests()) if isinstance(e, Completion)]
        return {one.index: one.acceptance_lengths for one in done}

    assert lengths(run(3)) == lengths(run(8))


@pytest.mark.parametrize(
    ("prompt", "limit", "message"),
    [
        ((), 1, r"prompt 4: empty; give at least one token"),
        ((0, 24, 30), 1, r"prompt 4: token id 24 is outside the vocabulary of 24"),
        ((0, -1), 1, r"prompt 4: token id -1 is outside the vocabulary of 24"),
        ((1,) * 40, 9, r"prompt 4: 40 prompt tokens \+ 9 new ones = 49, but the cache holds 48; "),
    ],
)
def test_requests_that_cannot_be_decoded(prompt, limit, message):
    with pytest.raises(errors.InputError, match=message):
        scheduler.check_request(Request(4, prompt, limit), 48, ARCHITECTURE.vocab_size)


def test_the_longest_request_that_fits():
    request = Request(0, (1,) * 40, 8)
    scheduler.check_request(request, 48, ARCHITECTURE.vocab_size)
    assert scheduler.max_length([request, Request(1, (1,), 9)]) == 48
    (done,) = [e for e in scheduler.decode(run(), [request]) if isinstance(e, Completion)]
    wanted = expected([request.prompt], [8], temperature=0.0, stop_ids=STOP_IDS)
    assert [(done.output_ids, done.finish_reason)] == wanted


def test_tokens_of_a_dispatch_are_plain_integers():
    for event in scheduler.decode(run(), requests([5], [9])):
        ids = event.ids if isinstance(event, Tokens) else event.output_ids
        assert all(type(token) is int and not isinstance(token, np.integer) for token in ids)
