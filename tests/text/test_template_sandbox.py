"""Tests of rendering in jinja's sandbox, and of its limits."""

import copy
import datetime
import functools
import pathlib

import pytest
from support.trained_tokenizers import failure

from dflash.text import template_sandbox
from dflash.text.chat_template import ChatTemplate

DATE = datetime.date(2024, 2, 29)
TEXT = "renders more than 20,000,000 characters"


def render(source, **variables):
    return template_sandbox.render(source, DATE, variables)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{% for i in range(9999) %}{{ y }}{% endfor %}", TEXT),
        ("{% for i in range(99999) %}{% for j in range(99999) %}{{ y }}{% endfor %}{% endfor %}",
         TEXT),
        ("{{ range(100001) }}",
         "OverflowError: Range too big. The sandbox blocks ranges larger than MAX_RANGE (100000)."),
        ("{{ [1]|random }}", "No filter named 'random'."),
        ("{{ lipsum() }}", "'lipsum' is undefined"),
        ("{{ messages.append(1) }}", "access to attribute 'append' of 'list' object is unsafe."),
        ("x" * 1_000_001, "longer than 1,000,000 characters"),
    ],
)  # fmt: skip
def test_limits(source, reason):
    assert failure(functools.partial(render, source, y="y" * 10_000, messages=[])) == reason


def test_long_conversations_are_within_the_limits():
    turns = [{"role": "user", "content": "word " * 4000}] * 200
    source = "{% for m in messages %}{{ '[' + m.role + ']' + m.content | trim ~ '\n' }}{% endfor %}"
    assert len(render(source, messages=turns)) == 200 * (len("[user]") + 5 * 4000)


def test_templates_can_be_copied(tmp_path):
    """A tokenizer holds one, and is copied with what holds it."""
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    template = ChatTemplate(pathlib.Path(tmp_path), {}, DATE)
    messages = [{"role": "user", "content": "hi"}]
    assert template.render(messages) == "hi"
    assert copy.deepcopy(template).render(messages) == "hi"
