"""Loading of config files and `key=value` overrides into frozen dataclasses, and dumping as YAML.

The layers, of which later ones win: the dataclass's defaults, each file of `base: [..]` in order,
the file itself, the command line. Mappings merge, lists replace. An error lists all problems at
once. A file that another one names must be of type .yml or .yaml. The main one may also be a Python
file, as is usual with ml_collections.
"""

import dataclasses
import hashlib
import json
import pathlib
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from dflash import errors
from dflash.config import checks, merging, registry, removed_keys, strict_yaml, typed
from dflash.config.merging import Path, text_of
from dflash.config.merging import find_config as find_config
from dflash.config.schema import (
    PLACE,
    SHARDING_RULES,
    DecodeRun,
    DrafterConfig,
    Place,
    TargetConfig,
)
from dflash.config.strict_yaml import Node
from dflash.config.typed import INVALID, Builder
from dflash.storage import hub

SWEEP = "sweep"  # Key of a sweep's block.
_PINNED = ("checkpoint", "adapter")  # Kinds of path that a commit of the hub pins.
_STRATEGIES = "strategies"  # Key of entries that override the group `drafter`.
_CHOICE = "name"  # Key that chooses a group's schema.
# Groups whose `name` chooses their schema, by the class that a run declares for them.
_CHOICES: Mapping[type, Mapping[str, registry.Entry]] = {
    TargetConfig: registry.TARGETS,
    DrafterConfig: registry.DRAFTERS,
}
# Registries whose names are the usual keys of a mapping.
_ENTRIES: Mapping[Path, Mapping[str, Any]] = {
    ("data", "mixture"): registry.DATASETS,
    ("sharding_rules",): SHARDING_RULES,
}
Run = TypeVar("Run")


def load(
    path: str | pathlib.Path | None,
    overrides: Sequence[str] = (),
    schema: type[Run] | tuple[type[Run], ...] = DecodeRun,
    *,
    earlier_run: bool = False,
) -> Run:
    """Loads a config.

    Args:
      path: YAML file, looked up as given, then among the shipped configs; None is the defaults.
        Where prompts are decoded, it may also be a checkpoint: hf:org/name or its directory.
      overrides: `key=value` arguments; keys are dotted, values are YAML. A string field takes the
        text as typed, and a list field takes a single value as a list of one.
      schema: Dataclass to fill. Of several, the one that shares most groups with the file.
      earlier_run: The file is the resolved config of an earlier run, perhaps of an earlier version:
        ignore removed keys that changed nothing of what it computed.
    Returns:
      An instance of the chosen schema.
    Raises:
      ConfigError: The config is invalid; the message lists every problem, one line each.
    """
    problems: list[str] = []
    files, origin = _layers(path, schema, problems)
    command_line = merging.parse_overrides(overrides, problems)
    readable = [file for file in files if file is not None]
    if len(readable) == len(files):
        check_command(readable, origin, schema if isinstance(schema, tuple) else (schema,))
    if isinstance(schema, tuple):
        schema = fitting(schema, readable)
    for node in (*files, *command_line):
        if node is not None and SWEEP in node.value:
            place = node.value[SWEEP].source
            problems.append(f"{place}: {SWEEP}: only dflash sweep accepts this key")
    layers = [without_sweep(node) for node in files]
    arguments = [without_sweep(node) for node in command_line]
    config, more = resolve(layers, [arguments], origin, schema, earlier_run=earlier_run)
    problems += more
    if problems:
        raise errors.ConfigError(*problems)
    return config


def resolve(
    files: Sequence[Node | None],
    over: Sequence[Sequence[Node]],
    origin: str,
    schema: type[Run],
    *,
    earlier_run: bool = False,
) -> tuple[Run | None, list[str]]:
    """Builds a config from its layers.

    Args:
      files: Files from `merging.read`, of which later ones win; None for an unreadable one.
      over: Layers on top of the files, such as the command line.
      origin: Name of the main file.
      earlier_run: See `load`.
    Returns:
      An instance of `schema`, or None if none can be built; every problem, one line each.
    """
    readable = [file for file in files if file is not None]
    complete = len(readable) == len(files)
    layered = [*([file] for file in readable), *over]
    kinds = typing.get_type_hints(schema)
    named = [key for key, kind in kinds.items() if kind in _CHOICES]
    tree = merging.merge(layered, named, origin, _alternatives(schema))
    problems: list[str] = []
    if _STRATEGIES in kinds:
        tree, problems = merging.inherit(tree, _STRATEGIES, "drafter", registry.DRAFTERS)
    builder = Builder(
        tree,
        complete=complete,
        known=known_keys(schema, tree.root),
        notice=removed_keys.notice,
        ignores=lambda *key: earlier_run and removed_keys.is_without_effect(*key),
        choices=_CHOICES,
        choose=_chosen_schema,
    )
    config = builder.group(schema, tree.root, ())
    problems += builder.problems
    if config is INVALID:
        return None, problems
    if complete:
        problems += _crossed(config, tree, builder.unusable)
    return config, problems


def _layers(
    path: str | pathlib.Path | None, schema: type | tuple[type, ...], problems: list[str]
) -> tuple[list[Node | None], str]:
    """Returns the layers of CONFIG and its name for messages; see `merging.read`."""
    if path is None:
        return [], merging.COMMAND_LINE
    decodes = isinstance(schema, type) and issubclass(schema, DecodeRun)
    if decodes and merging.is_checkpoint(path):
        return [merging.checkpoint_layer(path)], str(path)
    return merging.read(path, problems)


def check_command(
    files: Sequence[Node], origin: str, schemas: Sequence[type], of: str = "this command"
) -> None:
    """Raises if the files are a config of another command.

    Args:
      files: Mappings of the main file and its bases.
      origin: Name of the main file.
      of: Name of the current command, for the message.
    Raises:
      ConfigError: The schemas of another command know more of the files' groups.
    """
    keys = {key for file in files for key in file.value} - {SWEEP}

    def strange(kinds: Iterable[type]) -> int:
        return min(len(keys - {field.name for field in dataclasses.fields(kind)}) for kind in kinds)

    strange_to = {
        command: strange(registry.load(reference) for reference in references)
        for command, references in registry.CONFIGS.items()
    }
    best = min(strange_to, key=strange_to.get)
    if strange_to[best] < strange(schemas):
        raise errors.ConfigError(f"{origin}: a config of dflash {best}, not of {of}")


def without_sweep(node: Node | None) -> Node | None:
    """Returns a file or argument without its `sweep:` block."""
    if node is None or SWEEP not in node.value:
        return node
    content = {key: value for key, value in node.value.items() if key != SWEEP}
    return dataclasses.replace(node, value=content)


def to_dict(config: Any) -> Any:
    """Returns a config, or a value in it, as plain dicts, lists and scalars, defaults included."""
    if dataclasses.is_dataclass(config):
        fields = dataclasses.fields(config)
        return {field.name: to_dict(getattr(config, field.name)) for field in fields}
    if isinstance(config, Mapping):
        return {key: to_dict(item) for key, item in config.items()}
    if isinstance(config, (list, tuple)):
        return [to_dict(item) for item in config]
    return config


def to_yaml(config: Any) -> str:
    """Returns the resolved config as YAML; loading it gives an equal config and the same hash."""
    return strict_yaml.dump(to_dict(config))


def non_defaults(config: Any) -> Any:
    """Returns the values that differ from their defaults, as plain dicts, lists and scalars.

    A key that a later version adds is therefore not included until it is set. The name that chooses
    a group's schema is always included, because the defaults depend on it.
    """
    if dataclasses.is_dataclass(config):
        changed = {}
        for field in dataclasses.fields(config):
            value, default = getattr(config, field.name), _default(field)
            if isinstance(value, Mapping) and isinstance(default, Mapping):
                value = {key: item for key, item in value.items() if default.get(key) != item}
                default = {}
            if field.name == _CHOICE or value != default:
                changed[field.name] = non_defaults(value)
        return changed
    if isinstance(config, Mapping):
        return {key: non_defaults(item) for key, item in config.items()}
    return to_dict(config)


def flatten(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the leaves of nested mappings, each with its dotted key; lists are leaves."""
    if isinstance(tree, Mapping) and tree:
        for key, item in tree.items():
            yield from flatten(item, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, tree


def digest(content: Any) -> str:
    """Returns 12 hex digits of a SHA-256 of plain content, independent of the order of keys."""
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:12]


def config_hash(config: Any) -> str:
    """Returns the `digest` of the non-default values, so that a new key changes no hash."""
    return digest(non_defaults(config))


def locations(config: Any, prefix: str = "") -> Iterator[tuple[str, Place, str]]:
    """Yields (dotted key, kind of path, path as given) for every path in a config."""
    for field in dataclasses.fields(config):
        value, key = getattr(config, field.name), f"{prefix}{field.name}"
        place = field.metadata.get(PLACE)
        if place is not None and isinstance(value, Mapping):
            yield from ((f"{key}.{name}", place, location) for name, location in value.items())
        elif place is not None and value is not None:
            for location in (value,) if isinstance(value, str) else value:
                yield key, place, location
        groups = value if isinstance(value, Mapping) else {None: value}
        for name, group in groups.items():
            if dataclasses.is_dataclass(group):
                inner = key if name is None else f"{key}.{name}"
                yield from locations(group, f"{inner}.")


def pin_checkpoints(config: Any) -> Any:
    """Returns a config whose checkpoints of the hub name the commits that this process has read."""
    changes = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.metadata.get(PLACE) in _PINNED and isinstance(value, str):
            changes[field.name] = hub.pinned(value)
        elif dataclasses.is_dataclass(value):
            changes[field.name] = pin_checkpoints(value)
    return dataclasses.replace(config, **changes)


def fitting(schemas: Sequence[type], files: Sequence[merging.Node]) -> type:
    """Returns the schema that shares most groups with the files."""
    groups = {key for file in files for key in file.value}

    def num_shared(schema: type) -> int:
        return len(groups & {field.name for field in dataclasses.fields(schema)})

    return max(schemas, key=num_shared)


def _crossed(config: Any, tree: merging.ConfigTree, unusable: set[merging.Path]) -> list[str]:
    """Returns problems between keys, except those with a value that is already reported."""
    lines = []
    for keys, message in checks.problems(config):
        paths = [tuple(key.split(".")) for key in keys]
        ancestors = {path[:end] for path in paths for end in range(1, len(path) + 1)}
        if not ancestors & unusable:
            lines.append(f"{tree.source(*paths)}: {keys[0]}: {message}")
    return lines


def _default(field: dataclasses.Field) -> Any:
    """Returns the default of a field; MISSING, which equals no value, for a required field."""
    has_factory = field.default_factory is not dataclasses.MISSING
    return field.default_factory() if has_factory else field.default


def _alternatives(run: type) -> list[list[Path]]:
    """Returns the sets of mutually exclusive keys of `run` and its groups."""
    groups = {(): run} | {(name,): kind for name, kind in typing.get_type_hints(run).items()}
    named = {path: getattr(kind, "ALTERNATIVES", ()) for path, kind in groups.items()}
    return [[(*path, name) for name in names] for path, names in named.items() if names]


def known_keys(declared: type, node: Node | None, path: Path = ()) -> Iterator[Path]:
    """Yields the path of every key that a config may hold, groups included.

    Args:
      declared: Schema of the config or group.
      node: Content of the config or group so far. Names in it choose schemas.
    """
    content = node.value if node is not None and isinstance(node.value, dict) else {}
    cls = _chosen_schema(declared, content) or declared
    kinds = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        here, kind, inner = (*path, field.name), kinds[field.name], content.get(field.name)
        yield here
        for group in filter(dataclasses.is_dataclass, typed.members(kind)):
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
    entries = _CHOICES.get(declared)
    if entries is None:
        return declared
    name = next(field.default for field in dataclasses.fields(declared) if field.name == "name")
    if "name" in content:
        node = content["name"]
        if isinstance(node.value, dict):
            return None
        nullable = typed.without_null(typing.get_type_hints(declared)["name"])[1]
        name = None if nullable and node.value is None else text_of(node)
    if name is None:
        return declared
    known = isinstance(name, str) and name in entries
    return registry.load_schema(entries[name]) if known else None
