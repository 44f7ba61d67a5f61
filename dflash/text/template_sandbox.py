"""Rendering of chat templates in jinja's sandbox.

As in transformers, templates of checkpoints reach neither Python nor files, and range() has at most
100,000 numbers. Their length and that of the rendered text are limited, and Python's recursion
limit bounds their nesting. Time and memory of expressions are not limited: a template may loop for
hours without output or build a huge value, so only load checkpoints that you trust so far.
"""

import datetime
import functools
import json
from collections.abc import Mapping
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
from jinja2 import nodes as ast

from dflash import errors

MAX_SOURCE = 1_000_000  # characters of a template
MAX_TEXT = 20_000_000  # characters of a rendered conversation


def render(source: str, date: datetime.date, variables: Mapping[str, Any]) -> str:
    """Renders a template, which may print the date, with variables of JSON's types."""
    try:
        return _limited(_compiled(source, date), variables)
    except jinja2.TemplateError as error:
        raise errors.InputError(str(error)) from error
    except Exception as error:  # a template may raise any exception
        raise errors.InputError(f"{type(error).__name__}: {error}") from error


def fields_read(source: str, date: datetime.date) -> set[str]:
    """Returns the names of the fields that a template may read; none if it cannot be parsed."""
    try:
        nodes = _make_environment(date).parse(source).find_all((ast.Getattr, ast.Const))
    except (jinja2.TemplateError, RecursionError):  # Rendering reports the problem.
        return set()
    return {node.attr if isinstance(node, ast.Getattr) else str(node.value) for node in nodes}


def _limited(template: jinja2.Template, variables: Mapping[str, Any]) -> str:
    """Renders a template piece by piece, so that an endless text ends at the limit."""
    pieces, length = [], 0
    for piece in template.generate(variables):
        length += len(piece)
        if length > MAX_TEXT:
            raise jinja2.TemplateError(f"renders more than {MAX_TEXT:,} characters")
        pieces.append(piece)
    return "".join(pieces)


@functools.lru_cache(maxsize=16)
def _compiled(source: str, date: datetime.date) -> jinja2.Template:
    if len(source) > MAX_SOURCE:
        raise jinja2.TemplateError(f"longer than {MAX_SOURCE:,} characters")
    return _make_environment(date).from_string(source)


def _make_environment(date: datetime.date) -> jinja2.Environment:
    """Builds the environment that chat templates on the Hugging Face hub expect.

    Source: transformers, `utils/chat_template_utils.py`.
    """
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, jinja2.ext.loopcontrols],
    )
    moment = datetime.datetime.combine(date, datetime.time())
    # These differ between calls.
    del environment.filters["random"], environment.globals["lipsum"]
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": moment.strftime}
    return environment


class _Generation(jinja2.ext.Extension):
    """Tag {% generation %}, which marks answers for training; only its body is rendered."""

    tags = frozenset({"generation"})

    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message):
    raise jinja2.TemplateError(message)


def _to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    # jinja2's own filter escapes <, > and & for HTML.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
