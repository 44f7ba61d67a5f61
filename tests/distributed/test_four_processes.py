"""Four processes: what one finds or fails at, all know, and leave soon with one status and line."""

import json
import re
import subprocess
import sys

import pytest
from support import SUPPORT

SOON_S = 20  # beyond what processes without a fault take, which is more on a busy machine
# Exit status, and the line of every process; a gap stands for what differs from machine to machine.
ENDS = {
    "save": (1, "process 3: …/save/checkpoints: checkpoint of step 1 cannot be written: No space "
             "left on device; there is no earlier one"),
    "restore": (1, "process 2: …/checkpoints/2: cannot be restored: Input/output error; nothing "
                "was changed, so try again; …"),
    "export": (1, "process 0: …/hf: cannot be written: No space left on device"),
    "work_directory": (1, "process 0: …/taken/w: cannot be written: Not a directory"),
    "standard_input": (2, "process 0: …UTF-8…"),
    "prompts": (2, "process 0: …/prompts.jsonl:2: expected exactly one of prompt, …"),
    "date": (1, "process 0: …/date.txt: not a date such as 2026-01-31: …"),
    "tokenizer": (2, "process …: tokenizer: 'another' in process 3, 'bytes' in process 0; give all "
                  "processes the same files"),
    "surprise": (1, "process 2: KeyError: 'lost'"),
    "terminated": (143, "process 1: stopped by SIGTERM"),
}  # fmt: skip


@pytest.fixture(scope="module")
def ends(tmp_path_factory):
    """How the processes of every place end: status, seconds, lines on stderr."""
    command = [sys.executable, SUPPORT / "four_processes.py", tmp_path_factory.mktemp("faults")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def soon(ends):
    """Seconds within which processes with a fault have left."""
    return SOON_S + max(end[1] for end in ends["nothing"])


@pytest.mark.parametrize("place", ENDS)
def test_all_leave_together(ends, soon, place):
    status, line = ENDS[place]
    pattern = ".*".join(map(re.escape, f"error: {line}".split("…")))
    said = set()
    for end in ends[place]:
        assert end is not None, "a process is still there"
        assert (end[0], end[1] < soon) == (status, True), end
        said.add(end[2][-1])
        assert sum(one.startswith("error") for one in end[2]) == 1
    (one,) = said
    assert re.fullmatch(pattern, one), one


def test_a_process_that_is_killed_takes_the_others_with_it(ends, soon):
    """They are left without its word, so each tells what it sees."""
    statuses = [end[0] for end in ends["killed"]]
    assert statuses[2] == -9
    assert 0 not in statuses
    assert max(end[1] for end in ends["killed"]) < soon


def test_damage_that_one_process_finds_is_known_to_all(ends):
    for status, _, lines in ends["damaged"]:
        assert (status, lines[-1]) == (0, "restored 1: 1 damaged")


def test_four_processes_feed_the_rows_of_their_devices(ends):
    mine = [(0, 1, 6, 7), (2, 3, 4, 5), (8, 9, 14, 15), (10, 11, 12, 13)]
    assert [end[2][-1] for end in ends["rows"]] == [f"rows {one}: True" for one in mine]


def test_the_first_of_four_processes_makes_the_data_that_all_read(ends):
    said = [end[2] for end in ends["data"]]
    assert any("encoding jsonl/train, 40 examples" in line for line in said[0])
    assert [len(lines) for lines in said[1:]] == [1] * 3
    assert len({lines[-1] for lines in said}) == 4  # each reads a row of its own


@pytest.mark.parametrize("place", ["saved", "nothing"])
def test_processes_that_do_not_fail_end_well(ends, place):
    assert [end[:1] + end[2:] for end in ends[place]] == [[0, []]] * 4
