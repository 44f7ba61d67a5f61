import random
import re
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.data import answers
from dflash.data.example import SPLITS
from dflash.data.word_problems import problems, template

TRAIN = problems.templates_of("train")
NUMBER = re.compile(r"\d+")


def test_there_are_enough_templates():
    assert len(TRAIN) >= 40
    assert len({one.name for one in problems.TEMPLATES}) == len(problems.TEMPLATES)
    split = [one for name in SPLITS for one in problems.templates_of(name)]
    assert sorted(one.name for one in split) == sorted(one.name for one in problems.TEMPLATES)
    assert all(len(one.steps) >= 2 for one in problems.TEMPLATES)


@pytest.mark.parametrize("one", problems.TEMPLATES, ids=lambda one: one.name)
@pytest.mark.parametrize("band", SPLITS)
def test_every_template_holds(one, band):
    """Evaluates the steps by other means than those that wrote them."""
    for seed in range(15):
        question, solution = one.problem(random.Random(seed), band)
        assert problems.check(solution) is None
        assert not set("{}[]") & set(question + solution)
        *steps, last = solution.splitlines()
        assert len(steps) == len(one.steps)
        for step in steps:
            left, right = re.search(r"([-+*/() \d]+) = (\d+)", step).groups()
            value = eval(re.sub(r"\d+", r"Fraction(\g<0>)", left.strip()), {"Fraction": Fraction})
            assert value == int(right)
        assert last == f"#### {right}"


@pytest.mark.parametrize("one", problems.TEMPLATES, ids=lambda one: one.name)
def test_every_template_holds_out_a_range(one):
    ranges = map(template._parse_range, one.numbers.split("; "))
    wide = {name: values for name, values in ranges if values and len(values) >= template.WIDE}
    assert wide
    for name, values in wide.items():
        held_out = {band: set(template.in_band(values, band)) for band in template.BANDS}
        drawn = {band: set() for band in SPLITS}
        for band in SPLITS:
            for seed in range(40):
                try:
                    drawn[band].add(one._draw(random.Random(seed), band)[name])
                except template._Unfit:
                    continue
        for band, allowed in held_out.items():
            assert allowed
            assert drawn[band] <= allowed
            assert not drawn["train"] & allowed


def test_sources_of_splits_differ():
    sources = {split: {one.source for one in problems.examples(split, 2000)} for split in SPLITS}
    assert len(sources["train"]) == len(TRAIN)
    for one in SPLITS:
        for other in SPLITS:
            assert one == other or not sources[one] & sources[other]
    assert {source.partition("@")[2] for source in sources["test"]} == {"train", "test"}


def test_no_question_of_training_is_held_out():
    questions = {
        split: {one.prompt[0]["content"] for one in problems.examples(split, 3000)}
        for split in SPLITS
    }
    assert not questions["train"] & (questions["test"] | questions["validation"])
    assert len(questions["train"]) > 2900


@given(st.sampled_from(SPLITS), st.integers(0, 10**9), st.integers(0, 100))
@settings(max_examples=50, deadline=None)
def test_an_example_follows_from_its_index(split, index, seed):
    one = problems.example(split, index, seed)
    assert one == problems.example(split, index, seed)
    assert one != problems.example(split, index + 1, seed)
    assert len(one.response) < 400
    assert answers.marked(one.response) == NUMBER.findall(one.response)[-1]


@pytest.mark.parametrize(
    ("solution", "problem"),
    [
        ("So 2 * 3 = 6.\n#### 6", None),
        ("So 2 * 3 = 7.\n#### 7", "2 * 3 is 6, not 7"),
        ("So 7 / 2 = 3.\n#### 3", "7 / 2 is 7/2, not 3"),
        ("So 2 * 3 = 6.\n#### 7", "the answer is 7, not that of the last step"),
        ("So 2 * 3 = 6.", "the answer is None, not that of the last step"),
        ("#### 6", "the answer is 6, not that of the last step"),
        ("So 2 / 0 = 6.\n#### 6", "not arithmetic: '2 / 0'"),
    ],
)
def test_wrong_solutions_are_found(solution, problem):
    assert problems.check(solution) == problem


def test_a_template_without_numbers_says_so():
    one = template.Template("odd", "a 1..30; b = a - 40", ("{a}",), ("[a + b]",))
    with pytest.raises(ValueError, match="template odd: no numbers fit"):
        one.problem(random.Random(0))
