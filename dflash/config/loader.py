"""From a config file and `key=value` overrides to one frozen dataclass, and back to YAML.

Later wins: the dataclass's default, each file of `base: [..]` in order, the file, the command line.
Mappings merge, lists replace. Every problem is found before any is reported.
"""

import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from dflash import errors
from dflash.config import build, checks, layers, strict_yaml
from dflash.config.layers import find_config as find_config
from dflash.config.schema import DecodeRun

Run = TypeVar("Run")


def load(
    path: str | pathlib.Path,
    overrides: Sequence[str] = (),
    schema: type[Run] = DecodeRun,
) -> Run:
    """Loads a config.

    Args:
      path: a YAML file, looked up as given, then among the shipped configs.
      overrides: `key=value` arguments; keys are dotted, values are YAML. A string field takes the
        text as typed, and a list field takes a bare value as a list of one.
      schema: the dataclass to fill.
    Returns:
      An instance of `schema`.
    Raises:
      ConfigError: anything is wrong; holds every problem, one line each.
    """
    problems: list[str] = []
    files, origin = layers.read(path, problems)
    readable = [file for file in files if file is not None]
    complete = len(readable) == len(files)
    command_line = layers.parse_overrides(overrides, problems)
    tree = layers.merge(
        [*([file] for file in readable), command_line], build.named_groups(schema), origin
    )
    config, unusable, found = build.build(tree, schema, complete=complete)
    problems += found
    if config is not None and complete:
        problems += _crossed(config, tree, unusable)
    if problems:
        raise errors.ConfigError(*problems)
    return config


def to_dict(config: Any) -> dict[str, Any]:
    """The resolved config as plain dicts, lists and scalars, defaults included."""
    return _plain(config)


def to_yaml(config: Any) -> str:
    """The resolved config as YAML; loading it gives an equal config and the same hash."""
    return strict_yaml.dump(to_dict(config))


def config_hash(config: Any) -> str:
    """Twelve hex digits of a SHA-256 over the resolved content; the order of keys is immaterial."""
    canonical = json.dumps(to_dict(config), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:12]


def _crossed(config: Any, tree: layers.Tree, unusable: set[layers.Path]) -> list[str]:
    """Problems between keys, but for those that involve a value already reported."""
    lines = []
    for keys, message in checks.problems(config):
        paths = [tuple(key.split(".")) for key in keys]
        ancestors = {path[:end] for path in paths for end in range(1, len(path) + 1)}
        if not ancestors & unusable:
            lines.append(f"{tree.source(*paths)}: {keys[0]}: {message}")
    return lines


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        fields = dataclasses.fields(value)
        return {field.name: _plain(getattr(value, field.name)) for field in fields}
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
