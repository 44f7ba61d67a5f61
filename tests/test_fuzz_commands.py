"""A small fixed portion of tools/fuzz_commands.py."""

import shlex

import pytest
from support import scripts


@pytest.fixture(scope="module")
def fuzz():
    return scripts.load("tools/fuzz_commands.py")


def test_made_up_command_lines_end_as_they_should(fuzz):
    assert list(fuzz.lines(12, seed=1)) == []


def test_damaged_files_end_as_they_should(fuzz):
    assert list(fuzz.files(12, seed=1)) == []


def test_the_files_are_fine_before_they_are_damaged(fuzz):
    with fuzz.place():
        statuses = {name: fuzz.run(shlex.split(line)).status for name, line in fuzz.FILES.items()}
    assert set(statuses.values()) == {0}
