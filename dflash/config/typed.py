"""Conversion of nodes to typed values and frozen dataclasses, with all problems collected."""

import dataclasses
import functools
import itertools
import operator
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Literal

from dflash.config import registry, schema
from dflash.config.merging import ConfigTree, Path, text_of
from dflash.config.strict_yaml import Malformed, Node

LONGEST_QUOTED = 100  # Characters of a JSON string in a message; no valid string is longer.
# Larger integers count as strings, as in YAML configs.
_LARGEST_JSON_INTEGER = 2**63 - 1
_SCALARS = (bool, int, float, str)


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


def build_from_json(
    content: Mapping[str, Any], schema_class: type, source: str
) -> tuple[Any, list[str], list[str]]:
    """Builds a dataclass from a mapping of a JSON file, with the checks of config keys.

    Args:
      content: Values by field name. Unknown names are ignored; null counts as missing.
      schema_class: Dataclass whose fields have bounds from `schema.option`.
      source: Name of the file, or of the mapping in it, for messages.
    Returns:
      The instance, valid only if both lists are empty; the names of missing fields; every other
      problem, one line each.
    """
    node = _group_node(content, schema_class, source)
    missing = [
        field.name
        for field in dataclasses.fields(schema_class)
        if field.name not in node.value and _required(field)
    ]
    if missing:
        return None, missing, []
    builder = Builder(ConfigTree(node, source), complete=True)
    built = builder.group(schema_class, node, ())
    return (None if built is INVALID else built), [], builder.problems


def _kinds(cls: type) -> dict[str, Any]:
    """Returns the types of a dataclass's fields, without those of its other attributes."""
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def _group_node(content: Mapping[str, Any], schema_class: type, source: str) -> Node:
    """Returns the fields of `schema_class` that a JSON mapping has, as config nodes."""
    kinds = _kinds(schema_class)
    known = {name: content[name] for name in kinds if content.get(name) is not None}
    return Node({name: _json_node(known[name], kinds[name], source) for name in known}, source)


def _json_node(value: Any, kind: Any, source: str) -> Node:
    """Converts a JSON value to a node; cuts values too long for a message."""
    options = (kind, *typing.get_args(kind))
    if isinstance(value, Mapping):
        group = next((option for option in options if dataclasses.is_dataclass(option)), None)
        return Node({}, source) if group is None else _group_node(value, group, source)
    if isinstance(value, list):
        rows = next((option for option in options if typing.get_origin(option) is tuple), None)
        if rows is None:
            return Node((), source)
        item = typing.get_args(rows)[0]
        return Node(tuple(_json_node(each, item, source) for each in value), source)
    if type(value) is int and abs(value) > _LARGEST_JSON_INTEGER:
        value = str(value)
    return Node(value[:LONGEST_QUOTED] if isinstance(value, str) else value, source)


class Builder:
    """Builds the dataclasses of one tree, and collects every problem.

    Attributes:
      unusable: Paths of the unusable values.
      problems: Every problem, one line each.
    """

    def __init__(
        self,
        tree: ConfigTree,
        *,
        complete: bool,
        known: Iterable[Path] = (),
        notice: Callable[..., str | None] = lambda path, value=None: None,
        ignores: Callable[[Path, Any], bool] = lambda path, value: False,
        choices: Mapping[type, Collection[str]] | None = None,
        choose: Callable[[type, Mapping[str, Node]], type | None] = lambda declared, content: (
            declared
        ),
    ):
        """Starts without problems.

        Args:
          complete: Every layer could be read. Otherwise missing keys are not reported.
          known: Paths of all keys, for suggestions in messages.
          notice: Returns a message that replaces the usual one, given the path of an unknown key,
            or a path and a value that it does not accept; None for the usual one.
          ignores: Returns whether an unknown path with a value is no problem.
          choices: Names that choose the schema of a group, by the class that a run declares for it.
          choose: Returns the schema of a group; None if its name is unusable.
        """
        self.tree = tree
        self.complete = complete
        self.notice, self.ignores = notice, ignores
        self.choices = choices or {}
        self.choose = choose
        self.unusable: set[Path] = set()
        self.problems: list[str] = []
        self.known = list(known)

    def group(self, declared: type, node: Node, path: Path) -> Any:
        """Builds the dataclass of a mapping and those nested in it."""
        content = node.value
        cls = self._chosen(declared, content, path)
        if cls is None:
            return INVALID
        kinds = _kinds(cls)
        # Keys may be known to a schema that is named in an unreadable file; do not report them.
        judged = self.complete or declared not in self.choices or "name" in content
        for key in content:
            if judged and key not in kinds and not self.ignores((*path, key), content[key].value):
                self._unknown((*path, key), kinds)
        values = {}
        usable = True
        for field in dataclasses.fields(cls):
            here = (*path, field.name)
            required = _required(field)
            if field.name in content:
                kind = kinds[field.name]
                value = self._value(kind, content[field.name], here, field.metadata)
                if value is INVALID:
                    self.unusable.add(here)
                    usable = usable and not required
                elif typing.get_origin(kind) is Mapping and not required:
                    values[field.name] = {**field.default_factory(), **value}
                else:
                    values[field.name] = value
            elif required:
                usable = False
                if self.complete:
                    expected = describe(kinds[field.name], field.metadata)
                    self._report(here, f"required: {expected}")
        if not usable:
            return INVALID
        group = cls(**values)
        if isinstance(group, schema.RecordsKeys):
            object.__setattr__(group, "given", frozenset(values))
        return group

    def _chosen(self, declared: type, content: Mapping[str, Node], path: Path) -> type | None:
        """Returns the schema that the group's `name` chooses; reports an unknown name."""
        cls = self.choose(declared, content)
        if cls is None:
            name = self._value(str, content["name"], (*path, "name"), {})
            if name is not INVALID:
                here = (*path, "name")
                unknown = f"unknown name {name!r}{registry.suggest(name, self.choices[declared])}"
                self._report(here, self.notice(here, name) or unknown)
        return cls

    def _value(self, declared: Any, node: Node, path: Path, bounds: Mapping[str, Any]) -> Any:
        """Converts a value to the type `declared`, or reports it and returns INVALID."""
        # A string on the command line, such as "Question: why?", may parse as a mapping. Its node
        # keeps the text as typed.
        mapping = isinstance(node.value, dict)
        kind, nullable = without_null(declared)
        origin = typing.get_origin(kind)
        if nullable and node.value is None:
            return None
        if mapping and dataclasses.is_dataclass(kind):
            return self.group(kind, node, path)
        if mapping and origin is Mapping:
            return self._mapping(kind, node.value, path, bounds)
        if origin is tuple:
            return self._items(declared, node, path, bounds)
        value = scalar(kind, node)
        if value is INVALID or not within(value, bounds):
            return self._mismatch(path, declared, node, bounds)
        return value

    def _items(self, declared: Any, node: Node, path: Path, bounds: Mapping[str, Any]) -> Any:
        """Converts a list; on the command line a single value stands for a list of one."""
        item = typing.get_args(without_null(declared)[0])[0]
        items, names = node.value, None
        if isinstance(items, tuple):
            names = [f"{path[-1]}[{index}]" for index in range(len(items))]
        elif node.raw is not None and (item is str or isinstance(items, _SCALARS)):
            items, names = (node,), [path[-1]]
        else:
            return self._mismatch(path, declared, node, bounds)
        values = [
            self._value(item, element, (*path[:-1], name), bounds)
            for element, name in zip(items, names, strict=True)
        ]
        return INVALID if INVALID in values else tuple(values)

    def _mapping(
        self, kind: Any, content: Mapping[str, Node], path: Path, bounds: Mapping[str, Any]
    ) -> Any:
        item = typing.get_args(kind)[1]
        values = {key: self._value(item, content[key], (*path, key), bounds) for key in content}
        bad = [key for key, value in values.items() if value is INVALID]
        self.unusable.update((*path, key) for key in bad)
        return {key: value for key, value in values.items() if key not in bad}

    def _mismatch(self, path: Path, declared: Any, node: Node, bounds: Mapping[str, Any]) -> Any:
        if notice := self.notice(path, text_of(node)):
            self._report(path, notice, node.source)
            return INVALID
        if type(node.value) is int and node.value > schema.INT32_MAX:
            bounds = {**bounds, "maximum": bounds.get("maximum") or schema.INT32_MAX}
        if type(node.value) is float and schema.FLOAT32_MAX < node.value < float("inf"):
            bounds = {**bounds, "maximum": bounds.get("maximum") or schema.FLOAT32_MAX}
        expected = describe(declared, bounds)
        got = f"{show(node)}{near(declared, node)}"
        self._report(path, f"expected {expected}, got {got}", node.source)
        return INVALID

    def _unknown(self, path: Path, siblings: Iterable[str]) -> None:
        """Reports an unknown key and suggests one of the same name elsewhere, or a similar one."""
        namesakes = [known for known in self.known if known[-1] == path[-1]]
        prefix = "".join(f"{name}." for name in path[:-1])
        hint = registry.suggest(path[-1], list(siblings), prefix=prefix)
        if tuple(".".join(path).split(".")) in self.known:
            hint = "; dotted keys are for the command line; nest mappings here"
        elif namesakes:
            nearest = max(namesakes, key=lambda known: _shared(known, path))
            hint = f"; did you mean {'.'.join(nearest)!r}?"
        self._report(path, self.notice(path) or f"unknown key{hint}")

    def _report(self, path: Path, message: str, source: str | None = None) -> None:
        self.problems.append(f"{source or self.tree.source(path)}: {'.'.join(path)}: {message}")


def _required(field: dataclasses.Field) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _shared(first: Path, second: Path) -> int:
    """Returns the length of the common prefix of two paths."""
    pairs = zip(first, second, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
