"""Tests of the scheduler under load: long prompts, random arrivals and cancellations, few pages."""

import collections
import dataclasses
import functools
import itertools

import numpy as np
import pytest
from support.engines import (
    completions,
    drain,
    engine,
    expected,
    make_requests,
    outcomes,
    plain_engine,
    random_prompts,
    shared_engine,
    watch_dispatches,
    without_prefix_cache,
)
from support.models import drafter

from dflash.inference.cycle.choice import PLAIN
from dflash.inference.engine import Engine
from dflash.inference.prefix_cache import page_keys
from dflash.inference.request import CacheGroup, Request, Tokens
from dflash.inference.scheduler import Scheduler
from dflash.inference.timing import only

CHUNK = 16


def run() -> Engine:
    return without_prefix_cache(shared_engine("dflash"))


@functools.cache
def run_of(**options) -> Engine:
    """An engine of small pages with a prefix cache."""
    sizes = {"batch_size": 3, "sync_every": 2, "max_length": 96, "page_size": 8}
    found = engine(drafter("dflash", block_size=4), **sizes, prefix_cache=True, **options)
    found.program("generate")  # As in `shared_engine`.
    return found


def few() -> Engine:
    """An engine with too few pages for all slots."""
    return run_of(num_pages=15)


def watch_chunks(base: Engine) -> tuple[Engine, list]:
    """Returns an engine, and what its device is given: rows of prefill, or "cycles"."""
    twin, given = watch_dispatches(base, lambda *_, **__: "cycles")

    def prefill(state, lanes, pieces):
        given.append(sum(len(piece.tokens) for piece in pieces.values()))
        return base.prefill(state, lanes, pieces)

    twin.prefill = prefill
    return twin, given


def heard(events) -> list[int]:
    return [event.id for event in events if isinstance(event, Tokens)]


def outputs(events) -> dict[int, tuple[tuple[int, ...], str]]:
    done = completions(events)
    return dict(zip((one.id for one in done), outcomes(done), strict=True))


def check_pages(one: Scheduler) -> None:
    """Every page is counted as often as sequences hold it, and no count is left over."""
    held = collections.Counter(page for sequence in one._batch.requests for page in sequence.pages)
    (share,) = one._batch.pool._replicas
    assert share.holders == held
    stats = one.stats()
    assert stats.pages_used == len(held)
    assert len(share.free) + stats.pages_cached + stats.pages_used == stats.pages_total
    for sequence in one._batch.running.values():
        private = sequence.pages[sequence.published :]
        assert all(held[page] == 1 for page in private), "two sequences write one page"


# --- prompts beside streams ---------------------------------------------------------------------


def test_a_long_prompt_holds_nobody_up_for_more_than_a_chunk_and_a_dispatch():
    spied, given = watch_chunks(run())
    one = Scheduler(spied)
    prompts, limits = random_prompts([5, 9, 80]), [32, 32, 4]
    first, second, late = make_requests(prompts, limits, temperature=0.8)
    one.submit(first)
    one.submit(second)
    events = one.step() + one.step()
    given.clear()
    one.submit(late)
    since = []
    while 2 not in heard(since):
        since += one.step()
    chunks = [i for i, rows in enumerate(given) if rows != "cycles"]
    assert [given[i] for i in chunks] == [CHUNK] * 5
    assert all(b - a > 1 for a, b in itertools.pairwise(chunks)), "two without cycles"
    # Each of these dispatches brought both streams tokens.
    for stream in (0, 1):
        assert heard(since).count(stream) >= 4
    events += since + drain(one)
    wanted = expected(prompts, limits, temperature=0.8)
    assert outputs(events) == dict(enumerate(wanted))


def test_while_nothing_is_decoded_chunks_follow_one_another():
    spied, given = watch_chunks(run())
    one = Scheduler(spied)
    one.submit(make_requests(random_prompts([80]), 2)[0])
    steps = 0
    while not (events := one.step()):
        steps += 1
    assert heard(events) == [0], "the first token comes by itself"
    assert steps == 4
    assert given == [CHUNK] * 5 + ["cycles"]


def test_the_first_token_does_not_wait_for_cycles():
    one = Scheduler(run())
    one.submit(make_requests(random_prompts([9]), 20)[0])
    (event,) = one.step()
    assert (event.id, len(event.ids)) == (0, 1)
    assert one.stats().dispatches == 0
    assert len(one._pending) == 1, "the cycles behind it run already"


@pytest.mark.parametrize("beside_a_stream", [False, True])
def test_a_request_is_cancelled_while_it_is_prefilled(beside_a_stream):
    one = Scheduler(run())
    stream, long, late = make_requests(random_prompts([5, 80, 7]), [32, 5, 6])
    if beside_a_stream:
        one.submit(stream)
        one.step()
    one.submit(long)
    one.step()
    one.step()
    assert one.stats().prefilling == 1
    before = one.stats().pages_used
    assert one.cancel(long.id)
    assert (one.stats().prefilling, one.stats().pages_used < before) == (0, True)
    check_pages(one)
    events = drain(one, [late])
    assert long.id not in heard(events)
    wanted = expected(random_prompts([5, 80, 7]), [32, 5, 6], temperature=0.0)
    assert outputs(events)[late.id] == wanted[late.id]
    assert one.stats().pages_used == 0


def test_statistics():
    one = Scheduler(run())
    for request in make_requests(random_prompts([5, 40, 3, 2]), 9):
        one.submit(request)
    assert one.stats().waiting == 4
    one.step()
    stats = one.stats()
    assert (stats.waiting, stats.prefilling, stats.running) == (2, 1, 1)
    assert 0 < stats.pages_used < stats.pages_total
    done = completions(drain(one))
    stats = one.stats()
    assert (stats.waiting, stats.prefilling, stats.running, stats.pages_used) == (0, 0, 0, 0)
    assert (stats.prefill_tokens, stats.prefill_chunks) == (50, 6)
    assert stats.cycles >= max(len(one.acceptance_lengths) for one in done)
    assert stats.dispatches * 2 >= stats.cycles
    assert [d.queued_ms for d in done] == sorted(d.queued_ms for d in done)


# --- anything may happen ------------------------------------------------------------------------


def similar_prompts(rng: np.random.Generator, count: int) -> list[tuple[int, ...]]:
    """Prompts of 1 to 60 tokens, most of which begin as others do."""
    stems = random_prompts([60, 60], seed=1)
    prompts = []
    for _ in range(count):
        kept, rest = rng.integers(0, 45), rng.integers(1, 16)
        tail = rng.integers(0, 24, rest).tolist()
        prompts.append((*stems[rng.integers(2)][:kept], *tail))
    return prompts


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_soak(temperature):
    """Random arrivals and cancellations with too few pages: no wrong token, no page lost."""
    assert few().layout.overcommits
    rng = np.random.default_rng(8)
    prompts = similar_prompts(rng, 80)
    limits = rng.integers(1, 33, len(prompts)).tolist()
    how = {"temperature": temperature, "seed": 5, "stop_ids": (7,)}
    wanted = expected(prompts, limits, **how)
    waiting = collections.deque(make_requests(prompts, limits, **how))
    one, events, cancelled, submitted = Scheduler(few()), [], set(), []
    while waiting or not one.idle:
        for _ in range(rng.integers(0, 4)):
            if waiting:
                submitted.append(waiting[0].id)
                one.submit(waiting.popleft())
        if submitted and rng.random() < 0.1:
            id = int(rng.choice(submitted[-6:]))
            if one.cancel(id):
                cancelled.add(id)
        if rng.random() < 0.02:
            one.flush_prefix_cache()
        events += one.step()
        check_pages(one)
    done = outputs(events)
    assert sorted(done) == sorted(set(range(len(prompts))) - cancelled)
    assert all(done[id] == wanted[id] for id in done)
    said = collections.defaultdict(tuple)
    for event in events:
        if isinstance(event, Tokens):
            said[event.id] += event.ids
    assert all(wanted[id][0][: len(ids)] == ids for id, ids in said.items())
    stats = one.stats()
    assert (stats.pages_used, stats.waiting, stats.prefilling, stats.running) == (0, 0, 0, 0)
    assert not bool(one._batch.state.active.any())
    assert not bool(one._batch.state.cache.page_table.any())
    assert stats.preemptions > 0, "the pool was never dry"
    assert stats.prefix_hits_tokens > 0
    assert len(cancelled) > 3


@pytest.mark.parametrize("waiting", [0, 1])
def test_a_dispatch_ends_early_only_for_requests_that_wait(waiting):
    """The first sequence ends after one cycle, and would leave its slot idle for seven."""
    watched, cycles = watch_dispatches(plain_engine(), lambda report, *_, **__: int(report.cycles))
    slots = watched.layout.batch_size
    prompts, limits = random_prompts([5] * (slots + waiting)), [2, *[14] * (slots + waiting - 1)]
    events = drain(Scheduler(watched, fill_at_once=True), make_requests(prompts, limits))
    assert outcomes(completions(events)) == expected(prompts, limits)
    assert cycles == ([1, 8, 5] if waiting else [8, 5])


def test_pages_whose_rows_the_drafter_may_lack_are_not_published():
    """Cycles that draft nothing put their rows aside, and the last ones are never observed."""
    chosen = run_of(adaptive_blocks=True)
    chosen.cycle_seconds = tuple(only(PLAIN, len(chosen.rules.choices)).tolist())
    one = Scheduler(chosen)
    (prompt,) = random_prompts([20])
    (request,) = make_requests([prompt], 32)
    ((said, reason),) = outcomes(completions(drain(one, [request])))
    assert (said, reason) == expected([prompt], [32])[0]
    again = dataclasses.replace(request, prompt=(*prompt, *said, 1), max_new_tokens=2)
    (done,) = completions(drain(one, [again]))
    assert done.cached_tokens == 16, "of 48 that the target has"


def test_pages_are_shared_by_requests_of_one_salt_alone():
    one = Scheduler(shared_engine("dflash"))
    (prompt,) = random_prompts([33])
    salts = ["", "a", "", "a", "b", "ab"]
    cached = []
    for id, salt in enumerate(salts):
        events = drain(one, [Request(id, prompt, 4, cache_salt=salt)])
        cached += [done.cached_tokens for done in completions(events)]
    assert cached == [0, 0, 32, 32, 0, 0]


def test_no_salt_gives_the_keys_of_another_sequence():
    tokens = list(range(64))
    groups = [CacheGroup(salt, adapter) for salt in ("", "a", "b", "ab") for adapter in (0, 1, 2)]
    salted = {key for group in groups[1:] for key in page_keys(tokens, 8, group=group)}
    assert len(salted) == 11 * 8
    plain = list(page_keys(tokens, 8))
    assert not salted.intersection(plain)
    # A salt that spells the key of a page does not continue its sequence.
    spelled = plain[0].decode("latin-1")
    assert not set(plain).intersection(page_keys(tokens[8:], 8, group=CacheGroup(spelled)))
