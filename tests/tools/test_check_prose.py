"""The prose checker finds what style.md excludes, and passes what it asks for."""

import pytest
from support import scripts

check_prose = scripts.load("tools/check_prose.py")


def problems(tmp_path, source):
    path = tmp_path / "sample.py"
    path.write_text(source, encoding="utf-8")
    return [problem.text for problem in check_prose.problems(path)]


def page_problems(tmp_path, text, folder="."):
    path = tmp_path / folder / "page.md"
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return [problem.text for problem in check_prose.problems(path)]


def function(docstring):
    return f'def f():\n    """{docstring}"""\n'


@pytest.mark.parametrize(
    ("summary", "problem"),
    [
        ("What the rows attend to.", "'What'"),
        ("Whether the run fits.", "'Whether'"),
        ("Rows of a batch.", "not with a verb"),
        ("The rows of a batch.", "not with a verb"),
        ("Tokens that were accepted.", "not with a verb"),
        ("returns x.", "capital"),
        ("Returns x", "period"),
        ("Returns x. It is new.", "more than one sentence"),
    ],
)
def test_a_bad_summary_is_found(tmp_path, summary, problem):
    assert any(problem in text for text in problems(tmp_path, function(summary)))


def test_a_good_page_passes(tmp_path):
    text = "# Decoding\n\nAfter this page you can decode.\n\n```sh\nwhoever\n```\n\n## Keys\n"
    assert page_problems(tmp_path, text) == []
    assert page_problems(tmp_path, "# Speed\n\nIt is 2 × as fast.\n", "results") == []
    card = "---\nlicense: mit\n---\n\n# A drafter\n\nDrafts tokens.\n"
    assert page_problems(tmp_path, card) == []


@pytest.mark.parametrize(
    ("text", "folder", "problem"),
    [
        ("No title.\n", ".", "does not start with a title"),
        ("# Keys\n\n| key |\n|---|\n", ".", "no sentence follows"),
        ("# Speed\n\nIt is fast.\n\nIt is 2 × as fast.\n", "results", "no figure"),
        ("# Keys\n\nLists keys.\n\n## What helps\n", ".", "noun clause"),
        ("# Keys\n\nLists keys for whoever needs them.\n", ".", "'whoever'"),
    ],
)
def test_a_bad_page_is_found(tmp_path, text, folder, problem):
    (found,) = page_problems(tmp_path, text, folder)
    assert problem in found
