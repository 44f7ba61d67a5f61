"""The keys that a config may hold: their types, and the values that are fixed."""

import dataclasses
import functools
import operator
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import ml_collections

from dflash.config import registry, schema
from dflash.config.merging import Path, text_of

# Groups whose `name` chooses their schema, by the class that a run declares for them.
CHOICES: Mapping[type, Mapping[str, registry.Entry]] = {
    schema.TargetConfig: registry.TARGETS,
    schema.DrafterConfig: registry.DRAFTERS,
}
_UNIONS = (types.UnionType, typing.Union)  # `X | Y` and Union[X, Y]
# Names of registered things, by the key that takes them.
_NAMES: Mapping[Path, Mapping[str, Any]] = {
    ("prompts", "dataset"): registry.DATASETS,
    ("tasks",): registry.DATASETS,
    ("test", "tasks"): registry.DATASETS,
    ("drafter", "family"): registry.TARGETS,
}
_ENTRIES: Mapping[Path, Mapping[str, Any]] = {
    ("data", "mixture"): registry.DATASETS,
    ("answers", "tasks"): registry.DATASETS,
    ("sharding_rules",): schema.SHARDING_RULES,
}


@dataclasses.dataclass(frozen=True)
class Key:
    """A key that a config may hold.

    Attributes:
      path: Its names, from the outermost group.
      kind: Type of its value.
      names: What it must be one of, if these are not part of the type.
      place: What it names on disk; see `schema.Place`.
      is_group: Whether it has keys of its own.
    """

    path: Path
    kind: Any
    names: tuple[str, ...] = ()
    place: schema.Place | None = None
    is_group: bool = False

    @property
    def values(self) -> tuple[str, ...]:
        """The fixed values that it may have, as they are written."""
        found = list(self.names)
        for kind in members(self.kind):
            if typing.get_origin(kind) is Literal:
                found += typing.get_args(kind)
            elif kind is bool:
                found += ["true", "false"]
            elif kind is type(None):
                found.append("null")
        return tuple(found)


def known_keys(declared: type, given: Any, path: Path = ()) -> Iterator[Key]:
    """Yields every key that a config may hold, groups included.

    Args:
      declared: The schema of the config or group.
      given: What the config holds so far, nested mappings of nodes: names in it choose schemas.
      path: Of the group.
    """
    given = given if isinstance(given, ml_collections.ConfigDict) else {}
    cls = chosen_schema(declared, given) or declared
    kinds = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        here, kind, inner = (*path, field.name), kinds[field.name], given.get(field.name)
        groups = [option for option in members(kind) if dataclasses.is_dataclass(option)]
        named = declared in CHOICES and field.name == "name"
        names = CHOICES[declared] if named else _NAMES.get(here, ())
        mapped = typing.get_origin(kind) is Mapping
        place = field.metadata.get(schema.PLACE)
        yield Key(here, kind, tuple(names), place, bool(groups) or mapped)
        for group in groups:
            yield from known_keys(group, inner, here)
        if mapped:
            item = typing.get_args(kind)[1]
            entries = inner if isinstance(inner, ml_collections.ConfigDict) else {}
            for name in dict.fromkeys([*entries, *_ENTRIES.get(here, ())]):
                if dataclasses.is_dataclass(item):
                    yield Key((*here, name), item, is_group=True)
                    yield from known_keys(item, entries.get(name), (*here, name))
                else:
                    yield Key((*here, name), item)


def chosen_schema(declared: type, given: Mapping[str, Any]) -> type | None:
    """The schema of a group, chosen by its `name` if it has one; None for an unusable name."""
    entries = CHOICES.get(declared)
    if entries is None:
        return declared
    name = next(field.default for field in dataclasses.fields(declared) if field.name == "name")
    if "name" in given:
        node = given["name"]
        if isinstance(node, ml_collections.ConfigDict):
            return None
        nullable = without_null(typing.get_type_hints(declared)["name"])[1]
        name = None if nullable and node.value is None else text_of(node)
    if name is None:
        return declared
    known = isinstance(name, str) and name in entries
    return registry.load(entries[name].schema) if known else None


def members(kind: Any) -> tuple[Any, ...]:
    """The members of a union, None's type included; of any other type the type itself."""
    return typing.get_args(kind) if typing.get_origin(kind) in _UNIONS else (kind,)


def without_null(kind: Any) -> tuple[Any, bool]:
    """`X | None` as (X, True), any other type as (type, False); X may be a union itself."""
    inner = [option for option in members(kind) if option is not type(None)]
    if len(inner) == len(members(kind)):
        return kind, False
    return functools.reduce(operator.or_, inner), True
