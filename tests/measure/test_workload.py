"""What is decoded: made-up prompts as long as recorded, with lengths recorded or drawn."""

import json
import math
import types

import numpy as np
import pytest

from dflash import errors
from dflash.config.benchmark_schema import BenchmarkRun
from dflash.config.schema import DecodeConfig
from dflash.measure import published, workload
from dflash.text.prompts import Prompt

ARCH = types.SimpleNamespace(vocab_size=50)
TARGET = types.SimpleNamespace(arch=ARCH)
JOB = types.SimpleNamespace(target=TARGET, check_length=lambda prompt: None)


def read(**options) -> workload.Workload:
    return workload.read(BenchmarkRun(**options), JOB)


def test_drawn_lengths_follow_the_published_shares_and_never_change():
    options = {"acceptance": ("math500", "alpaca"), "prompts_per_task": 8}
    options["decode"] = DecodeConfig(max_new_tokens=500)
    one, other = read(**options), read(**options)
    assert one == other
    assert one.forced
    assert "tpu-spec-decode" in workload.acceptance_source(BenchmarkRun(**options))["origin"]
    for task, items in one.tasks.items():
        lengths = [length for item in items for length in item.lengths]
        shares = np.array(published.HISTOGRAMS[task])
        found = np.bincount(lengths, minlength=17)[1:] / len(lengths)
        assert np.abs(found - shares / shares.sum()).max() < 0.02
        assert all(item.max_new_tokens == 500 for item in items)
    assert [item.prompt.index for item in one.items] == list(range(16))


def test_a_prompt_is_as_long_as_recorded_and_ends_with_its_recording(tmp_path):
    path = tmp_path / "trace.json"
    path.write_text('[{"acceptance_lengths": [3, 1], "prompt_tokens": 7, "dataset": "a"}]')
    (item,) = read(trace=str(path)).items
    assert len(item.prompt.ids) == 7
    assert item.lengths == (3, 1)
    assert item.max_new_tokens == 5
    (item,) = read(trace=str(path), prompt_tokens=11).items
    assert len(item.prompt.ids) == 11


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{}", "expected a list of prompts, one object each"),
        (b"[]", "expected a list of prompts"),
        (b"[" * 100_000, "not JSON: maximum recursion depth exceeded"),
        (b"\xff\xfe[", "not JSON: 'utf-8' codec can't decode"),
        ([[1]], "prompt 0: expected an object with acceptance_lengths"),
        ([{}], "prompt 0: expected an object with acceptance_lengths"),
        ([{"acceptance_lengths": 3}], "prompt 0: acceptance_lengths: expected a list, not 3"),
        ([{"acceptance_lengths": []}], "prompt 0: empty acceptance_lengths"),
        ([{"acceptance_lengths": [1, "2"]}], r'lengths\[1\]: expected an integer, not "2"'),
        ([{"acceptance_lengths": [math.nan]}], r"acceptance_lengths\[0\]: .* not NaN"),
        ([{"acceptance_lengths": [1, 0]}], "acceptance_lengths: expected at least 1, got 0"),
        ([{"acceptance_lengths": [1], "prompt_tokens": 0}], "prompt_tokens: expected at least 1"),
        ([{"acceptance_lengths": [1], "prompt_tokens": None}], "prompt_tokens.*, not null"),
        ([{"acceptance_lengths": [1], "dataset": 7}], "dataset: expected letters, digits .* not 7"),
        ([{"acceptance_lengths": [1], "dataset": "../a"}], 'dataset: .* not "../a"'),
    ],
)
def test_a_damaged_recording_is_refused(tmp_path, content, message):
    path = tmp_path / "trace.json"
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    with pytest.raises(errors.InputError, match=f"trace.json: .*{message}"):
        workload.read_trace(str(path))


def test_the_tasks_asked_for_are_kept_in_their_order(tmp_path):
    path = tmp_path / "trace.json"
    rows = [{"acceptance_lengths": [2], "dataset": name} for name in ("a", "b", "c", "a")]
    path.write_text(json.dumps(rows))
    assert {task: len(some) for task, some in workload.read_trace(str(path)).items()} == {
        "a": 2, "b": 1, "c": 1,
    }  # fmt: skip
    assert list(workload.read_trace(str(path), ("c", "a"))) == ["c", "a"]
    with pytest.raises(errors.InputError, match=r"trace_tasks: .*trace.json has no 'd'"):
        workload.read_trace(str(path), ("a", "d"))


def test_lengths_beyond_a_block_are_refused(tmp_path):
    path = tmp_path / "trace.json"
    path.write_text('[{"acceptance_lengths": [3, 1]}, {"acceptance_lengths": [1, 5]}]')
    some = read(trace=str(path))
    workload.check_lengths(some, {"long": 5})
    with pytest.raises(errors.InputError, match=r"prompt 1 \(trace\): commits 5 .* block of 4;"):
        workload.check_lengths(some, {"long": 5, "short": 4})


def test_prompts_meet_in_one_queue_where_there_are_slots_for_several():
    """Three conversations of two, one and three turns."""
    openings = [
        Prompt(0, (1,), later_turns=("b",)),
        Prompt(2, (2,)),
        Prompt(3, (3,), later_turns=("d", "e")),
    ]
    items = tuple(workload.Item(prompt, 4, grader=str.isdigit) for prompt in openings)
    some = workload.Workload({"a": items})
    assert some.has_later_turns
    turns = some.with_turns([Prompt(index, (index,)) for index in range(6)])
    assert not turns.has_later_turns
    queues = [[one.prompt.index for one in queue] for queue in turns.queues("a", 2)]
    assert queues == [[0, 1, 2, 3, 4, 5]]
    # Alone in its slot a prompt meets no other: strategies may change after each.
    queues = [[one.prompt.index for one in queue] for queue in turns.queues("a", 1)]
    assert queues == [[0], [1], [2], [3], [4], [5]]
    assert [one.conversation for one in turns.items] == [0, 0, 2, 3, 3, 3]
    graded = [one.prompt.index for one in turns.items if one.grader]
    assert graded == [1, 2, 5]  # the last turn of each


def test_a_mix_takes_prompts_of_all_tasks_in_turns():
    def items(*numbers):
        return tuple(workload.Item(Prompt(number, (number,)), 4) for number in numbers)

    tasks = {"a": items(0, 1, 2, 3), "b": items(4), "c": items(5, 6)}
    some = workload.Workload(tasks)
    mixed = some.with_mix()
    assert [item.prompt.index for item in mixed.tasks[workload.MIX]] == [0, 4, 5, 1]
    assert {task: mixed.tasks[task] for task in tasks} == tasks
    alone = workload.Workload({"a": items(0, 1)})
    assert alone.with_mix() == alone
