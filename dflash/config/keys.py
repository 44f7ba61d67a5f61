"""Keys that a config may hold."""

import dataclasses
import typing
from collections.abc import Iterator, Mapping
from typing import Any

import ml_collections

from dflash.config import registry, schema
from dflash.config.merging import Path, text_of
from dflash.config.typed import members, without_null

# Groups whose `name` chooses their schema, by the class that a run declares for them.
CHOICES: Mapping[type, Mapping[str, registry.Entry]] = {
    schema.TargetConfig: registry.TARGETS,
    schema.DrafterConfig: registry.DRAFTERS,
}
# Registries whose names are the usual keys of a mapping.
_ENTRIES: Mapping[Path, Mapping[str, Any]] = {
    ("data", "mixture"): registry.DATASETS,
    ("answers", "tasks"): registry.DATASETS,
    ("sharding_rules",): schema.SHARDING_RULES,
}


def known_keys(declared: type, content: Any, path: Path = ()) -> Iterator[Path]:
    """Yields the path of every key that a config may hold, groups included.

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
        yield here
        for group in filter(dataclasses.is_dataclass, members(kind)):
            yield from known_keys(group, inner, here)
        if typing.get_origin(kind) is Mapping:
            item = typing.get_args(kind)[1]
            entries = inner if isinstance(inner, ml_collections.ConfigDict) else {}
            for name in dict.fromkeys([*entries, *_ENTRIES.get(here, ())]):
                yield (*here, name)
                if dataclasses.is_dataclass(item):
                    yield from known_keys(item, entries.get(name), (*here, name))


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
    return registry.load_schema(entries[name]) if known else None
