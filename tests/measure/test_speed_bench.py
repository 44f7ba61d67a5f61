"""Acceptance by category, against figures worked out by hand."""

import pytest

from dflash.inference.request import RequestOutput
from dflash.measure import speed_bench
from dflash.measure.samples import Sample, TaskRound
from dflash.measure.workload import Item
from dflash.text.prompts import Prompt

ITEMS = (
    Item(Prompt(0, (1,)), 8, category="math", question="m1"),
    Item(Prompt(1, (1,)), 8, category="math", question="m1", turn=1),
    Item(Prompt(2, (1,)), 8, category="math", question="m2"),
    Item(Prompt(3, (1,)), 8, category="qa", question="q1"),
)


def done(
    id: int, lengths: tuple[int, ...], *, decode_ms: float, finished_at: float
) -> RequestOutput:
    return RequestOutput(
        id=id,
        output_ids=(7,) * (1 + sum(lengths)),
        finish_reason="length",
        acceptance_lengths=lengths,
        block_sizes=(4,) * len(lengths),
        prefill_ms=500.0,
        decode_ms=decode_ms,
        decode_clock_s=0.0,
        finished_at=finished_at,
    )


SAMPLES = (
    Sample("set", "dflash", 0, (done(0, (4, 2), decode_ms=1e3, finished_at=11.5),), (0,)),
    Sample("set", "dflash", 0, (done(1, (3,), decode_ms=1e3, finished_at=13.0),), (0,)),
    Sample("set", "dflash", 0, (done(2, (1, 1), decode_ms=2e3, finished_at=15.5),), (2,)),
    Sample("set", "dflash", 0, (done(3, (4,), decode_ms=1e3, finished_at=17.0),), (3,)),
)


def test_questions_count_with_all_their_turns_and_categories_with_all_their_questions():
    found = speed_bench.acceptance(ITEMS, SAMPLES)
    assert found["Request_AL"] == {"m1": 3.0, "m2": 1.0, "q1": 4.0}
    assert found["Category_AL"] == {"math": 2.0, "qa": 4.0}
    assert found["Average_AL"] == pytest.approx(8 / 3)


def test_the_distribution_of_steps():
    found = speed_bench.acceptance(ITEMS, SAMPLES)
    assert found["Acceptance_Length_Histogram"] == {1: 2, 2: 1, 3: 1, 4: 2}
    assert found["Joint_Acceptance_Rate"] == pytest.approx({1: 1, 2: 4 / 6, 3: 3 / 6, 4: 2 / 6})
    conditional = pytest.approx({1: 1, 2: 4 / 6, 3: 3 / 4, 4: 2 / 3})
    assert found["Conditional_Acceptance_Rate"] == conditional


def test_times_are_of_requests_and_seconds():
    found = speed_bench.timing(SAMPLES)
    assert found["Output TPS"] == pytest.approx(19 / (1.5 + 1.5 + 2.5 + 1.5))
    assert found["E2E Request Time"]["max"] == 2.5
    assert found["TTFT Time"]["mean"] == 0.5
    assert found["Number of Output Tokens"]["quantiles"]["0.5"] == 4.5
    assert found["Request Generation Step Time"]["max"] == 1.0
    assert found["Request Generation Tokens Per Second"]["max"] == 6.0


def test_tasks_without_categories_are_left_out():
    rounds = [TaskRound("set", 0, SAMPLES, {})]
    found = speed_bench.by_task({"set": ITEMS}, rounds)
    assert list(found) == ["set"]
    plain = tuple(Item(item.prompt, 8) for item in ITEMS)
    assert speed_bench.by_task({"set": plain}, rounds) == {}
