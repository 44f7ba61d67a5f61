"""JSON schemas of the arguments of calls.

Pydantic and OpenAPI describe an object in several parts: `$ref`, `allOf`, `anyOf`, `oneOf`, and
properties beside them. Here the parts are merged, so that formats can write the properties one by
one, and so that an object can be closed: it then has no other properties than those that some part
names, unless a part says which others there may be.
"""

import functools
import itertools
import json
import math
import urllib.parse
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

from dflash import errors
from dflash.text.grammar_compiler import ANNOTATIONS

MAX_ALTERNATIVES = 64  # Combinations of several anyOf and oneOf.
MAX_SCHEMAS = 20_000  # Visits of schemas, which take 0.2 s.
_MAX_COMPARED = 4  # Depth to which required properties of two schemas are compared.
_JOINS = frozenset(("$ref", "allOf", "anyOf", "oneOf"))
_IGNORED = ANNOTATIONS | {"$defs", "definitions", "$id", "$schema"}
_KINDS = ("null", "boolean", "integer", "number", "string", "array", "object")
_NAMES = frozenset(("properties", "patternProperties", "additionalProperties"))
_ITEMS = frozenset(("items", "prefixItems", "additionalItems"))
_PARENTS = _NAMES | _ITEMS  # Keywords with schemas of other values.
_TYPES: Mapping[str, Any] = {
    **dict.fromkeys(("properties", "patternProperties"), Mapping),
    **dict.fromkeys(("required", "enum", "allOf", "anyOf", "oneOf", "prefixItems"), list),
    **dict.fromkeys(("minProperties", "maxProperties"), int),
    **{"$ref": str, "format": str, "type": str | list},
}
# Formats of JSON Schema, of which grammars support some. Any other format is an annotation.
_FORMATS = frozenset(
    "date-time date time duration email hostname ipv4 ipv6 uri uuid idn-email idn-hostname iri "
    "uri-reference iri-reference uri-template json-pointer relative-json-pointer regex".split()
)
# Schema without `$ref`, `anyOf` and `oneOf`; its `allOf` has what cannot be merged.
Flat = dict[str, Any]


def closed(schema: Any, root: Mapping[str, Any]) -> Any:
    """Returns the closed form of a schema, which refers to nothing outside of it.

    Args:
      root: Schema of all arguments, in which references are looked up.
    Raises:
      InputError: The schema is malformed or too large, or joins parts in an unsupported way.
    """
    closing = _Closing(root)
    form = closing.closed(schema)
    definitions = dict(closing.definitions())
    dialect = {name: root[name] for name in ("$schema",) if name in root}
    return {**form, "$defs": definitions, **dialect} if isinstance(form, dict) else form


def alternatives(schema: Any, root: Mapping[str, Any]) -> list[Flat]:
    """Returns closed schemas of which a value must match one; see `closed`."""
    return _Closing(root).alternatives(schema)


class _Closing:
    """Closing of schemas that refer to one another."""

    def __init__(self, root: Mapping[str, Any]):
        self._root = root
        # Alternatives of joined schemas, each of which becomes a definition, since a recursive type
        # contains itself.
        self._joined: list[list[Flat]] = []
        self._places: dict[str, int] = {}  # by the JSON of the schema
        self._visits = 0

    def definitions(self) -> Iterator[tuple[str, Any]]:
        """Yields names and closed forms of all joined schemas; there may be more within them."""
        for place in itertools.count():
            if place == len(self._joined):
                return
            yield str(place), self._form(self._joined[place])

    def closed(self, schema: Any) -> Any:
        if isinstance(schema, bool) or _matches_nothing(schema):
            return schema is True
        schema = self._plain(schema)
        if schema.keys() == {"anyOf"}:
            return {"anyOf": [self.closed(item) for item in schema["anyOf"]]}
        if not _JOINS & schema.keys():
            return self._form(self.alternatives(schema))
        key = json.dumps(schema)
        if key not in self._places:
            flats = self.alternatives(schema)
            if not any(_PARENTS & flat.keys() for flat in flats):
                return self._form(flats)
            self._places[key] = len(self._joined)
            self._joined.append(flats)
        return {"$ref": f"#/$defs/{self._places[key]}"}

    def _form(self, flats: list[Flat]) -> Flat:
        forms = [self._with_closed_parts(flat) for flat in flats]
        return forms[0] if len(forms) == 1 else {"anyOf": forms}

    def alternatives(self, schema: Any) -> list[Flat]:
        is_evaluated = isinstance(schema, Mapping) and schema.get("unevaluatedProperties") is False
        if is_evaluated:
            schema = _without(schema, ("unevaluatedProperties",))
        objects = (_closed_object(flat, is_evaluated) for flat in self._flat(schema))
        return list(itertools.chain.from_iterable(map(_counted, objects)))

    def _with_closed_parts(self, flat: Flat) -> Flat:
        form = dict(flat)
        if "allOf" in flat:
            form["allOf"] = [*map(self._with_closed_parts, flat["allOf"])]
        for name in flat.keys() & {"properties", "patternProperties"}:
            form[name] = {key: self.closed(item) for key, item in flat[name].items()}
        for name in flat.keys() & _PARENTS - {"properties", "patternProperties"}:
            is_list = isinstance(flat[name], list)
            form[name] = [*map(self.closed, flat[name])] if is_list else self.closed(flat[name])
        return form

    def _flat(self, schema: Any, passed: frozenset[str] = frozenset()) -> list[Flat]:
        """Returns schemas of which a value must match one; `passed` has the references so far."""
        if isinstance(schema, bool) or _matches_nothing(schema):
            return [{}] if schema is True else []
        schema = self._plain(schema)
        parts = [[_without(schema, _JOINS)]]
        if "$ref" in schema:
            reference = schema["$ref"]
            if reference in passed:
                raise errors.InputError(f"$ref: {reference!r} consists of itself")
            parts.append(self._flat(self._target(reference), passed | {reference}))
        parts += [self._flat(item, passed) for item in schema.get("allOf", ())]
        for keyword in schema.keys() & {"anyOf", "oneOf"}:
            choices = [self._flat(item, passed) for item in schema[keyword]]
            if keyword == "oneOf" and not self._exclude_each_other(choices, parts[0][0]):
                raise errors.InputError("oneOf: several may match the same value; use anyOf")
            parts.append(list(itertools.chain.from_iterable(choices)))
        sizes = [*map(len, parts)]
        if math.prod(sizes) > max(MAX_ALTERNATIVES, *sizes):
            raise errors.InputError(f"more than {MAX_ALTERNATIVES} combinations of joined schemas")
        merged = map(self._merged, itertools.product(*parts))
        return [flat for flat in merged if flat.get("type") != []]

    def _merged(self, parts: tuple[Flat, ...]) -> Flat:
        self._visit(sum(len(part.get("properties", ())) for part in parts[1:]))
        return functools.reduce(_merged, parts)

    def _visit(self, count: int) -> None:
        self._visits += count
        if self._visits > MAX_SCHEMAS:
            raise errors.InputError(f"more than {MAX_SCHEMAS} schemas; make it simpler")

    def _exclude_each_other(self, choices: list[list[Flat]], siblings: Flat) -> bool:
        beside = [[_merged(siblings, flat) for flat in choice] for choice in choices]
        return all(self._are_disjoint(*pair) for pair in itertools.combinations(beside, 2))

    def _are_disjoint(self, first: list[Flat], second: list[Flat], depth: int = 0) -> bool:
        """Returns whether no value matches a schema of each list, for a simple reason."""
        pairs = itertools.product(first, second)
        return depth < _MAX_COMPARED and all(self._differ(*pair, depth) for pair in pairs)

    def _differ(self, first: Flat, second: Flat, depth: int) -> bool:
        kinds = _kinds(first, second)
        names = {*first.get("required", ()), *second.get("required", ())} if kinds else ()
        pairs = ([self._flat(_property(flat, name)) for flat in (first, second)] for name in names)
        return (
            _exclude(first, second)
            or not kinds
            or (kinds == ["object"] and any(self._are_disjoint(*pair, depth + 1) for pair in pairs))
        )

    def _target(self, reference: str) -> Any:
        """Returns the schema that a reference names."""
        start, *path = reference.split("/")
        target = self._root if start == "#" else None
        try:
            for key in map(urllib.parse.unquote, path):
                key = key.replace("~1", "/").replace("~0", "~")
                target = target[int(key) if isinstance(target, list) else key]
        except (LookupError, ValueError, TypeError):
            target = None
        if not isinstance(target, Mapping | bool):
            raise errors.InputError(f"$ref: {reference!r} names no schema of these parameters")
        return target

    def _plain(self, schema: Any) -> Flat:
        """Returns a schema without keywords that have no effect; raises if it is malformed."""
        self._visit(1)
        if not isinstance(schema, Mapping):
            raise errors.InputError(f"expected a schema; got {json.dumps(schema)[:40]}")
        for name in schema.keys() & _TYPES.keys():
            if not isinstance(schema[name], _TYPES[name]):
                raise errors.InputError(f"{name}: malformed")
        if not all(isinstance(name, str) for name in schema.get("required", ())):
            raise errors.InputError("required: expected a list of names")
        effectless = {
            "format": schema.get("format") not in _FORMATS,
            "uniqueItems": schema.get("uniqueItems") is False,
            "propertyNames": schema.get("propertyNames") in ({"type": "string"}, {}),
        }
        return _without(schema, _IGNORED | {name for name in effectless if effectless[name]})


def _matches_nothing(schema: Any) -> bool:
    # Zod writes this for undefined, which JSON does not have.
    return isinstance(schema, Mapping) and schema.get("not") in ({}, True)


def _without(schema: Mapping[str, Any], keywords: Collection[str]) -> Flat:
    return {name: value for name, value in schema.items() if name not in keywords}


def _closed_object(flat: Flat, is_evaluated: bool) -> Flat:
    """Returns a schema without other properties than those that it names.

    Args:
      is_evaluated: Whether it says so itself; otherwise some keywords let others in.
    """
    properties = dict(flat.get("properties", {}))
    for name in () if is_evaluated else flat.get("required", ()):
        properties.setdefault(name, True)
    keywords = {*flat}.union(*flat.get("allOf", ()))
    is_open = keywords & {"additionalProperties", "patternProperties"}
    is_open = is_open or flat.get("minProperties", 0) > len(properties)
    if is_evaluated or ("properties" in flat and not is_open):
        flat = {"additionalProperties": False, **flat, "properties": properties}
    return flat


def _counted(flat: Flat) -> list[Flat]:
    """Returns schemas that do not count optional properties; a value matches one of them."""
    required, properties = flat.get("required", []), flat.get("properties", {})
    optional = [name for name in properties if name not in required]
    is_closed = flat.get("additionalProperties") is False and "patternProperties" not in flat
    missing = flat.get("minProperties", 0) - len(required)
    is_limited = flat.get("maxProperties", math.inf) < (len(properties) if is_closed else math.inf)
    # Grammars would count a property twice whose name is written twice.
    if missing > 1 or (missing == 1 and optional and not is_closed):
        raise errors.InputError("minProperties: cannot be counted here; name them in required")
    if is_limited and optional:
        raise errors.InputError(f"maxProperties: not supported while {optional[0]!r} is optional")
    flat = flat if missing == 1 and not optional else _without(flat, ("minProperties",))
    flat = flat if is_limited else _without(flat, ("maxProperties",))
    if missing < 1 or not optional:
        return [flat]
    return [flat | {"required": [*required, name]} for name in optional]


def _merged(first: Flat, second: Flat) -> Flat:
    """Returns a schema of the values that match both."""
    if "patternProperties" in first:
        first, second = second, first
    if "patternProperties" in second:
        if "minProperties" in second:
            raise errors.InputError("minProperties: not supported beside joined patternProperties")
        return first | {"allOf": [*first.get("allOf", ()), second]}
    parts, shared = (first, second), first.keys() & second.keys()
    for part, other in itertools.permutations(parts):
        if _ITEMS & part.keys() and other.keys() & {"prefixItems", "additionalItems"}:
            raise errors.InputError("prefixItems: not supported in joined schemas")
    merged = {**first, **second}
    names = dict.fromkeys(name for part in parts for name in part.get("properties", ()))
    if "properties" in merged:
        merged["properties"] = {
            name: _all_of(_property(part, name) for part in parts) for name in names
        }
    if "type" in shared:
        merged["type"] = _kinds(first, second)
    for name in shared & _MERGES.keys():
        merged[name] = _MERGES[name](first[name], second[name])
    apart = [
        {name: first[name]} for name in sorted(shared - _MERGES.keys() - {"properties", "type"})
    ]
    return merged | ({"allOf": [*merged.get("allOf", ()), *apart]} if apart else {})


def _all_of(schemas: Iterable[Any]) -> Any:
    """Returns a schema of the values that match all schemas."""
    distinct = {json.dumps(schema): schema for schema in schemas if schema is not True}
    if any(itertools.starmap(_exclude, itertools.combinations(distinct.values(), 2))):
        return False
    if len(distinct) > 1:
        return "false" not in distinct and {"allOf": [*distinct.values()]}
    return next(iter(distinct.values()), True)


_MERGES: Mapping[str, Callable[[Any, Any], Any]] = {
    "required": lambda first, second: list(dict.fromkeys([*first, *second])),
    "allOf": lambda first, second: [*first, *second],
    "items": lambda *schemas: _all_of(schemas),
    "additionalProperties": lambda *schemas: _all_of(schemas),
    "minProperties": max,
    "maxProperties": min,
}


def _exclude(first: Any, second: Any) -> bool:
    """Returns whether two schemas list their values and have none in common."""
    values, other_values = _listed(first), _listed(second)
    return (
        values is not None
        and other_values is not None
        and not any(map(other_values.__contains__, values))
    )


def _listed(schema: Any) -> list[Any] | None:
    if not isinstance(schema, Mapping):
        return None
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return values if isinstance(values, list) else None


def _kinds(*flats: Flat) -> list[str]:
    """Returns the types that a value of all these schemas may have."""
    common = [*_KINDS]
    for flat in flats:
        kinds = flat.get("type", common)
        kinds = [kinds] if isinstance(kinds, str) else kinds
        common = [
            kind for kind in common if kind in kinds or (kind == "integer" and "number" in kinds)
        ]
    return [kind for kind in common if kind != "integer" or "number" not in common]


def _property(flat: Flat, name: str) -> Any:
    """Returns the schema of a property; True if patterns determine it."""
    default = True if "patternProperties" in flat else flat.get("additionalProperties", True)
    return flat.get("properties", {}).get(name, default)
