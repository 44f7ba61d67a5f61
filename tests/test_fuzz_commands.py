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


def test_every_kind_of_failure_is_detected(fuzz):
    argv = ["decode", "c.yml", "--print_config", "decode.seed=3"]
    fine = fuzz.Outcome(0, "target: {}\ndecode: {seed: 3}\n", "")
    assert fuzz.verdict(argv, fine) is None
    assert fuzz.verdict(argv, fuzz.Outcome(2, "", "error: no\n")) is None
    for outcome, said in [
        (fuzz.Outcome(None, "", "", "Traceback …"), "Traceback"),
        (fuzz.Outcome(5, "", ""), "status 5"),
        (fuzz.Outcome(2, "", ""), "no line that says why"),
        (fuzz.Outcome(2, "text", "error: no\n"), "an error, and output"),
        (fuzz.Outcome(1, "", "Traceback (most recent call last):\n"), "Traceback"),
        (fuzz.Outcome(1, "", "x" * 3000), "a line of more than"),
        (fuzz.Outcome(0, "target: {}\ndecode: {seed: 4}\n", ""), "typed '3', understood 4"),
    ]:
        assert said in fuzz.verdict(argv, outcome)
