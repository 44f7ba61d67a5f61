"""Tests of the mutants: the text of each fault occurs in the package, and its tests exist."""

import pathlib

import pytest
from support import scripts

ROOT = pathlib.Path(__file__).parents[2]
run = scripts.load("tools/mutants/run.py")
MUTANTS = run.load()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_applies_and_its_tests_exist(mutant):
    source = (ROOT / mutant.path).read_text()
    assert mutant.apply(source) != source
    paths = [word for word in mutant.tests if word.startswith("tests/")]
    assert paths
    assert all((ROOT / path.partition("::")[0]).exists() for path in paths)
