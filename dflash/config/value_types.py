"""Types of config values: conversion, bounds, and the words in which messages describe them."""

import functools
import operator
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal

from dflash.config import registry, schema
from dflash.config.merging import text_of
from dflash.config.strict_yaml import Malformed, Node

_UNIONS = (types.UnionType, typing.Union)  # `X | Y` and Union[X, Y]
INVALID = object()  # Stands for a value whose problem has been reported.
_NOUNS = {
    int: ("an integer", "integers"),
    float: ("a number", "numbers"),
    str: ("a string", "strings"),
    bool: ("true or false", "booleans"),
}


def members(kind: Any) -> tuple[Any, ...]:
    """Returns the members of a union, None's type included, or the type itself."""
    return typing.get_args(kind) if typing.get_origin(kind) in _UNIONS else (kind,)


def without_null(kind: Any) -> tuple[Any, bool]:
    """Returns (X, True) for `X | None`, where X may be a union, and (kind, False) otherwise."""
    inner = [option for option in members(kind) if option is not type(None)]
    if len(inner) == len(members(kind)):
        return kind, False
    return functools.reduce(operator.or_, inner), True


def scalar(kind: Any, node: Node) -> Any:
    """Converts a node to a scalar type; integers count as numbers, booleans do not."""
    value, text = node.value, text_of(node)
    if len(members(kind)) > 1:
        values = (scalar(option, node) for option in members(kind))
        return next((value for value in values if value is not INVALID), INVALID)
    if typing.get_origin(kind) is Literal:
        return text if isinstance(text, str) and text in typing.get_args(kind) else INVALID
    if kind is str:
        return text if isinstance(text, str) else INVALID
    if kind is float and type(value) in (int, float):
        fits = abs(value) <= schema.FLOAT32_MAX  # False for NaN.
        return float(value) + 0.0 if fits else INVALID  # Adding 0.0 turns -0.0 into 0.0.
    return value if type(value) is kind else INVALID


def within(value: Any, bounds: Mapping[str, Any]) -> bool:
    low, high = bounds.get("minimum"), bounds.get("maximum")
    if isinstance(value, str):
        return True
    if high is None and type(value) is int:
        high = schema.INT32_MAX
    return (low is None or value >= low) and (high is None or value <= high)


def describe(declared: Any, bounds: Mapping[str, Any], number: int = 0) -> str:
    """Describes the values that a key accepts, in the plural if `number` is 1."""
    kind, nullable = without_null(declared)
    origin, options = typing.get_origin(kind), typing.get_args(kind)
    if kind in _NOUNS:
        words = _NOUNS[kind][number] + _range(bounds)
    elif len(members(kind)) > 1:
        words = " or ".join(describe(option, bounds, number) for option in options)
    elif origin is Literal and len(options) == 1:
        words = options[0]
    elif origin is Literal:
        words = f"one of {', '.join(options)}"
    elif origin is tuple:
        words = f"{('a list', 'lists')[number]} of {describe(options[0], bounds, 1)}"
    elif origin is Mapping:
        words = f"a mapping to {describe(options[1], bounds, 1)}"
    else:
        words = "a mapping"
    return f"{words} or null" if nullable else words


def _range(bounds: Mapping[str, Any]) -> str:
    low, high = (
        f"{bound:g}" if isinstance(bound, float) else bound
        for bound in (bounds.get("minimum"), bounds.get("maximum"))
    )
    if low is not None and high is not None:
        return f" in [{low}, {high}]"
    if low is not None:
        return f" >= {low}"
    return "" if high is None else f" <= {high}"


def show(node: Node) -> str:
    """Returns a value in the form in which messages quote it."""
    value = node.value
    if isinstance(value, Malformed):
        return f"{node.raw!r} (not valid YAML)"
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, tuple):
        return "a list"
    if value is None:
        return "null" if node.raw != "" else "nothing"
    return str(value).lower() if isinstance(value, bool) else repr(value)


def near(declared: Any, node: Node) -> str:
    """Returns "; did you mean 'x'?" if the value is similar to one of the key's choices."""
    kind = without_null(declared)[0]
    choices = [choice for member in members(kind) for choice in typing.get_args(member)]
    fixed = [choice for choice in choices if isinstance(choice, str)]
    return registry.suggest(str(text_of(node)), fixed, exhaustive=False)
