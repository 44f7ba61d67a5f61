"""Tests of the data sets made of the standard library, and of generated facts."""

import ast
import dataclasses
import re

import pytest

from dflash.config import registry
from dflash.config.train_schema import DataConfig
from dflash.data.example import SPLITS
from experiments.tiny_family import chat, code, datasets, facts, stdlib

MAKERS = {"code": code.changes, "chat": chat.library_examples}


@pytest.fixture(scope="module", params=MAKERS)
def splits(request):
    return {split: list(MAKERS[request.param](split)) for split in SPLITS}


def test_splits_have_enough(splits):
    assert len(splits["train"]) > 4000
    for split in ("validation", "test"):
        assert len(splits[split]) > 80
        assert len({example.source for example in splits[split]}) >= 5


def test_whole_modules_are_held_out(splits):
    sources = {split: {example.source for example in some} for split, some in splits.items()}
    for one in SPLITS:
        for other in SPLITS:
            assert one == other or not sources[one] & sources[other]


def test_no_example_is_in_two_splits(splits):
    """Equal texts of different modules count as one."""

    def content(example):
        question = example.prompt[0]["content"]
        return question.partition("\n\n")[2] or question, example.response

    contents = {split: [content(one) for one in some] for split, some in splits.items()}
    held_out = {*contents["validation"], *contents["test"]}
    assert not held_out.intersection(contents["train"])
    assert len({one.prompt for one in map(make_hashable, splits["train"])}) == len(splits["train"])


def make_hashable(example):
    return dataclasses.replace(
        example, messages=tuple(message["content"] for message in example.messages)
    )


def test_lengths_are_bounded(splits):
    for some in splits.values():
        for example in some:
            assert 0 < len(example.response) <= 1000
            assert len(example.prompt[0]["content"]) <= 1200


def test_twins_share_a_source():
    assert stdlib.source_of("_pydecimal") == stdlib.source_of("decimal") == "decimal"
    assert stdlib.source_of("email.message") == "email"


def test_changed_code_is_python_and_repeats_the_prompt():
    for example in code.changes("validation"):
        ast.parse(example.response)
        question = example.prompt[0]["content"]
        given = {*re.findall(r"\w+", question)} | {"class", "def", "self", "__init__"}
        assert {*re.findall(r"\w+", example.response)} <= given


@pytest.mark.parametrize("name", ["code", "chat"])
def test_answers_are_graded_to_the_letter(name):
    dataset = registry.load(datasets.DATASETS[name])(DataConfig())
    (example,) = dataset.sample("validation", 1)
    assert dataset.is_correct(example, f"{example.response}\n")
    assert not dataset.is_correct(example, example.response[:-1])
    assert not dataset.is_correct(example, example.response, finished=False)


def make_module(source: str) -> stdlib.Module:
    return stdlib.Module("shapes", tuple(source.splitlines()), ast.parse(source))


SOURCE = '''"""Shapes and what they measure.

More of it.
"""

def area(width, height=1):
    """Compute what a rectangle covers."""
    # Both count.
    return width * height

def _hidden(x):
    return x

class Circle:
    """A round shape of one radius. It is drawn by hand."""

    def __init__(self, radius, *, color): self.radius = radius

    @property
    def radius(self):
        """Radius of the circle."""
        return 1

    def grow(self, by, twice=False):
        """Make the circle larger.

        Returns the new radius as a number.
        """
        self.r *= by

    def shrink(self, by): return by

class Square:
    def __init__(self, side, color='red'):
        super().__init__(color)
'''

BARE_AREA = """\
def area(width, height=1):
    # Both count.
    return width * height"""
AREA = '''\
def area(width, height=1):
    """Compute what a rectangle covers."""
    # Both count.
    return width * height'''


@pytest.fixture
def shapes(monkeypatch):
    module = make_module(SOURCE)
    monkeypatch.setattr(stdlib, "modules", lambda split: iter([module] if split == "train" else []))


def words_after(start: str, text: str) -> str:
    return re.search(rf"{start}`(.*?)`", text)[1]


def test_what_is_asked_of_code(shapes):
    pairs = [(one.prompt[0]["content"], one.response) for one in code.changes("train")]
    of_area = [(question, answer) for question, answer in pairs if "* height" in answer]
    renamed, called, bare, documented, extended, method = of_area
    new = words_after("(?:to|argument) ", renamed[0])
    old = words_after("(?:argument|instead of) ", renamed[0].replace(f"argument `{new}`", ""))
    assert renamed[0].endswith(f"\n\n{AREA}")
    assert renamed[1] == re.sub(rf"\b{old}\b", new, AREA) != AREA
    assert called[1] == AREA.replace("area(", words_after("", called[0]) + "(")
    assert (bare[1], bare[0].endswith(AREA)) == (BARE_AREA, True)
    assert (documented[1], documented[0].endswith(BARE_AREA)) == (AREA, True)
    assert ": Compute what a rectangle covers.\n\n" in documented[0]
    argument = re.search(r"`(\w+=.*?)`", extended[0])[1]
    assert extended[1] == AREA.replace("height=1)", f"height=1, {argument})")
    owner = words_after("class ", method[0])
    indented = AREA.replace("\n", "\n    ").replace("def area(", "def area(self, ")
    assert method[1] == f"class {owner}:\n    {indented}"


def test_classes_are_written_from_their_fields(shapes):
    pairs = [(one.prompt[0]["content"], one.response) for one in code.changes("train")]
    (square,) = [pair for pair in pairs if "`Square`" in pair[0]]
    assert square[0].endswith("fields `side`, `color='red'`.")
    assert square[1] == (
        "class Square:\n    def __init__(self, side, color='red'):\n"
        "        self.side = side\n        self.color = color"
    )
    assert not [pair for pair in pairs if "`Circle`" in pair[0]]  # a field by keyword only


def test_what_is_asked_in_chat(shapes):
    answers = {one.prompt[0]["content"]: one.response for one in chat.library_examples("train")}
    signature = "`shapes.Circle.grow(by, twice=False)`"
    found = [answer for question, answer in answers.items() if signature in question]
    assert found == ["`grow` takes 2 arguments:\n- `by`\n- `twice`, by default `False`"]
    returns = [question for question in answers if "what does the function" in question]
    assert [answers[question] for question in returns] == ["It returns the new radius as a number."]
    methods = [answer for question, answer in answers.items() if "Which methods" in question]
    assert methods == ["The class `Circle` has 3 methods:\n- `radius`\n- `grow`\n- `shrink`"]
    assert "A round shape of one radius." in answers.values()
    assert not [question for question in answers if "_hidden" in question]


def pairs_of(example) -> set[str]:
    """Returns the pairs of subject and value in a text, worded as in its answers."""
    text = example.messages[0]["content"].partition("\n\n")[0]
    return {
        f"{subject}/{value}"
        for world in facts.WORLDS
        for subject in world.subjects
        for kind in world.kinds.values()
        for value in kind.values
        for says in kind.says
        if facts.fill(says, subject, value) in text
    }


def test_facts_of_training_are_never_asked_elsewhere():
    for split in SPLITS:
        for index in range(6):
            example = facts.example("chat", split, index)
            told = pairs_of(example)
            assert example.source in told
            strange = {pair for pair in told if facts.split_of(pair) != "train"}
            assert strange == ({example.source} if split != "train" else set())
            assert facts.split_of(example.source) == split


def test_answers_repeat_the_facts():
    several = 0
    for index in range(200):
        example = facts.example("chat", "train", index)
        assert example == facts.example("chat", "train", index)
        several += len(example.messages) > 2
        given = {*re.findall(r"\w+", example.messages[0]["content"])}
        for message in example.messages[1::2]:
            assert not set("{}") & set(message["content"])
            values = {*re.findall(r"[A-Z\d]\w*", message["content"])}
            assert values <= given | set("The Right Wrong 1 2 3 4".split())
    assert 20 < several < 90


def test_equal_facts_are_told_of_nobody_else():
    """A question for the subject of a value has one answer."""
    for index in range(6):
        told = sorted(
            one.partition("/")[2] for one in pairs_of(facts.example("chat", "test", index))
        )
        assert len(set(told)) == len(told)
