"""Lark rules of values in notations other than JSON.

Strings stand as they are between two special tokens, names without quotes and in the order of the
alphabet, and the rest as in JSON.
"""

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from dflash import errors
from dflash.text.chat_formats.rules import TargetTokens
from dflash.text.grammar_compiler import inline_schema

_ANY_NAME = r"[^:,{}\[\]<>\"\n]{1,64}"
_DAY = "0[1-9]|[12][0-9]"
_MONTHS = f"(0[13578]|1[02])-({_DAY}|3[01])|(0[469]|11)-({_DAY}|30)|02-({_DAY})"
_DATE = f"[1-9][0-9]{{3}}-({_MONTHS})"
_HOUR = "([01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_HOUR}:[0-5][0-9](\.[0-9]{{1,6}})?(Z|[+-]{_HOUR})"
_SLASH = re.compile(r"(?<!\\)/")
# Parts of a regular expression without alternatives of the whole.
_ATOMS = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)
_GROUPS = re.compile(r"\([^()]*\)")
# Regular expressions of strings by their format in JSON Schema.
_FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "email": r"[a-zA-Z0-9_+-]+(\.[a-zA-Z0-9_+-]+)*@[a-z0-9]+(-[a-z0-9]+)*(\.[a-z0-9]+)+",
    "uuid": "[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}",
    "uri": r"[a-z][a-z0-9+.-]*:[!#$&-;=?-Z_a-z~]+",
}
_NUMERIC = frozenset("minimum maximum exclusiveMinimum exclusiveMaximum multipleOf".split())
# Keywords of a schema by the type of the value.
_KEYWORDS: Mapping[str, frozenset[str]] = {
    "object": frozenset(("properties", "required", "additionalProperties")),
    "array": frozenset(("items", "minItems", "maxItems")),
    "string": frozenset(("pattern", "minLength", "maxLength", "format")),
    "number": _NUMERIC,
    "boolean": frozenset(),
    "null": frozenset(),
}
_LIMITS = frozenset().union(*_KEYWORDS.values())
_UNSUPPORTED = frozenset(
    "allOf oneOf not if then else dependentRequired dependentSchemas dependencies contains "
    "uniqueItems prefixItems additionalItems patternProperties propertyNames minProperties "
    "maxProperties unevaluatedProperties unevaluatedItems $dynamicRef $recursiveRef".split()
)


class Values:
    """Lark rules of values, one for each schema and some for their parts.

    Attributes:
      lines: The rules.
    """

    def __init__(self, prefix: str, quote: str, root: Mapping[str, Any], tokens: TargetTokens):
        """Begins without rules.

        Args:
          prefix: Beginning of the names of rules, which ends with a number.
          quote: Token around strings.
          root: Closed schema that has the definitions of all others.
        """
        if not tokens.is_special(quote):
            raise errors.InputError(f"the target has no special token {quote!r} around strings")
        self.lines: list[str] = []
        self._prefix, self._quote, self._root, self._tokens = prefix, quote, root, tokens
        self._names: dict[str, str] = {}

    def rule(self, schema: Any) -> str:
        """Returns the name of the rule of a closed schema, which some value matches."""
        schema = {} if schema is True else schema
        key = json.dumps(schema)
        if key not in self._names:
            self._names[key] = f"{self._prefix}_v{len(self._names)}"
            self.lines.append(f"{self._names[key]}: {self._expression(schema)}")
        return self._names[key]

    def _part(self, expression: str, prefix: str = "p") -> str:
        """Adds a rule, or a terminal if the prefix is in upper case; returns its name."""
        name = f"{prefix}_{self._prefix.rpartition('_')[2]}_{len(self.lines)}"
        self.lines.append(f"{name}: {expression}")
        return name

    def _expression(self, schema: Any) -> str:
        if not _is_possible(schema):
            raise errors.InputError("no value matches")
        if "$ref" in schema:
            return self.rule(self._root["$defs"][schema["$ref"].rpartition("/")[2]])
        if "anyOf" in schema:
            return " | ".join(map(self.rule, filter(_is_possible, schema["anyOf"])))
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        unsupported = _UNSUPPORTED | (frozenset() if values is None else _LIMITS)
        if keywords := sorted(schema.keys() & unsupported):
            problem = "is not supported by the target's format of calls"
            raise errors.InputError(f"{keywords[0]!r} {problem}")
        kinds = schema.get("type") or _kinds_of(schema)
        kinds = [kinds] if isinstance(kinds, str) else kinds
        if values is None:
            return " | ".join(getattr(self, f"_{kind}")(schema) for kind in kinds)
        written = [self._written(value) for value in values if _kinds_of_value(value) & {*kinds}]
        if not written:
            raise errors.InputError("enum: no value has the type")
        return " | ".join(map(self._tokens.expression, written))

    def _written(self, value: Any) -> str:
        """Returns a JSON value in the notation."""
        if isinstance(value, str):
            return f"{self._quote}{value}{self._quote}"
        if isinstance(value, list):
            return f"[{','.join(map(self._written, value))}]"
        if isinstance(value, dict):
            names = sorted(value, key=str.lower)
            return f"{{{','.join(f'{name}:{self._written(value[name])}' for name in names)}}}"
        return json.dumps(value)

    def _object(self, schema: Mapping[str, Any]) -> str:
        others, required = schema.get("additionalProperties", True), schema.get("required", ())
        properties = dict.fromkeys(required, others) | schema.get("properties", {})
        firsts, following = [], ""
        if _is_possible(others):
            taken = "".join(f" & ~{json.dumps(name)}" for name in properties)
            pair = f'{self._part(f"/{_ANY_NAME}/{taken}", "NAME")} ":" {self.rule(others)}'
            firsts, following = [f'{pair} ("," {pair})*'], self._part(f'("," {pair})*')
        for name in sorted(properties, key=str.lower, reverse=True):
            if not _is_possible(properties[name]) and name not in required:
                continue
            if not name or ":" in name or self._quote in name:
                raise errors.InputError(
                    f"{name!r} cannot be a name in the target's format of calls"
                )
            pair = f"{self._tokens.expression(f'{name}:')} {self.rule(properties[name])}"
            is_required = name in required
            firsts = [f"{pair} {following}", *(() if is_required else firsts)]
            following = self._part(f'("," {pair}){"" if is_required else "?"} {following}')
        pairs = f"({' | '.join(firsts)}){'' if required else '?'}" if firsts else ""
        return f'"{{" {pairs} "}}"'

    def _array(self, schema: Mapping[str, Any]) -> str:
        items, least = schema.get("items", True), schema.get("minItems", 0)
        most = schema.get("maxItems", math.inf) if _is_possible(items) else 0
        if most < max(least, 1):
            return '"[" "]"' if most >= least else self._expression(False)
        item = self.rule(items)
        count = f"{{{max(least - 1, 0)},{'' if most == math.inf else most - 1}}}"
        return f'"[" ({item} ("," {item}){count}){"" if least else "?"} "]"'

    def _string(self, schema: Mapping[str, Any]) -> str:
        patterns = []
        if "pattern" in schema:
            patterns.append(_unanchored(schema["pattern"]))
        if "format" in schema:
            if schema["format"] not in _FORMATS:
                problem = "is not supported by the target's format of calls"
                raise errors.InputError(f"format {schema['format']!r} {problem}")
            patterns.append(_FORMATS[schema["format"]])
        if schema.keys() & {"minLength", "maxLength"}:
            least, most = schema.get("minLength", 0), schema.get("maxLength", "")
            patterns.append(f"(?s:.{{{least},{most}}})")
        quote = self._tokens.expression(self._quote)
        if not patterns:
            return f"{quote} TEXT {quote}"
        escaped_patterns = (_SLASH.sub(r"\/", pattern) for pattern in patterns)
        expression = " & ".join(f"/{pattern}/" for pattern in escaped_patterns)
        return f"{quote} {self._part(expression, 'STRING')} {quote}"

    def _number(self, schema: Mapping[str, Any], kind: str = "number") -> str:
        limits = {name: schema[name] for name in schema.keys() & _NUMERIC}
        return inline_schema({"type": kind} | limits)

    def _integer(self, schema: Mapping[str, Any]) -> str:
        return self._number(schema, "integer")

    def _boolean(self, schema: Mapping[str, Any]) -> str:
        return '"true" | "false"'

    def _null(self, schema: Mapping[str, Any]) -> str:
        return '"null"'


def _is_possible(schema: Any) -> bool:
    """Returns whether a closed schema matches any value, as far as it says that itself."""
    if isinstance(schema, bool):
        return schema
    properties = schema.get("properties", {})
    named = all(_is_possible(properties.get(name, True)) for name in schema.get("required", ()))
    return named and ("anyOf" not in schema or any(map(_is_possible, schema["anyOf"])))


def _kinds_of(schema: Mapping[str, Any]) -> list[str]:
    """Returns the types that the keywords of a schema are about; all if there are none."""
    kinds = [kind for kind, keywords in _KEYWORDS.items() if keywords & schema.keys()]
    return kinds or [*_KEYWORDS]


def _kinds_of_value(value: Any) -> set[str]:
    if isinstance(value, bool) or value is None:
        return {"null" if value is None else "boolean"}
    if isinstance(value, int | float):
        return {"number"} | ({"integer"} if value == int(value) else set())
    return {{str: "string", list: "array"}.get(type(value), "object")}


def _unanchored(pattern: str) -> str:
    """Returns a regular expression of the whole texts in which a pattern is found."""
    outer = _ATOMS.sub("", pattern)
    while _GROUPS.search(outer):
        outer = _GROUPS.sub("", outer)
    if "|" in outer and outer.strip("^$") != outer:
        raise errors.InputError(f"pattern: put the alternatives of {pattern!r} into parentheses")
    start = "" if pattern.startswith("^") else "(?s:.*)"
    end = "" if outer.endswith("$") else "(?s:.*)"
    pattern = pattern.removeprefix("^")
    return f"{start}({pattern[:-1] if not end else pattern}){end}"
