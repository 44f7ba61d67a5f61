"""Building of configs: groups whose `name` chooses their schema, and problems of all layers."""

import dataclasses
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from dflash.config import registry, schema, value_types
from dflash.config.merging import ConfigTree, Path, text_of
from dflash.config.strict_yaml import Node
from dflash.config.typed import Builder
from dflash.config.value_types import INVALID

# Groups whose `name` chooses their schema, by the class that a run declares for them.
CHOICES: Mapping[type, Mapping[str, registry.Entry]] = {
    schema.TargetConfig: registry.TARGETS,
    schema.DrafterConfig: registry.DRAFTERS,
}
# Registries whose names are the usual keys of a mapping.
_ENTRIES: Mapping[Path, Mapping[str, Any]] = {
    ("data", "mixture"): registry.DATASETS,
    ("sharding_rules",): schema.SHARDING_RULES,
}


def named_groups(run: type) -> list[str]:
    """Returns the groups of `run` whose `name` key chooses their schema."""
    return [key for key, kind in typing.get_type_hints(run).items() if kind in CHOICES]


def alternatives(run: type) -> list[list[Path]]:
    """Returns the sets of mutually exclusive keys of `run` and its groups."""
    groups = {(): run} | {(name,): kind for name, kind in typing.get_type_hints(run).items()}
    named = {path: getattr(kind, "ALTERNATIVES", ()) for path, kind in groups.items()}
    return [[(*path, name) for name in names] for path, names in named.items() if names]


def overriding_groups(run: type) -> list[tuple[str, str]]:
    """Returns (key, group) for keys of `run` that map names to overrides of another group."""
    fields = [(field.name, field.metadata) for field in dataclasses.fields(run)]
    return [(name, data["overrides_of"]) for name, data in fields if "overrides_of" in data]


def build(
    tree: ConfigTree, run: type, *, complete: bool, earlier_run: bool = False
) -> tuple[Any, set[Path], list[str]]:
    """Builds the dataclass `run` from `tree`.

    Args:
      tree: All layers, merged.
      run: Schema, a dataclass.
      complete: Every layer could be read. Otherwise missing keys are not reported.
      earlier_run: Ignore removed keys without effect.
    Returns:
      The instance, with defaults in place of unusable values, or None if a required key is
      unusable; the paths of the unusable values; every problem, one line each.
    """
    known = known_keys(run, tree.root)
    builder = Builder(
        tree,
        complete=complete,
        known=known,
        earlier_run=earlier_run,
        choices=CHOICES,
        choose=_chosen_schema,
    )
    built = builder.group(run, tree.root, ())
    return (None if built is INVALID else built), builder.unusable, builder.problems


def known_keys(declared: type, node: Node | None, path: Path = ()) -> Iterator[Path]:
    """Yields the path of every key that a config may hold, groups included.

    Args:
      declared: Schema of the config or group.
      node: Content of the config or group so far. Names in it choose schemas.
      path: Path of the group.
    """
    content = node.value if node is not None and isinstance(node.value, dict) else {}
    cls = _chosen_schema(declared, content) or declared
    kinds = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        here, kind, inner = (*path, field.name), kinds[field.name], content.get(field.name)
        yield here
        for group in filter(dataclasses.is_dataclass, value_types.members(kind)):
            yield from known_keys(group, inner, here)
        if typing.get_origin(kind) is Mapping:
            item = typing.get_args(kind)[1]
            entries = inner.value if inner is not None and isinstance(inner.value, dict) else {}
            for name in dict.fromkeys([*entries, *_ENTRIES.get(here, ())]):
                yield (*here, name)
                if dataclasses.is_dataclass(item):
                    yield from known_keys(item, entries.get(name), (*here, name))


def _chosen_schema(declared: type, content: Mapping[str, Node]) -> type | None:
    """Returns the schema of a group, by its `name` if it has one; None for an unknown name."""
    entries = CHOICES.get(declared)
    if entries is None:
        return declared
    name = next(field.default for field in dataclasses.fields(declared) if field.name == "name")
    if "name" in content:
        node = content["name"]
        if isinstance(node.value, dict):
            return None
        nullable = value_types.without_null(typing.get_type_hints(declared)["name"])[1]
        name = None if nullable and node.value is None else text_of(node)
    if name is None:
        return declared
    known = isinstance(name, str) and name in entries
    return registry.load_schema(entries[name]) if known else None
