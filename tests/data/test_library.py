"""Tests of the two data sets that are made of the standard library."""

import ast
import dataclasses

import pytest

from dflash.data import chat, code, stdlib
from dflash.data.example import SPLITS

MAKERS = {"code": code.examples, "chat": chat.examples}


@pytest.fixture(scope="module", params=MAKERS)
def splits(request):
    return {split: list(MAKERS[request.param](split)) for split in SPLITS}


def test_splits_have_enough(splits):
    assert len(splits["train"]) > 5000
    for split in ("validation", "test"):
        assert len(splits[split]) > 80
        assert len({example.source for example in splits[split]}) >= 5


def test_whole_modules_are_held_out(splits):
    sources = {split: {example.source for example in some} for split, some in splits.items()}
    for one in SPLITS:
        for other in SPLITS:
            assert one == other or not sources[one] & sources[other]


def test_no_example_is_in_two_splits(splits):
    """Not even under another module's name."""

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


def test_no_long_answer_is_in_two_splits(splits):
    answers = {
        split: {
            one.response for one in some if len(one.response) >= 120 and "`" not in one.response
        }
        for split, some in splits.items()
    }
    assert len(answers["train"]) > 100
    assert not answers["train"] & (answers["validation"] | answers["test"])


def test_lengths_are_bounded(splits):
    for some in splits.values():
        for example in some:
            assert 0 < len(example.response) <= 1600
            assert len(example.prompt[0]["content"]) <= 1600


def test_twins_share_a_source():
    assert stdlib.source_of("_pydecimal") == stdlib.source_of("decimal") == "decimal"
    assert stdlib.source_of("email.message") == "email"


def test_code_is_completed_to_python():
    for example in code.examples("test"):
        question = example.prompt[0]["content"]
        head = question.partition("\n\n")[2]
        tree = ast.parse(f"{head}\n{example.response}")
        (node,) = tree.body
        function = node.body[0] if isinstance(node, ast.ClassDef) else node
        assert isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        assert ast.get_docstring(function)
        assert len(function.body) > 1


def make_module(source: str) -> stdlib.Module:
    return stdlib.Module("shapes", tuple(source.splitlines()), ast.parse(source))


SOURCE = '''"""Shapes and what they measure.

More of it.
"""

def area(width, height=1, *, unit="m"):
    """Compute the area of a rectangle. Units are kept.

    Returns the area as a number.
    """
    # Both count.
    return width * height

def _hidden(x):
    return x

class Circle:
    """A round shape of one radius."""

    @property
    def radius(self):
        """Radius of the circle."""
        return 1

    def grow(self, by):
        """Make the circle larger by a factor."""
        self.r *= by

    def shrink(self, by): return by

    def later(self):
        """Not yet."""
        raise NotImplementedError
'''


@pytest.fixture
def shapes(monkeypatch):
    module = make_module(SOURCE)
    monkeypatch.setattr(stdlib, "modules", lambda split: iter([module] if split == "train" else []))


def test_what_is_asked_of_code(shapes):
    pairs = [(one.prompt[0]["content"], one.response) for one in code.examples("train")]
    intro = "Complete this function of the module `shapes`.\n\n"
    assert pairs == [
        (
            intro + 'def area(width, height=1, *, unit="m"):\n'
            '    """Compute the area of a rectangle. Units are kept.\n\n'
            '    Returns the area as a number.\n    """',
            "    # Both count.\n    return width * height",
        ),
        (intro + "def _hidden(x):", "    return x"),
        (
            intro + 'class Circle:\n    @property\n    def radius(self):\n'
            '        """Radius of the circle."""',
            "        return 1",
        ),
        (
            intro + 'class Circle:\n    def grow(self, by):\n'
            '        """Make the circle larger by a factor."""',
            "        self.r *= by",
        ),
    ]  # fmt: skip


def test_what_is_asked_in_chat(shapes):
    answers = {}
    for one in chat.examples("train"):
        answers[one.prompt[0]["content"]] = one.response
    signature = "shapes.area(width, height=1, *, unit='m')"
    found = [answers[question] for question in answers if signature in question]
    assert found == [
        "`area` takes 3 arguments:\n- `width`\n- `height`, by default `1`\n"
        "- `unit`, by keyword only, by default `'m'`",
        "Compute the area of a rectangle. Units are kept.",
    ]
    assert answers["How do I compute the area of a rectangle?"] == (
        f"Use the function `area` of the module `shapes`:\n\nimport shapes\n\nresult = {signature}"
    )
    assert answers["How do I make the circle larger by a factor?"] == (
        "Use the method `grow` of the class `shapes.Circle`:\n\nshapes.Circle.grow(by)"
    )
    returns = [question for question in answers if "what does the function" in question]
    assert [answers[question] for question in returns] == ["It returns the area as a number."]
    assert not [question for question in answers if "_hidden" in question]
