"""Tests of the scheduler: order of events, pages, cancellation, preemption, and its counts."""

import dataclasses
import functools
import math

import jax
import numpy as np
import pytest
from support.engines import (
    completions,
    count_compilations,
    drain,
    engine,
    expected,
    make_requests,
    outcomes,
    random_prompts,
    retargeted,
    shared_engine,
    without_prefix_cache,
)
from support.foreign_trees import hf_tree
from support.models import ARCHITECTURE, drafter, random_module

from dflash import errors
from dflash.inference import batch, scheduler
from dflash.inference.engine import Engine
from dflash.inference.pages import PagePool
from dflash.inference.request import MAX_BIASED, Request, RequestOutput, RequestSampling, Tokens
from dflash.inference.scheduler import Scheduler
from dflash.models.dense import Qwen3
from dflash.offline.decoding import decode

LENGTHS = [5, 1, 16, 9, 12, 3, 7]
LIMITS = [20, 1, 2, 32, 11, 1, 17]
STOP_IDS = (8, 2)
# Prompts that grow to four pages each with 32 tokens more: three of five fit at once.
GROWING = [31, 30, 29, 28, 25]


def run() -> Engine:
    return without_prefix_cache(shared_engine("dflash"))


@functools.cache
def run_of(num_pages: int | None = None, **options) -> Engine:
    model = drafter("dflash", block_size=4)
    return engine(model, batch_size=3, max_length=48, num_pages=num_pages, **options)


def requests(lengths=LENGTHS, limits=LIMITS) -> list[Request]:
    return make_requests(random_prompts(lengths), limits, stop_ids=STOP_IDS)


def wanted():
    return expected(random_prompts(LENGTHS), LIMITS, stop_ids=STOP_IDS)


@pytest.fixture
def pools(monkeypatch):
    """Every pool that a scheduler makes; each checks what it is given back."""
    made = []

    class Checked(PagePool):
        def __init__(self, num_replicas, pages_per_replica):
            super().__init__(num_replicas, pages_per_replica)
            self.size, self.held, self.refusals = pages_per_replica - 1, set(), 0
            made.append(self)

        def take(self, share, count):
            pages = super().take(share, count)
            if pages is None:
                self.refusals += 1
            else:
                assert not self.held & set(pages), "a page with two owners"
                self.held |= set(pages)
            return pages

        def give_back(self, share, pages):
            assert self.held >= set(pages)
            self.held -= set(pages)
            super().give_back(share, pages)

    monkeypatch.setattr(batch, "PagePool", Checked)
    return made


def test_events_come_in_order_and_add_up(pools):
    open_requests: dict[int, list[int]] = {}
    done: dict[int, RequestOutput] = {}
    for event in decode(run(), requests()):
        assert event.id not in done, "an event after the completion"
        if isinstance(event, Tokens):
            assert event.ids, "an event without news"
            if event.id not in open_requests:
                assert len(event.ids) == 1, "the first token comes by itself, from the prefill"
            open_requests.setdefault(event.id, []).extend(event.ids)
        else:
            done[event.id] = event
    assert sorted(done) == list(range(len(LENGTHS)))
    # Requests begin in the order in which they came.
    assert list(open_requests) == sorted(open_requests)
    assert {reason for _, reason in wanted()} == {"stop", "length"}
    assert outcomes(done[i] for i in sorted(done)) == wanted()
    for index, one in done.items():
        assert one.output_ids == tuple(open_requests[index])
        assert sum(one.acceptance_lengths) == len(one.output_ids) - 1
        assert one.prefill_ms > 0
        assert one.decode_ms >= 0
        assert one.preemptions == 0
    for pool in pools:
        assert pool.held == set()
        assert pool.num_free(0) == pool.size


def test_a_request_of_one_token_takes_no_cycle():
    events = list(decode(run(), requests([5], [1])))
    assert [type(event) for event in events] == [Tokens, RequestOutput]
    assert events[1].acceptance_lengths == ()
    assert events[1].decode_ms == 0


def test_requests_come_in_while_others_run():
    one, (first, second, third, *_) = Scheduler(run()), requests()
    one.submit(first)
    events = one.step()
    assert {event.id for event in events} == {0}
    one.submit(third)
    events += one.step()
    events += drain(one, [second])
    assert outcomes(completions(events)) == wanted()[:3]
    order = [event.id for event in events if isinstance(event, Tokens)]
    assert order.index(2) < order.index(1), "in the order in which they were submitted"


def test_an_id_in_flight_is_refused_and_may_come_again_later():
    one, (request, *_) = Scheduler(run()), requests([5], [9])
    one.submit(request)
    with pytest.raises(ValueError, match="request 0 is in flight already"):
        one.submit(request)
    first = drain(one)
    assert outcomes(completions(drain(one, [request]))) == outcomes(completions(first))


# --- cancellation -------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_cancelled_request_frees_its_pages_and_is_never_heard_of_again(pools, steps):
    one = Scheduler(run())
    for request in requests():
        one.submit(request)
    events = [event for _ in range(steps) for event in one.step()]
    assert not any(isinstance(event, RequestOutput) and event.id == 3 for event in events)
    held = len(pools[0].held)
    running = any(event.id == 3 for event in events)
    assert one.cancel(3)
    assert (len(pools[0].held) < held) == running
    assert not one.cancel(3), "it is gone"
    assert not one.cancel(99)
    rest = drain(one)
    assert not any(event.id == 3 for event in rest)
    done = completions((*events, *rest))
    assert outcomes(done) == [w for i, w in enumerate(wanted()) if i != 3]
    assert pools[0].held == set()


# --- pages --------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_sequences_grow_into_pages_and_give_way_to_older_ones(pools, temperature):
    assert run().layout.overcommits
    prompts, limits = random_prompts(GROWING), [32, 32, 31, 30, 28]
    how = {"temperature": temperature}
    events = drain(Scheduler(run()), make_requests(prompts, limits, **how))
    done = completions(events)
    assert outcomes(done) == expected(prompts, limits, **how)
    assert max(d.preemptions for d in done) == 1, "it comes back when another has ended"
    assert done[0].preemptions == 0, "the oldest sequence never waits"
    assert pools[0].held == set()
    for d in done:
        said = [token for e in events if isinstance(e, Tokens) and e.id == d.id for token in e.ids]
        assert tuple(said) == d.output_ids, "nothing is said twice"
        assert sum(d.acceptance_lengths) == len(d.output_ids) - 1


def test_coming_back_compiles_nothing():
    """A preempted sequence is a longer prompt than any; its bucket is known beforehand."""
    prompts = random_prompts(GROWING)
    run().compile(map(len, prompts))
    with count_compilations() as compilations:
        done = completions(decode(run(), make_requests(prompts, 32)))
    assert sum(one.preemptions for one in done) > 0
    assert compilations == []


def test_a_preempted_sequence_comes_back_before_later_requests_begin():
    events = drain(Scheduler(run()), make_requests(random_prompts([*GROWING, 12]), 32))
    preempted = next(d.id for d in completions(events) if d.preemptions > 0)
    heard = [event.id for event in events if isinstance(event, Tokens)]
    later = heard[heard.index(preempted + 1) + 1 :]
    # A dispatch's tokens come in the order in which sequences entered.
    assert next(id for id in later if id in (preempted, preempted + 1)) == preempted


def test_a_pool_that_is_large_enough_changes_nothing():
    """And sequences get all their pages at once."""
    most = run_of(10**6)
    assert not most.layout.overcommits
    assert most.layout.pages_per_replica == run_of().layout.pages_per_replica
    assert "set_pages" not in {kind for kind, *_ in most.program_names([5])}


def test_a_pool_too_small_for_one_sequence_is_refused():
    with pytest.raises(errors.ConfigError, match=r"decode.num_pages: 3 is 3 for each of 1 .* at"):
        engine(drafter("dflash", block_size=4), max_length=48, num_pages=3)


# --- clocks -------------------------------------------------------------------------------------


class Clock:
    """The scheduler's clock, which stands still but while something is waited for."""

    def __init__(self):
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


class Slow:
    """An engine on a device that takes a known time for a chunk and for a dispatch of cycles.

    It takes one after the other, and gives results when it is done.
    """

    def __init__(self, inner: Engine, clock: Clock, *, prefill_s=0.0, generate_s=0.0):
        self._inner, self._clock = inner, clock
        self._prefill_s, self._generate_s = prefill_s, generate_s
        self._free_at = 0.0

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def _later(self, array, seconds):
        self._free_at = max(self._free_at, self._clock.now) + seconds
        return Later(array, self._free_at, self._clock)

    def prefill(self, *args):
        state, lanes, anchors, logprobs = self._inner.prefill(*args)
        return state, lanes, self._later(anchors, self._prefill_s), logprobs

    def insert(self, state, lanes, anchors, *args, **how):
        return self._inner.insert(state, lanes, anchors.array, *args, **how)

    def generate(self, state, *bucket, **how):
        state, report = self._inner.generate(state, *bucket, **how)
        cycles = self._later(report.cycles, self._generate_s)
        return state, dataclasses.replace(report, cycles=cycles)


@dataclasses.dataclass
class Later:
    """An array that can be read from a point in time on."""

    array: jax.Array
    ready_at: float
    clock: Clock

    def __array__(self, *args, **options):
        self.clock.now = max(self.clock.now, self.ready_at)
        return np.asarray(self.array)


@pytest.fixture
def clock(monkeypatch):
    """One that the test sets: how long this machine takes for the rest does not matter."""
    made = Clock()
    monkeypatch.setattr(scheduler, "time", made)
    return made


def test_a_prefill_counts_as_prefill_and_not_as_decoding(clock):
    (one,) = completions(decode(Slow(run(), clock, prefill_s=0.3), requests([5], [3])))
    assert one.prefill_ms == pytest.approx(300)
    assert one.decode_ms == one.decode_clock_s == 0


def test_dispatches_count_as_decoding_and_a_share_of_the_last_one(clock):
    """A sequence ends with the cycle that ended it, not with its dispatch."""
    slow = Slow(run(), clock, generate_s=0.4)
    short, long = completions(decode(slow, make_requests(random_prompts([5, 9]), [2, 32])))
    assert len(short.acceptance_lengths) == 1
    assert short.decode_ms == pytest.approx(400 / 2), "one cycle of two"
    dispatches = math.ceil(len(long.acceptance_lengths) / 2)
    assert dispatches > 2
    assert long.decode_ms == pytest.approx(400 * dispatches), "the last ends when all are done"
    assert long.decode_clock_s == pytest.approx(0.4 * dispatches)
    assert short.decode_clock_s == pytest.approx(0.4)
    assert long.finished_at - short.finished_at == pytest.approx(0.4 * (dispatches - 1 / 2))


# --- requests -----------------------------------------------------------------------------------


def test_a_bad_request_is_refused_before_any_other_begins():
    bad = Request(9, (1,) * 96, 1)
    with pytest.raises(errors.InputError, match="prompt 9: 96 prompt tokens"):
        next(decode(run(), [*requests(), bad]))


@pytest.mark.parametrize("taken", [1, 4, 9])
def test_decoding_may_be_broken_off(taken):
    """And the engine serves the next run."""
    events = decode(run(), requests())
    for _ in range(taken):
        next(events)
    events.close()
    assert outcomes(completions(decode(run(), requests()[:3]))) == wanted()[:3]


GOOD = Request(4, (1, 2), 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": ()}, r"prompt 4: empty; give at least one token"),
        ({"prompt": (0, 24, 30)}, r"prompt 4: token id 24 is outside the vocabulary of 24"),
        ({"prompt": (0, -1)}, r"prompt 4: token id -1 is outside the vocabulary of 24"),
        (
            {"prompt": (1,) * 72, "max_new_tokens": 25},
            r"prompt 4: 72 prompt tokens \+ 25 new ones = 97, but the cache holds 96; ",
        ),
        ({"max_new_tokens": 0}, r"prompt 4: max_new_tokens: 0, expected 1 or more"),
        ({"stop_ids": (3, 24)}, r"prompt 4: stop id 24 is outside the vocabulary of 24"),
        ({"stop_ids": tuple(range(9))}, r"prompt 4: 9 stop ids, but the engine was built .* 8"),
        ({"temperature": -0.1}, r"prompt 4: temperature: -0.1, expected a number of 0 or more"),
        ({"temperature": math.nan}, r"prompt 4: temperature: nan, expected"),
        ({"temperature": math.inf}, r"prompt 4: temperature: inf, expected"),
        ({"temperature": 1e39}, r"prompt 4: temperature: 1e\+39, expected .* 0 to 3.40282e\+38"),
        ({"top_k": 2**31}, r"prompt 4: top_k: 2147483648, expected 0 to 2147483647"),
        ({"top_p": 1.1}, r"prompt 4: top_p: 1.1, expected a number from 0 to 1"),
        ({"seed": 2**63}, r"prompt 4: seed: 9223372036854775808, expected -9223372036854775808 to"),
        ({"sequence": -1}, r"prompt 4: sequence: -1, expected 0 to 2147483647"),
        ({"min_p": 1.5}, "prompt 4: min_p: 1.5, expected a number from 0 to 1"),
        ({"min_p": math.nan}, "prompt 4: min_p: nan, expected a number from 0 to 1"),
        ({"presence_penalty": 2.5}, "4: presence_penalty: 2.5, expected a number from -2 to 2"),
        ({"frequency_penalty": -3}, "4: frequency_penalty: -3, expected a number from -2 to 2"),
        ({"repetition_penalty": 0.0}, "4: repetition_penalty: 0.0, expected .* from 0.01 to"),
        ({"logit_bias": ((3, 101.0),)}, "4: logit_bias: 101.0 of token 3, expected a number from"),
        ({"logit_bias": ((3, math.nan),)}, "4: logit_bias: nan of token 3"),
        ({"logit_bias": ((3, 1.0), (3, 2.0))}, "4: logit_bias: token 3 is given twice"),
        ({"logit_bias": ((99, 1.0),)}, "4: logit_bias: token 99 is outside the vocabulary of 24"),
        ({"logit_bias": ((-1, 1.0),)}, "4: logit_bias: token -1 is outside the vocabulary of 24"),
        (
            {"logit_bias": tuple((i % 24, 1.0) for i in range(MAX_BIASED + 1))},
            "prompt 4: logit_bias: 301 tokens, expected at most 300",
        ),
        ({"min_new_tokens": 6}, "4: min_new_tokens: 6, expected 0 to max_new_tokens, which is 1"),
        ({"min_new_tokens": -1}, "prompt 4: min_new_tokens: -1, expected 0 to max_new_tokens"),
        ({"logprobs": 21}, "prompt 4: logprobs: 21, expected 0 to 20"),
        ({"logprobs": -1}, "prompt 4: logprobs: -1, expected 0 to 20"),
        ({"grammar": object()}, "4: an output that matches a grammar needs a stop token"),
    ],
)
def test_requests_that_cannot_be_decoded(changes, message):
    names = {field.name for field in dataclasses.fields(RequestSampling)}
    sampling = RequestSampling(**{key: changes[key] for key in names & set(changes)})
    rest = {key: value for key, value in changes.items() if key not in names}
    with pytest.raises(errors.InputError, match=message):
        run().check(dataclasses.replace(GOOD, sampling=sampling, **rest))


def test_a_pause_lets_admitted_requests_finish():
    one = Scheduler(run())
    for request in requests():
        one.submit(request)
    events = one.step()
    one.paused = True
    while not one.settled:
        events += one.step()
    assert one.stats().waiting == len(LENGTHS) - len(completions(events)) > 0
    assert one.step() == []
    one.paused = False
    assert outcomes(completions(events + drain(one))) == wanted()


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_after_an_update_requests_go_on_with_the_new_weights(temperature):
    """They keep what was reported; nothing of the old weights' caches is left."""
    how = {"temperature": temperature, "seed": 4}
    (prompt, *_), limit = random_prompts([24, 5]), 24
    old, new = (random_module(Qwen3, ARCHITECTURE, seed=seed) for seed in (0, 1))
    base = without_prefix_cache(retargeted(shared_engine("none"), old))
    one = Scheduler(base)
    for request in make_requests([prompt, prompt], limit, **how):
        one.submit(request)
    events = one.step() + one.step() + one.step()
    reported = {i: [t for e in events if e.id == i for t in e.ids] for i in (0, 1)}
    assert reported[0]
    assert not completions(events)
    base.update_weights(hf_tree(new))
    one.restart()
    for done in completions(drain(one)):
        kept = tuple(reported[done.id])
        begun = make_requests([prompt + kept], limit - len(kept), first_index=done.id, **how)
        (rest,) = completions(decode(base, begun))
        assert done.output_ids == kept + rest.output_ids
