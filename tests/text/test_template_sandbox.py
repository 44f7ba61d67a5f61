"""Tests of the limits of chat templates."""

import datetime

import jinja2
import pytest

from dflash.text import template_sandbox

DATE = datetime.date(2024, 2, 29)
OVER = "exceeds the budget of 20,000,000 characters and steps"


def render(source, **variables):
    return template_sandbox.render(template_sandbox.compile_source(source, DATE), **variables)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ 'a' ~ 1 ~ none ~ absent ~ 'b' }}", "a1Noneb"),
        ("{{ ['a', 2]|join(', ') }}{{ '-'.join(['a', 'b']) }}{{ [{'x': 1}]|join(';', 'x') }}",
         "a, 2a-b1"),
        ("{{ 'aXX'|replace('X', '--') }}{{ 'aXX'.replace('X', '-', 1) }}", "a----a-X"),
        ("{% macro f(x) %}[{{ x }}]{% endmacro %}{% for i in range(3) if i != 1 %}{{ f(i) }}"
         "{{ loop.index }}{% else %}none{% endfor %}", "[0]1[2]2"),
        ("{% macro f() %}({{ caller(1) }}){% endmacro %}{% call(x) f() %}{{ x }}{% endcall %}",
         "(1)"),
        ("{% set ns = namespace(s='') %}{% for i in range(3) %}{% set ns.s = ns.s ~ i %}"
         "{% endfor %}{{ ns.s }}", "012"),
        ("{% filter upper %}abc{{ 1 }}{% endfilter %}{% set x | trim %} a {% endset %}{{ x }}",
         "ABC1a"),
        ("{{ 'a\nb'|indent(2) }}", "a\n  b"),
        ("{{ 3.14159|round(2) }} {{ 3.149|round(2, 'floor') }}", "3.14 3.14"),
        ("{{ 2**10 }} {{ -3 * 2 }} {{ [0] * 3 }} {{ '%s!' % 'a' }} {{ 7 % 4 }} {{ 'ab' * 2 }}",
         "1024 -6 [0, 0, 0] a! 3 abab"),
        ("{{ [1, 2]|tojson(indent=2) }}", "[\n  1,\n  2\n]"),
        ("{{ '%03d'|format(7) }}{{ '%(a)s'|format(a=1) }}{{ '{}-{a}'.format(1, a=2) }}", "00711-2"),
        ("{{ 'a'|center(3) }}{{ 'a'.rjust(2) }}{{ '7'.zfill(3) }}", " a  a007"),
        ("{{ [{'x': [{'y': 1}]}, {'x': [{'y': 2}]}]|join(';', 'x.0.y') }}", "1;2"),
    ],
)  # fmt: skip
def test_operations_give_what_jinja_gives(source, text):
    assert render(source) == text


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ 'x' * 10**10 }}", OVER),
        ("{{ 10**10 * 'x' }}", OVER),
        ("{{ ([0] * 10**7) + ([0] * 10**7) }}", OVER),
        ("{{ 2**(10**10) }}", "exponent 10000000000 is above 100"),
        ("{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}", OVER),
        ("{% set x %}{% for a in range(99999) %}{{ y }}{% endfor %}{% endset %}", OVER),
        ("{% for a in range(99999) %}" + "x" * 1000 + "{% endfor %}", OVER),
        ("{% macro f(n) %}{% if n %}{{ f(n - 1) ~ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
         OVER),
        ("{% set n = namespace(s=y) %}{% for i in range(40) %}{% set n.s = n.s~n.s %}{% endfor %}",
         OVER),
        ("{% set n = namespace(s=y) %}{% for i in range(40) %}{% set n.s = n.s+n.s %}{% endfor %}",
         OVER),
        ("{{ y|replace('y', y) }}", OVER),
        ("{{ y.replace('y', y) }}", OVER),
        ("{{ y|join(y) }}", OVER),
        ("{{ y.join(y) }}", OVER),
        ("{% set x = y|list %}{% set z = x|join(y[:2000]) %}", OVER),
        ("{{ y|indent(10**9) }}", OVER),
        ("{{ {'a': 1}|tojson(indent=10**9) }}", OVER),
        ("{{ 1|round(10**9) }}", OVER),
        ("{{ '%9999999999d' % 1 }}", "format '%9999999999d' is not allowed"),
        ("{{ '%*d' % (10**10, 1) }}", "format '%*d' is not allowed"),
        ("{{ '%9999999999d'|format(1) }}", "format '%9999999999d' is not allowed"),
        ("{{ '{:9999999999}'.format(1) }}", "format '{:9999999999}' is not allowed"),
        ("{{ '{:{}}'.format(1, 10**10) }}", "format '{:{}}' is not allowed"),
        ("{{ 'x'.ljust(10**10) }}", OVER),
        ("{{ 'x'|attr('center')(10**10) }}", OVER),
        ("{{ 'x'|center(10**10) }}", OVER),
        ("{{ '\t'.expandtabs(10**10) }}", "expandtabs() is not allowed"),
        ("{{ [1]|random }}", "No filter named 'random'."),
    ],
)  # fmt: skip
def test_limits(source, reason):
    with pytest.raises(jinja2.TemplateError) as caught:
        render(source, y="y" * 10_000)
    assert str(caught.value) == reason


def test_each_rendering_has_a_budget_of_its_own():
    template = template_sandbox.compile_source("{{ 'x' * 15000000 }}", DATE)
    for _ in range(3):
        with pytest.raises(jinja2.TemplateError, match="exceeds the budget"):
            template_sandbox.render(template)  # made, and written
    template = template_sandbox.compile_source("{{ y * 5000000 }}", DATE)
    assert all(len(template_sandbox.render(template, y="y")) == 5_000_000 for _ in range(3))


def test_long_conversations_are_within_the_budget():
    turns = [{"role": "user", "content": "word " * 4000}] * 200
    source = "{% for m in messages %}{{ '[' + m.role + ']' + m.content | trim ~ '\n' }}{% endfor %}"
    assert len(render(source, messages=turns)) == 200 * (len("[user]") + 5 * 4000)


def test_a_template_of_many_characters_is_refused():
    with pytest.raises(jinja2.TemplateError, match="longer than 1,000,000 characters"):
        render("x" * 1_000_001)
