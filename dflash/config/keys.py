"""Keys that a config may hold, with their types and their fixed values."""

import dataclasses
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import ml_collections

from dflash.config import registry, schema
from dflash.config.merging import Path, text_of
from dflash.config.typed import members, without_null

# Groups whose `name` chooses their schema, by the class that a run declares for them.
CHOICES: Mapping[type, Mapping[str, registry.Entry]] = {
    schema.TargetConfig: registry.TARGETS,
    schema.DrafterConfig: registry.DRAFTERS,
}
_UNIONS = (types.UnionType, typing.Union)  # Types of `X | Y` and of Union[X, Y].
# Registries whose names are the valid values of a key.
_NAMES: Mapping[Path, Mapping[str, Any]] = {
    ("prompts", "dataset"): registry.DATASETS,
    ("tasks",): registry.DATASETS,
    ("test", "tasks"): registry.DATASETS,
    ("drafter", "family"): registry.TARGETS,
}
# Registries whose names are the usual keys of a mapping.
_ENTRIES: Mapping[Path, Mapping[str, Any]] = {
    ("data", "mixture"): registry.DATASETS,
    ("answers", "tasks"): registry.DATASETS,
    ("sharding_rules",): schema.SHARDING_RULES,
}


@dataclasses.dataclass(frozen=True)
class Key:
    """Key that a config may hold.

    Attributes:
      path: Names from the outermost group to the key.
      kind: Type of the value.
      names: Valid values that the type does not list, such as names of a registry.
      place: Kind of path that the value is, or None; see `schema.Place`.
      is_group: The value is a mapping with keys of its own.
    """

    path: Path
    kind: Any
    names: tuple[str, ...] = ()
    place: schema.Place | None = None
    is_group: bool = False

    @property
    def values(self) -> tuple[str, ...]:
        """Fixed values that the key may have, as a config spells them."""
        fixed = list(self.names)
        for kind in members(self.kind):
            if typing.get_origin(kind) is Literal:
                fixed += typing.get_args(kind)
            elif kind is bool:
                fixed += ["true", "false"]
            elif kind is type(None):
                fixed.append("null")
        return tuple(fixed)


def known_keys(declared: type, content: Any, path: Path = ()) -> Iterator[Key]:
    """Yields every key that a config may hold, groups included.

    Args:
      declared: Schema of the config or group.
      content: Content of the config so far, nested mappings of nodes. Names in it choose schemas.
      path: Path of the group.
    """
    content = content if isinstance(content, ml_collections.ConfigDict) else {}
    cls = chosen_schema(declared, content) or declared
    kinds = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        here, kind, inner = (*path, field.name), kinds[field.name], content.get(field.name)
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


def chosen_schema(declared: type, content: Mapping[str, Any]) -> type | None:
    """Returns the schema of a group, by its `name` if it has one; None for an unknown name."""
    entries = CHOICES.get(declared)
    if entries is None:
        return declared
    name = next(field.default for field in dataclasses.fields(declared) if field.name == "name")
    if "name" in content:
        node = content["name"]
        if isinstance(node, ml_collections.ConfigDict):
            return None
        nullable = without_null(typing.get_type_hints(declared)["name"])[1]
        name = None if nullable and node.value is None else text_of(node)
    if name is None:
        return declared
    known = isinstance(name, str) and name in entries
    return registry.load(entries[name].schema) if known else None
