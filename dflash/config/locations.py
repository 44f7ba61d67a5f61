"""Files and directories that a config refers to."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from dflash.config import schema
from dflash.storage import hub

_PINNED = ("checkpoint", "adapter")


def locations(config: Any, prefix: str = "") -> Iterator[tuple[str, schema.Place, str]]:
    """Yields (dotted key, kind of path, path as given) for every path in a config."""
    for field in dataclasses.fields(config):
        value, key = getattr(config, field.name), f"{prefix}{field.name}"
        place = field.metadata.get(schema.PLACE)
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
        if field.metadata.get(schema.PLACE) in _PINNED and isinstance(value, str):
            changes[field.name] = hub.pinned(value)
        elif dataclasses.is_dataclass(value):
            changes[field.name] = pin_checkpoints(value)
    return dataclasses.replace(config, **changes)
