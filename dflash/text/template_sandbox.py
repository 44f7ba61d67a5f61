"""Jinja environment for untrusted chat templates, without access to Python and with a budget.

Time and memory are limited by counting operations instead of clocks or signals, so a template is
rejected on every machine or on none. Each iteration of a loop, each call of a macro, and each
character or list item that an operation produces reduces the budget of a rendering. Operations with
a large result, such as `'x' * 10**10`, are checked before they run.
"""

import datetime
import functools
import json
import operator
import re
from collections.abc import Iterable
from typing import Any

import jinja2
import jinja2.ext
import jinja2.filters
import jinja2.sandbox
from jinja2 import nodes
from jinja2.runtime import Context
from jinja2.visitor import NodeTransformer

MAX_SOURCE = 1_000_000  # characters per template
BUDGET = 20_000_000  # characters and list items per rendering
STEP_COST = 200  # cost of a loop iteration or macro call, in characters of equal time
MAX_EXPONENT = 100

_LEFT = "left of the budget"  # no template can use this name, as it has spaces
# These produce long texts from short ones or differ between calls, and chats do not need them.
_FORBIDDEN_FILTERS = "batch filesizeformat pprint random slice urlize wordwrap xmlattr".split()
_FORBIDDEN_METHODS = frozenset({"expandtabs", "format_map", "translate"})
_LONG_FORMAT = re.compile(r"\d{4}|\*|\{[^{}]*\{")  # %9999d, or a width that is an argument


def make_environment(date: datetime.date) -> jinja2.Environment:
    """Builds the environment that chat templates on the Hugging Face hub expect.

    Args:
      date: Date that `strftime_now` formats, at midnight.
    Source: transformers, `utils/chat_template_utils.py`.
    """
    environment = _Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, jinja2.ext.loopcontrols],
        optimized=False,  # constant folding would not be metered
        finalize=_finalize,
    )
    moment = datetime.datetime.combine(date, datetime.time())
    for name in _FORBIDDEN_FILTERS:
        del environment.filters[name]
    del environment.globals["lipsum"]
    environment.filters |= {
        "center": _center,
        "format": _format,
        "indent": _indent,
        "join": _join,
        "replace": _replace,
        "round": _round,
        "tojson": _to_json,
    }
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": moment.strftime}
    return environment


def compile_source(source: str, date: datetime.date) -> jinja2.Template:
    """Compiles a template in the environment of `make_environment`.

    Raises:
      TemplateError: The source is not a valid template, or too long.
    """
    if len(source) > MAX_SOURCE:
        raise jinja2.TemplateError(f"longer than {MAX_SOURCE:,} characters")
    return make_environment(date).from_string(source)


def render(template: jinja2.Template, **variables: Any) -> str:
    """Renders a template of `make_environment`.

    Raises:
      TemplateError: The template raises it or exceeds its budget. Templates may raise other errors.
    """
    return template.render({**variables, _LEFT: [BUDGET]})


def _pay(context: Context, amount: int) -> None:
    left = context.resolve(_LEFT)
    left[0] -= amount
    if left[0] < 0:
        raise jinja2.TemplateError(f"exceeds the budget of {BUDGET:,} characters and steps")


def _pay_for(context: Context, value: Any) -> Any:
    """Reduces the budget by the size of `value`, and returns `value`."""
    _pay(context, _size(value))
    return value


def _size(value: Any) -> int:
    if isinstance(value, int):
        return value.bit_length() // 8 + 1
    return len(value) if isinstance(value, str | list | tuple | dict) else 1


@jinja2.pass_context
def _finalize(context: Context, value: Any) -> str:
    return _pay_for(context, str(value))


def _check_affordable(size: int) -> None:
    """Raises TemplateError if a result of this size exceeds any budget."""
    if size > BUDGET:
        raise jinja2.TemplateError(f"exceeds the budget of {BUDGET:,} characters and steps")


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Sandbox of jinja2, with a budget."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _Metering().visit(super()._parse(source, name, filename))

    def pay(self, context: Context, amount: int) -> None:
        """Reduces the budget; loops and macros call this at the beginning of their bodies."""
        _pay(context, amount)

    def pay_for(self, context: Context, value: Any) -> Any:
        """Reduces the budget by the size of the result of a filter or concatenation."""
        return _pay_for(context, value)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            count, many = (left, right) if isinstance(left, int) else (right, left)
            if isinstance(count, int) and not isinstance(many, int | float):
                _check_affordable(count * _size(many))
        elif operator == "**" and isinstance(right, int | float) and right > MAX_EXPONENT:
            raise jinja2.TemplateError(f"exponent {right} is above {MAX_EXPONENT}")
        elif operator == "%":
            _check_format(left)
        return _pay_for(context, super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        if __obj in (__self.pay, __self.pay_for):
            return __obj(*args)
        name = getattr(__obj, "__name__", "")
        owner = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)
        if isinstance(owner, str):
            if name in _FORBIDDEN_METHODS:
                raise jinja2.TemplateError(f"{name}() is not allowed")
            if name == "replace":
                return _pay_for(__context, _replace(owner, *args, **kwargs))
            if name == "join":
                return _pay_for(__context, _join(args[0], owner))
            if name == "format":
                _check_format(owner)
            for width in args:  # width of ljust and similar methods
                _check_affordable(width if isinstance(width, int) else 0)
        return _pay_for(__context, super().call(__context, __obj, *args, **kwargs))


class _Metering(NodeTransformer):
    """Inserts the calls that reduce the budget into a template."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        parts = nodes.List(node.nodes, lineno=node.lineno)
        return self._wrap_pay_for(
            nodes.Filter(parts, "join", [], [], None, None, lineno=node.lineno)
        )

    def visit_Filter(self, node: nodes.Filter) -> nodes.Node:
        self.generic_visit(node)
        return self._wrap_pay_for(node) if node.node is not None else node  # None for filter blocks

    def visit_For(self, node: nodes.For) -> nodes.Node:
        return self._prepend_pay(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        return self._prepend_pay(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        return self._prepend_pay(node)

    def _prepend_pay(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        cost = STEP_COST + sum(len(text.data) for text in node.find_all(nodes.TemplateData))
        pay = self._call("pay", nodes.Const(cost), node.lineno)
        node.body.insert(0, nodes.ExprStmt(pay, lineno=node.lineno))
        return node

    def _wrap_pay_for(self, value: nodes.Expr) -> nodes.Node:
        return self._call("pay_for", value, value.lineno)

    def _call(self, name: str, argument: nodes.Expr, lineno: int) -> nodes.Call:
        arguments = [nodes.ContextReference(lineno=lineno), argument]
        method = nodes.EnvironmentAttribute(name, lineno=lineno)
        return nodes.Call(method, arguments, [], None, None, lineno=lineno)


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
    if isinstance(indent, int):
        _check_affordable(indent * MAX_EXPONENT)
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _replace(text: Any, old: str, new: str, count: int | None = -1) -> str:
    text = str(text)
    _check_affordable((len(text) + 1) * len(str(new)))
    return text.replace(str(old), str(new), -1 if count is None else count)


def _join(items: Iterable[Any], separator: str = "", attribute: str | int | None = None) -> str:
    items = list(items)
    if attribute is not None:
        path = [int(part) if part.isdigit() else part for part in str(attribute).split(".")]
        items = [functools.reduce(operator.getitem, path, item) for item in items]
    texts, separator = list(map(str, items)), str(separator)
    _check_affordable(len(texts) * len(separator) + sum(map(len, texts)))
    return separator.join(texts)


def _center(text: str, width: int = 80) -> str:
    _check_affordable(width)
    return str(text).center(width)


def _format(text: str, *args: Any, **kwargs: Any) -> str:
    _check_format(str(text))
    return str(text) % (kwargs or args)


def _check_format(text: Any) -> None:
    if isinstance(text, str) and _LONG_FORMAT.search(text):
        raise jinja2.TemplateError(f"format {text[:60]!r} is not allowed")


def _indent(text: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    _check_affordable(len(str(text)) * (width if isinstance(width, int) else len(width)))
    return jinja2.filters.do_indent(str(text), width, first, blank)


def _round(value: float, precision: int = 0, method: str = "common") -> float:
    _check_affordable(abs(precision) * BUDGET // MAX_EXPONENT)
    return jinja2.filters.do_round(value, precision, method)
