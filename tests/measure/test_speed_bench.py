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


def done(id: int, lengths: tuple[int, ...]) -> RequestOutput:
    return RequestOutput(
        id=id,
        output_ids=(7,) * (1 + sum(lengths)),
        finish_reason="length",
        acceptance_lengths=lengths,
        block_sizes=(4,) * len(lengths),
        prefill_ms=500.0,
        decode_ms=1e3,
        decode_clock_s=0.0,
        finished_at=11.5,
    )


SAMPLES = (
    Sample("set", "dflash", 0, (done(0, (4, 2)),), (0,)),
    Sample("set", "dflash", 0, (done(1, (3,)),), (0,)),
    Sample("set", "dflash", 0, (done(2, (1, 1)),), (2,)),
    Sample("set", "dflash", 0, (done(3, (4,)),), (3,)),
)


def test_questions_count_with_all_their_turns_and_categories_with_all_their_questions():
    found = speed_bench.acceptance(ITEMS, SAMPLES)
    assert found["Request_AL"] == {"m1": 3.0, "m2": 1.0, "q1": 4.0}
    assert found["Category_AL"] == {"math": 2.0, "qa": 4.0}
    assert found["Average_AL"] == pytest.approx(8 / 3)


def test_tasks_without_categories_are_left_out():
    rounds = [TaskRound("set", 0, SAMPLES, {})]
    found = speed_bench.by_task({"set": ITEMS}, rounds)
    assert list(found) == ["set"]
    plain = tuple(Item(item.prompt, 8) for item in ITEMS)
    assert speed_bench.by_task({"set": plain}, rounds) == {}
