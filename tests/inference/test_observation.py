"""Tests of requests that the drafter does not observe."""

import dataclasses
import functools

import numpy as np
import pytest
from support.engines import decode, engine, expected, make_requests, random_prompts
from support.models import drafter

from dflash.inference import observation
from dflash.inference.batch import Batch
from dflash.inference.cycle import adaptive, block_choice
from dflash.inference.engine import Engine
from dflash.inference.observation import PERIOD, Observation, resumes
from dflash.inference.request import RequestOutput
from dflash.inference.scheduler import Scheduler

PROMPTS = random_prompts([3, 16, 9, 17, 5, 2, 8, 4, 21, 6])
LIMITS = [20, 9, 1, 18, 2, 23, 12, 7, 15, 30]


def observation_of(slots: int, saved: float = 0.0, **state: int) -> Observation:
    """Where drafting has saved little, if nothing else is stated, but may pay."""
    return Observation(slots, most=slots, saved=saved, **state)


def admitted(count: int, *, slots: int, plain: bool = True) -> list[bool]:
    """Which of `count` requests that wait at once are observed."""
    one = observation_of(slots, 0.0 if plain else 0.25)
    return [one.admit(waiting=left) for left in reversed(range(count))]


@pytest.mark.parametrize(("most", "rests"), [(0, True), (3, True), (4, False)])
def test_a_run_begins_with_a_rest_if_drafting_is_not_expected_to_pay_for_a_full_batch(most, rests):
    one = Observation.at_first(4, most)
    found = [one.admit(waiting=99) for _ in range(4 * PERIOD)]
    assert found == [not rests] * (4 * PERIOD - 4) + [True] * 4


@pytest.mark.parametrize(
    ("slots", "most", "last"), [(8, 3, 0), (8, 4, 4), (8, 8, 4), (8, 0, 0), (1, 1, 1)]
)
def test_the_last_requests_are_observed_if_drafting_pays_for_half_a_batch(slots, most, last):
    one = Observation(slots, most, saved=0.0)
    found = [one.admit(waiting=left, running=slots) for left in reversed(range(7))]
    assert found == [False] * (7 - last) + [True] * last


@pytest.mark.parametrize("slots", [1, 4, 32])
def test_where_drafting_pays_every_request_is_observed(slots):
    assert all(admitted(20 * slots, slots=slots, plain=False))


@pytest.mark.parametrize("slots", [1, 4, 32])
def test_one_batch_in_a_period_and_the_last_ones_are_observed(slots):
    count, late = 2 * PERIOD * slots, (slots + 1) // 2
    found = admitted(count + late, slots=slots)
    (whole, rest), last = np.split(np.array(found[:count]), 2), found[count:]
    for period in (whole, rest):
        assert period.sum() == slots
        assert period[-slots:].all()
    assert all(last)


@pytest.mark.parametrize(("running", "waiting"), [(0, 3), (3, 0), (1, 1)])
def test_so_few_requests_that_drafting_pays_are_observed(running, waiting):
    few = running + 1 + waiting
    counts = {"running": running, "waiting": waiting}
    assert not Observation(16, few - 1, saved=0.0, resting=True).admit(**counts)
    assert Observation(16, few, saved=0.0, resting=True).admit(**counts)


@pytest.mark.parametrize("most", [0, 3, 8])
def test_no_rest_begins_where_few_requests_wait(most):
    """They may run for long, and would decode plainly to their end."""
    one = Observation(8, most, saved=0.0)
    assert not one.rests(waiting=3, running=8)
    assert one.admit(waiting=3, running=8)
    assert one.rests(waiting=4, running=8)


@pytest.mark.parametrize("slots", [1, 4])
def test_every_failed_trial_doubles_the_rest(slots):
    one, rests = observation_of(slots), []
    for _ in range(6):
        rests.append(0)
        while not one.admit(waiting=99):
            rests[-1] += 1
        one.learn([0.0, -1.0])
    assert rests == [7 * slots, *((n - 1) * slots for n in (16, 32, 64, 64, 64))]


@pytest.mark.parametrize(("saved", "plain"), [(-1.0, False), (1.0, True), (0.0, True)])
def test_a_trial_goes_on_unless_it_fails(saved, plain):
    """If drafts follow it, if it saved time, or if none was made."""
    one = observation_of(4)
    while not one.admit(waiting=99):
        pass
    one.learn([saved], plain=plain)
    assert [one.admit(waiting=99) for _ in range(3)] == [True] * 3
    assert not one.admit(waiting=99) or saved > 0
    assert one.period == PERIOD


@pytest.mark.parametrize(
    ("saved", "waiting", "begins"), [(0.0, 2, True), (0.0, 1, False), (0.25, 99, False)]
)
def test_a_rest_begins_without_an_admission(saved, waiting, begins):
    one = observation_of(4, saved)
    assert one.rests(waiting=waiting, running=4) is begins
    assert not one.rests(waiting=waiting, running=4), "it has begun already"
    assert one.resting is begins


def test_a_rest_begins_when_a_trial_has_failed():
    one = observation_of(4)
    while not one.admit(waiting=99):
        pass
    assert not one.rests(waiting=99), "the trial is not over"
    one.learn([-1.0])
    assert one.rests(waiting=99)
    found = [one.admit(waiting=99) for _ in range(8 * PERIOD)]
    assert found == [False] * (8 * PERIOD - 4) + [True] * 4


def test_a_rest_is_short_again_after_drafts():
    one = observation_of(4, period=32)
    one.learn([1.0] * 16)
    assert one.admit(waiting=99)
    one.learn([0.0] * 1000)
    assert [one.admit(waiting=99) for _ in range(4 * PERIOD)][-5:] == [False] + [True] * 4


def test_a_queue_shorter_than_half_the_batch_is_observed():
    assert admitted(4, slots=4) == [False, False, True, True]


def test_a_rest_begins_anew_after_drafts():
    one = observation_of(2)
    for _ in range(2):
        found = [one.admit(waiting=99) for _ in range(2 * PERIOD)]
        assert found == [False] * (2 * PERIOD - 2) + [True] * 2
        assert not one.admit(waiting=99)
        one.learn([1.0] * 16)
        assert one.admit(waiting=99)
        one.learn([0.0] * 1000)


@pytest.mark.parametrize(
    ("every", "gain", "rests"),
    [(100, 1.0, True), (8, 1.0, False), (1, 0.1, False), (1, 0.01, True), (8, -1.0, True)],
)
def test_it_rests_unless_drafting_saves_what_observing_takes(every, gain, rests):
    """Of a mix, the requests that profit draft in some cycles, whatever is best in most."""
    one = Observation.at_first(4, 4)
    for i in range(400):
        one.learn([gain if i % every == 0 else 0.0])
    assert one.admit(waiting=99) is not rests


@pytest.mark.parametrize("gain", [-100.0, 100.0])
def test_what_was_learnt_is_soon_forgotten(gain):
    one = Observation.at_first(4, 4)
    one.learn([gain] * 400)
    one.learn([-gain / 100] * 64)
    assert one.admit(waiting=99) is (gain < 0)


def test_a_dispatch_without_a_cycle_tells_nothing():
    one = observation_of(4, 0.1)
    one.learn([])
    assert one.saved == 0.1


def test_it_takes_some_plain_cycles_until_it_rests():
    one, waited = Observation.at_first(4, 4), 0
    while one.admit(waiting=99):
        one.learn([0.0] * 8)
        waited += 8
    assert 64 <= waited <= 128


def test_a_request_resumes_if_its_context_is_short_for_what_is_left():
    assert resumes(100, 125)
    assert not resumes(100, 124)


# --- with an engine -----------------------------------------------------------------------------


@functools.cache
def adaptive_engine(**options) -> Engine:
    model = drafter("dflash", block_size=3)
    return engine(model, batch_size=2, sync_every=3, max_length=64, adaptive_blocks=True, **options)


def forced(run: Engine, choice: int) -> Engine:
    """The engine, all of whose cycles take one choice of rows."""
    run.cycle_seconds = adaptive.only(choice, run.rules.num_choices)
    return run


@pytest.fixture
def forgetful(monkeypatch) -> None:
    """The drafter rests after one plain dispatch."""
    monkeypatch.setattr(observation, "MEMORY", 1.0)


@pytest.fixture
def hopeful(monkeypatch) -> None:
    """Drafting may pay, so that runs begin without a rest."""
    monkeypatch.setattr(Engine, "most_drafted", lambda run, *_: run.layout.batch_size)


def observing(monkeypatch, observed) -> None:
    """Makes the drafter observe these admissions, whatever is best."""
    answers = iter(observed)
    monkeypatch.setattr(Observation, "admit", lambda *_, **__: next(answers, True))


@pytest.mark.usefixtures("forgetful")
@pytest.mark.parametrize("count", [60, 20])
def test_a_trial_is_made_when_a_rest_ends(count):
    """Trials cost too much to come by themselves, so the run begins with a rest.

    Every rest is twice as long as the one before.
    """
    run = adaptive_engine()
    run.cycle_seconds = np.array([1.0, *[1e5] * (run.rules.num_choices - 1)], np.float32)
    prompts = random_prompts([5] * count)
    done = finished(run, make_requests(prompts, 6))
    drafted = [max(one.block_sizes) > 1 for one in done]
    begins = [i for i, now in enumerate(drafted) if now and not any(drafted[max(i - 2, 0) : i])]
    assert [one.output_ids for one in done] == [ids for ids, _ in expected(prompts, [6] * count)]
    assert begins == {60: [14, 46], 20: [14]}[count]


def test_a_report_says_what_each_cycle_saved(monkeypatch):
    run, reports = adaptive_engine(), []
    assert run.rules.num_choices == 4
    run.cycle_seconds = np.array([2.0, 1.0, 1e5, 1e5], np.float32)
    monkeypatch.setattr(Batch, "learn", lambda _, report, **__: reports.append(report))
    decode(run, PROMPTS, LIMITS)
    for report in reports:
        for i in range(int(report.cycles)):
            counts = report.num_committed[i][report.num_committed[i] > 0]
            ratio = {1: 1.0, 2: 0.5}.get(report.block_sizes[i].max(), 0.5e5)
            np.testing.assert_allclose(report.saved[i], counts.mean() - ratio, rtol=1e-6)
    assert sum((one.saved > 0).sum() for one in reports) > 50


@pytest.mark.parametrize("choice", range(4))
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_output_is_that_of_plain_decoding_whoever_is_observed(choice, temperature, monkeypatch):
    """In plain cycles, in blocks of 2 and 3, and with divided rows."""
    run = forced(adaptive_engine(), choice)
    assert run.rules.num_choices == 4
    rng = np.random.default_rng(choice)
    observing(monkeypatch, rng.integers(0, 2, len(PROMPTS)).astype(bool).tolist())
    done = decode(run, PROMPTS, LIMITS, temperature=temperature)
    wanted = expected(PROMPTS, LIMITS, temperature=temperature)
    assert [(one.output_ids, one.finish_reason) for one in done] == wanted


@pytest.mark.parametrize("choice", range(4))
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_output_is_that_of_plain_decoding_when_requests_rest(choice, temperature, monkeypatch):
    """Rests begin at random times, with rows in the backlog, and trials are made between them."""
    run, rng = forced(adaptive_engine(), choice), np.random.default_rng(choice)

    def admit(one: Observation, *, waiting: int, running: int) -> bool:
        one.resting = bool(rng.integers(0, 2)) and waiting > 0
        return not one.resting

    monkeypatch.setattr(Observation, "admit", admit)
    prompts, limits = PROMPTS * 2, LIMITS * 2
    done = decode(run, prompts, limits, temperature=temperature)
    wanted = expected(prompts, limits, temperature=temperature)
    assert [(one.output_ids, one.finish_reason) for one in done] == wanted


def test_unobserved_requests_have_no_row_of_divided_ones(monkeypatch):
    run = forced(adaptive_engine(), 3)
    observing(monkeypatch, [False, True])
    # They end before the queue does, and so never resume.
    done = decode(run, PROMPTS[:2] * 2, [8, 8, 30, 30])
    assert set(done[0].block_sizes) == {1}
    assert max(done[1].block_sizes) > 1


class Watch:
    """An engine that notes its calls, with the number of slots that are observed."""

    def __init__(self, inner: Engine):
        self._inner, self.calls = inner, []

    def __getattr__(self, name):
        found = getattr(self._inner, name)
        if name in ("prefill", "prefill_unobserved", "generate", "generate_unobserved"):
            self.calls.append(name)
        return found


def finished(run, requests) -> list[RequestOutput]:
    one, events = Scheduler(run, fill_at_once=True), []
    for request in requests:
        one.submit(request)
    while not one.idle:
        events += one.step()
    done = [event for event in events if isinstance(event, RequestOutput)]
    return sorted(done, key=lambda output: output.id)


def plain_calls(limits: list[int], temperature: float) -> list[str]:
    """The calls that decode where plain decoding is the fastest, whose output is checked."""
    watch = Watch(forced(adaptive_engine(), adaptive.PLAIN))
    prompts = random_prompts([5] * len(limits))
    requests = make_requests(prompts, limits, temperature=temperature)
    found = [(one.output_ids, one.finish_reason) for one in finished(watch, requests)]
    assert found == expected(prompts, limits, temperature=temperature)
    return watch.calls


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_run_begins_with_a_rest(temperature):
    calls = plain_calls([6] * 14, temperature)
    assert set(calls) == {"prefill_unobserved", "generate_unobserved"}


@pytest.mark.parametrize(("costs", "most"), [(np.inf, 0), (2.8, 0), (2.6, 1), (2.0, 1), (1.8, 2)])
def test_an_engine_knows_for_how_many_sequences_drafting_may_pay(costs, most):
    """If 0.9 of the drafts are accepted, rows that are divided, 2 per sequence, commit 2.71 tokens.

    That is for one sequence, which has two drafts then; for two sequences 1.9 each.
    """
    run = adaptive_engine()
    assert run.rules.choices == ("1", "2", "3", "~2")
    run.cycle_seconds = np.array([1.0, np.inf, np.inf, costs], np.float32)
    assert run.most_drafted(20) == most


def test_drafting_may_pay_for_long_sequences_if_only_their_plain_cycles_are_slow():
    run = adaptive_engine()
    short, long = adaptive.timed_lengths(run.layout.max_length)
    run.cycle_seconds = np.array([[1.0, 2, 3, 4], [2.0, 2, 3, 4]], np.float32)
    assert [run.most_drafted(length) for length in (1, short, long)] == [0, 0, 2]


@pytest.mark.usefixtures("forgetful", "hopeful")
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_drafter_rests_while_many_requests_wait(temperature):
    calls = plain_calls([6] * 14, temperature)
    # Two before anything is known, and the last one.
    assert calls.count("prefill_unobserved") == 14 - 3
    assert calls.count("generate_unobserved") > calls.count("generate")


@pytest.mark.usefixtures("forgetful", "hopeful")
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_when_a_rest_begins_running_requests_rest_too(temperature):
    """The long one, which the drafter observed at first, goes on by the target alone."""
    calls = plain_calls([32, *[4] * 13], temperature)
    unobserved = ["prefill_unobserved", "generate_unobserved"] * 11
    assert calls == ["prefill", "prefill", "generate", *unobserved, "prefill", "generate"]


@pytest.mark.usefixtures("forgetful", "hopeful")
@pytest.mark.parametrize("choice", [adaptive.PLAIN, 1])
def test_a_long_request_resumes_when_nothing_waits(choice, monkeypatch):
    """Beside another one if drafts have paid, and else when it is alone, if they may pay then."""
    run, others, resume = forced(adaptive_engine(), choice), [], Batch.resume
    observing(monkeypatch, [True, True, False])

    def watched(batch):
        found = resume(batch)
        others.extend([len(batch.running)] * bool(found))
        return found

    monkeypatch.setattr(Batch, "resume", watched)
    prompts, limits = random_prompts([5] * 4), [4, 4, 32, 12]
    done = finished(run, make_requests(prompts, limits))
    assert others == [choice]
    assert [one.preemptions for one in done] == [0, 0, 1, 0]
    assert [one.output_ids for one in done] == [ids for ids, _ in expected(prompts, limits)]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_last_request_of_a_rest_is_prefilled_once_more(temperature):
    """Drafting could pay for one sequence, but not for two, so that the run begins with a rest."""
    model = drafter("dflash", block_size=3)
    run = engine(model, batch_size=3, sync_every=3, max_length=64, adaptive_blocks=True)
    run.cycle_seconds = np.array([1.0, np.inf, np.inf, 2.35], np.float32)
    prompts, limits = random_prompts([5] * 6), [4, 4, 4, 4, 9, 32]
    done = finished(run, make_requests(prompts, limits, temperature=temperature))
    wanted = expected(prompts, limits, temperature=temperature)
    assert [(one.output_ids, one.finish_reason) for one in done] == wanted
    assert [one.preemptions for one in done] == [0, 0, 0, 0, 0, 1]
    assert [max(one.block_sizes) > 1 for one in done] == [False] * 5 + [True]


@pytest.mark.usefixtures("forgetful")
def test_no_request_resumes_where_drafting_cannot_pay(monkeypatch):
    run = forced(adaptive_engine(), adaptive.PLAIN)
    observing(monkeypatch, [True, True, False])
    requests = make_requests(random_prompts([5] * 4), [4, 4, 32, 12])
    assert not any(one.preemptions for one in finished(run, requests))


@pytest.mark.usefixtures("forgetful")
def test_a_rest_begins_with_what_drafts_have_told(monkeypatch):
    """Half the drafts are accepted: too few for two sequences, but not for one."""
    run, told = adaptive_engine(), []
    run.cycle_seconds = np.array([1.0, np.inf, np.inf, 1.72], np.float32)
    monkeypatch.setattr(
        block_choice, "outcomes", lambda _: (np.full(2, 1e3), np.full(2, 500.0, np.float32))
    )
    admit = Observation.admit

    def admitted(one, **counts):
        told.append(one.most)
        return admit(one, **counts)

    monkeypatch.setattr(Observation, "admit", admitted)
    finished(run, make_requests(random_prompts([5] * 8), [9] * 8))
    assert told == [2] * 2 + [1] * 6


@pytest.mark.usefixtures("forgetful")
def test_no_request_resumes_during_a_pause(monkeypatch):
    one = Scheduler(forced(adaptive_engine(), 1), fill_at_once=True)
    observing(monkeypatch, [True, True, False])
    for request in make_requests(random_prompts([5] * 8), [4, 4, 32, 4, 4, 4, 4, 4]):
        one.submit(request)
    events = []
    while sum(isinstance(event, RequestOutput) for event in events) < 3:
        events += one.step()
    one.paused = True
    for id in range(4, 8):
        one.cancel(id)
    while not one.settled:
        events += one.step()
    outputs = {event.id: event for event in events if isinstance(event, RequestOutput)}
    assert set(outputs) >= {0, 1, 2}
    assert outputs[2].preemptions == 0
    assert one.idle


@pytest.mark.usefixtures("forgetful")
def test_a_request_with_little_left_stays(monkeypatch):
    monkeypatch.setattr(observation, "LEFT", 100.0)
    observing(monkeypatch, [True, True, False])
    run = forced(adaptive_engine(), 1)
    requests = make_requests(random_prompts([5] * 8), [4, 4, 32, 4, 4, 4, 4, 4])
    assert not any(one.preemptions for one in finished(run, requests))


def test_with_a_prefix_cache_or_without_a_choice_it_never_rests():
    cached = engine(
        drafter("dflash"), batch_size=2, max_length=64, adaptive_blocks=True, prefix_cache=True
    )
    fixed = engine(drafter("dflash"), batch_size=2, max_length=64)
    for run in (cached, fixed):
        assert not run.may_rest
        assert ("generate_unobserved",) not in run.program_names([20])
    assert ("generate_unobserved",) in adaptive_engine().program_names([20])


def test_a_state_keeps_what_plain_decoding_by_the_target_does_not_need():
    state = adaptive_engine().abstract_state()
    alone = state.of_target()
    assert alone.adaptive is None
    changed = dataclasses.replace(alone, length=state.limit)
    assert changed != state
    assert state.with_target(changed) == dataclasses.replace(state, length=state.limit)
