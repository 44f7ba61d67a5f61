"""Acceptance by category, against figures worked out by hand."""

import pytest
from support.made_samples import completion

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


LENGTHS, CONVERSATIONS = ((4, 2), (3,), (1, 1), (4,)), (0, 0, 2, 3)
SAMPLES = tuple(
    Sample("set", "dflash", 0, (completion(id, lengths, cycle_ms=1.0),), (CONVERSATIONS[id],))
    for id, lengths in enumerate(LENGTHS)
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
