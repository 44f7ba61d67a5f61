"""Tests of the process that renders chat templates, and of its limits."""

import copy
import datetime
import functools
import os
import pathlib
import signal
import threading

import pytest
from support.trained_tokenizers import failure

from dflash import errors
from dflash.text import template_process
from dflash.text.chat_template import ChatTemplate

DATE = datetime.date(2024, 2, 29)
TIME = "takes more than 1 s"
MEMORY = "takes more than 1024 MiB"
TEXT = "renders more than 20,000,000 characters"
JOINED = (  # a hundred times longer each time, since filling the last gigabyte takes time
    "{% set n = namespace(s=y) %}{% for i in range(60) %}{% set n.s = "
    + " ~ ".join(["n.s"] * 100)
    + " %}{% endfor %}"
)
NESTED = (
    "{% set n = namespace(x=[1], y=[1]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}"
    "{% set n.y = [n.y, n.y] %}{% endfor %}{{ n.x == n.y }}"
)


def render(source, **variables):
    return template_process.render(source, DATE, variables)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ 'a' ~ 1 ~ none ~ absent ~ 'b' }}", "a1Noneb"),
        ("{% macro f() %}({{ caller(1) }}){% endmacro %}{% call(x) f() %}{{ x }}{% endcall %}",
         "(1)"),
        ("{{ 'a\nb'|indent(2) }}", "a\n  b"),
        ("{{ [1, 2]|tojson(indent=2) }}", "[\n  1,\n  2\n]"),
        ("{{ '<é>'|tojson }}", '"<é>"'),
        ("{{ '%03d'|format(7) }}{{ '{}-{a}'.format(1, a=2) }}", "0071-2"),
        ("{{ '\ud800' }}\n{{ '\u2028' }}", "\ud800\n\u2028"),
    ],
)  # fmt: skip
def test_operations_give_what_jinja_gives(source, text):
    assert render(source) == text


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ 'x' * 10**10 }}", MEMORY),
        ("{{ 'a'.encode().ljust(10**10)|length }}", MEMORY),
        ("{{ (1).to_bytes(10**10, 'big')|length }}", MEMORY),
        ("{{ ''|indent(10**10, true, true)|length }}", MEMORY),
        ("{{ '%9999999999d' % 1 }}", MEMORY),
        ("{{ '\t'.expandtabs(2147483647) }}", MEMORY),
        (JOINED, MEMORY),
        ("{% for i in range(99999) %}{{ y }}{{ y }}{{ y }}{% endfor %}", MEMORY),
        ("{% for i in range(9999) %}{{ y }}{% endfor %}", TEXT),
        ("{{ [1]|random }}", "No filter named 'random'."),
        ("{{ lipsum() }}", "'lipsum' is undefined"),
        ("x" * 1_000_001, "longer than 1,000,000 characters"),
    ],
)  # fmt: skip
def test_limits(source, reason):
    assert failure(functools.partial(render, source, y="y" * 10_000)) == reason


@pytest.mark.parametrize(
    "source",
    [
        NESTED,  # in one comparison
        "{% for i in range(90000) %}{% set x = range(99999)|sum %}{% endfor %}",
        "{% set n = namespace(x=10**100) %}{% for i in range(40) %}{% set n.x = n.x * n.x %}"
        "{% endfor %}",
    ],
    ids=["comparison", "sum", "square"],
)
def test_time_is_limited(source):
    assert failure(render, source) == TIME
    assert render("next") == "next"


def test_long_conversations_are_within_the_limits():
    turns = [{"role": "user", "content": "word " * 4000}] * 200
    source = "{% for m in messages %}{{ '[' + m.role + ']' + m.content | trim ~ '\n' }}{% endfor %}"
    assert len(render(source, messages=turns)) == 200 * (len("[user]") + 5 * 4000)


def test_variables_are_values_of_json():
    assert failure(functools.partial(render, "x", y={1})).startswith(
        "TypeError: Object of type set"
    )


def test_threads_get_their_own_texts():
    texts: dict[int, str] = {}

    def work(number: int) -> None:
        texts[number] = render("{{ x }}" * 50, x=number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == {number: str(number) * 50 for number in range(16)}


def test_a_forked_process_renders_for_itself():
    assert render("a") == "a"
    child = os.fork()
    if not child:
        os._exit(render("{{ x }}", x="in the child") != "in the child")
    assert render("{{ x }}", x="in the parent") == "in the parent"
    assert os.waitpid(child, 0)[1] == 0


def test_a_process_that_was_killed_is_replaced(monkeypatch, tmp_path):
    assert render("a") == "a"
    process = template_process._renderer(os.getpid())._process
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert render("b") == "b"
    # One that ends meanwhile has not exceeded a limit.
    template_process._renderer(os.getpid())._end()
    monkeypatch.syspath_prepend(tmp_path)
    program = "import os, sys\ndef main():\n  sys.stdin.readline()\n  os.kill(os.getpid(), 9)"
    (tmp_path / "killed.py").write_text(program)
    with monkeypatch.context() as patches:
        patches.setattr(template_process, "_PROGRAM", "killed")
        with pytest.raises(errors.UserError, match="ended with -9; try again") as caught:
            render("c")
        assert not isinstance(caught.value, errors.InputError)
    assert render("c") == "c"


def test_an_interrupted_rendering_answers_no_other(monkeypatch):
    def interrupt(renderer, line):
        ask(renderer, line)
        raise KeyboardInterrupt

    ask = template_process._Renderer._ask
    with monkeypatch.context() as patches:
        patches.setattr(template_process._Renderer, "_ask", interrupt)
        with pytest.raises(KeyboardInterrupt):
            render("a")
    assert render("b") == "b"


def test_templates_can_be_copied(tmp_path):
    """A tokenizer holds one, and is copied with what holds it."""
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    template = ChatTemplate(pathlib.Path(tmp_path), {}, DATE)
    messages = [{"role": "user", "content": "hi"}]
    assert template.render(messages) == "hi"
    assert copy.deepcopy(template).render(messages) == "hi"
