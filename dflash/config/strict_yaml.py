"""Restricted YAML without surprising types, for files and the command line.

PyYAML reads `1e-3` as a string, `off` as False, `12:30` as 750 and `010` as 8, and lets the second
of two equal keys win. Here only `true` and `false` are booleans; `null`, `~` and empty values are
null; numbers are decimal; everything else is a string; and a repeated key is an error.

Anchors, aliases and merge keys are errors: `base` is the only way to share keys, so that every
value has one place that a message can name. Tags are errors, too, so that only mappings, lists and
scalars are constructed.
"""

import dataclasses
import math
import re
from collections.abc import Callable
from typing import Any, ClassVar

import yaml

_RESOLVERS = (
    ("null", r"~|null|", "~n\0"),
    ("bool", r"true|false", "tf"),
    # Eighteen digits always fit into 64 bits; more digits are a string.
    ("int", r"[-+]?(?:0|[1-9][0-9]{0,17})", "-+0123456789"),
    (
        "float",
        r"[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+"
        r"|[-+]?\.inf|\.nan",
        "-+0123456789.",
    ),
)
_TAG = "tag:yaml.org,2002:"
MAX_DEPTH = 40  # Limit of nested mappings and lists; real configs have five levels.


@dataclasses.dataclass(frozen=True)
class Malformed:
    """Value of a command-line text that is not YAML; a string field accepts it."""


@dataclasses.dataclass(frozen=True)
class Node:
    """Value with its source.

    Attributes:
      value: None, bool, int, float, str, a tuple of nodes, a dict of nodes by key, or Malformed.
      source: "file:line", or "command line".
      raw: Text as typed, for values from the command line.
    """

    value: Any
    source: str
    raw: str | None = None


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: ClassVar[dict] = {}

    def __init__(self, stream):
        super().__init__(stream)
        self._depth = 0

    def compose_node(self, parent, index):
        event, problem = self.peek_event(), None
        if event.anchor is not None:
            problem = "anchors and aliases are not supported; share keys through `base`"
        elif getattr(event, "tag", None) is not None:
            problem = f"tags are not supported, got {event.tag}"
        elif self._depth > MAX_DEPTH:
            problem = f"nested deeper than {MAX_DEPTH} levels"
        if problem:
            raise yaml.composer.ComposerError(problem=problem, problem_mark=event.start_mark)
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node


class _Dumper(yaml.SafeDumper):
    """Quotes every string that this module, or any YAML 1.1 reader, would read as another type."""

    def ignore_aliases(self, data):
        return True


for _name, _pattern, _first in _RESOLVERS:
    for _class in (_Loader, _Dumper):
        _first_characters = ["" if character == "\0" else character for character in _first]
        _class.add_implicit_resolver(
            _TAG + _name, re.compile(rf"(?:{_pattern})\Z"), _first_characters
        )
_Dumper.add_representer(
    str,
    # Only the double-quoted style preserves every control character and line separator.
    lambda dumper, text: dumper.represent_scalar(
        _TAG + "str", text, style=None if text.isprintable() else '"'
    ),
)
_Dumper.add_representer(
    list,
    lambda dumper, data: dumper.represent_sequence(_TAG + "seq", data, flow_style=True),
)


def parse(text: str, name: str) -> tuple[Node | None, list[str]]:
    """Parses a YAML document that is a mapping.

    Args:
      name: Name of the document in sources and problems.
    Returns:
      The mapping, None if the text cannot be parsed; every problem found.
    """
    problems: list[str] = []
    try:
        root = yaml.compose(text, Loader=_Loader)
    except yaml.YAMLError as error:
        return None, [f"{_place(error, name)}: not valid YAML: {_reason(error)}"]
    if root is None:
        return Node({}, name), []
    if not isinstance(root, yaml.MappingNode):
        return None, [f"{name}: expected a mapping of keys to values, got {_kind(root)}"]
    return _convert(root, lambda line: f"{name}:{line}", problems), problems


def parse_value(text: str, source: str) -> Node:
    """Parses the value of a `key=value` argument; text that is not YAML becomes `Malformed`."""
    problems: list[str] = []
    try:
        root = yaml.compose(text, Loader=_Loader)
    except yaml.YAMLError:
        return Node(Malformed(), source, text)
    value = None
    if root is not None:
        value = _convert(root, lambda line: source, problems, typed=True).value
    # PyYAML reads a lone comment or document marker as null; do not accept them.
    if problems or (value is None and text.strip() not in ("", "~", "null")):
        value = Malformed()
    return Node(value, source, text)


def dump(content: dict[str, Any]) -> str:
    """Writes plain dicts, lists and scalars so that `parse` returns the same content."""
    return yaml.dump(content, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=math.inf)


def _convert(
    node: yaml.Node,
    where: Callable[[int], str],
    problems: list[str],
    *,
    typed: bool = False,
    line: int | None = None,
) -> Node:
    """Converts PyYAML's node to ours.

    Args:
      where: Maps a line number to a source.
      problems: List to which problems are appended.
      typed: Keep the text of scalars as `raw`.
      line: Line number for the source; None is the first line of the node.
    """
    source = where(line or node.start_mark.line + 1)
    if isinstance(node, yaml.ScalarNode):
        return Node(_scalar(node), source, node.value if typed else None)
    if isinstance(node, yaml.SequenceNode):
        items = (_convert(item, where, problems, typed=typed) for item in node.value)
        return Node(tuple(items), source)
    content: dict[str, Node] = {}
    lines: dict[str, int] = {}
    for key, value in node.value:
        line = key.start_mark.line + 1
        if not isinstance(key, yaml.ScalarNode):
            problems.append(f"{where(line)}: a key must be a plain name, got {_kind(key)}")
        elif key.value in content:
            first = lines[key.value]
            problems.append(f"{where(line)}: duplicate key {key.value!r}, first on line {first}")
        else:
            lines[key.value] = line
            content[key.value] = _convert(value, where, problems, typed=typed, line=line)
    return Node(content, source)


def _scalar(node: yaml.ScalarNode) -> Any:
    text = node.value
    match node.tag.removeprefix(_TAG):
        case "null":
            return None
        case "bool":
            return text == "true"
        case "int":
            return int(text)
        case "float":
            # Python spells inf and nan without YAML's dot.
            return float(re.sub(r"\.(?=inf|nan)", "", text))
    return text


def _kind(node: yaml.Node) -> str:
    if isinstance(node, yaml.ScalarNode):
        return "a single value"
    return "a list" if isinstance(node, yaml.SequenceNode) else "a mapping"


def _place(error: yaml.YAMLError, name: str) -> str:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    return f"{name}:{mark.line + 1}" if mark else name


def _reason(error: yaml.YAMLError) -> str:
    """Returns PyYAML's message as one line, without excerpt and positions."""
    parts = (getattr(error, name, None) for name in ("problem", "context", "reason"))
    return " ".join(next(filter(None, parts), str(error)).split())
