"""Building of configs: groups whose `name` chooses their schema, and problems of all layers."""

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any

from dflash.config import typed
from dflash.config.keys import CHOICES, chosen_schema, known_keys
from dflash.config.merging import ConfigTree, Path


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


def build(tree: ConfigTree, run: type, *, complete: bool) -> tuple[Any, set[Path], list[str]]:
    """Builds the dataclass `run` from `tree`.

    Args:
      tree: All layers, merged.
      run: Schema, a dataclass.
      complete: Every layer could be read. Otherwise missing keys are not reported.
    Returns:
      The instance, with defaults in place of unusable values, or None if a required key is
      unusable; the paths of the unusable values; every problem, one line each.
    """
    builder = _ConfigBuilder(tree, complete=complete, known=known_keys(run, tree.content))
    built = builder.group(run, tree.content, ())
    return (None if built is typed.INVALID else built), builder.unusable, builder.problems


class _ConfigBuilder(typed.Builder):
    choices = CHOICES

    def chosen_schema(self, declared: type, content: Mapping[str, Any]) -> type | None:
        return chosen_schema(declared, content)
