"""Points of a sweep, the configs that a config with a `sweep:` block describes.

    sweep:
      run: decode                         # command of each point; decode is the default
      product:                            # all combinations; the first key varies slowest
        drafter.block_size: [4, 8, 16]
        decode.temperature: [0, 0.8]
      zip:                                # keys that vary together; lists of equal length
        decode.batch_size: [1, 8]
        decode.sync_every: [8, 2]

Keys are those of the run's config, dotted or nested; values are any that the key accepts. Values of
a point override files and command line. This module imports no jax.
"""

import dataclasses
import hashlib
import itertools
import json
import math
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dflash import errors
from dflash.config import loader, merging, registry, removed_keys, strict_yaml
from dflash.config.strict_yaml import Malformed, Node

MAX_POINTS = 10_000
_MAX_NAME_CHARACTERS = 120
_UNFIT = re.compile(r"[^\w.+-]+")  # Characters that a directory's name should not have.
_BLOCK = ("run", "product", "zip")


@dataclasses.dataclass(frozen=True)
class SweepPoint:
    """One config of a sweep.

    Attributes:
      name: Name of the point's directory; depends only on `values`.
      values: Values of the axes' keys, as plain Python objects.
      config: Resolved config, an instance of the run's schema.
    """

    name: str
    values: Mapping[str, Any]
    config: Any


@dataclasses.dataclass(frozen=True)
class Sweep:
    """All points of a config.

    Attributes:
      run: Command of each point, a name of `registry.RUNS`.
      axes: Keys of each axis: one per key of the product, and all keys of the zip together.
      points: Points by name, in the order of the axes.
    """

    run: str
    axes: tuple[tuple[str, ...], ...]
    points: Mapping[str, SweepPoint]


@dataclasses.dataclass(frozen=True)
class _Axis:
    """Keys that vary together; each step has one value per key."""

    keys: tuple[str, ...]
    steps: tuple[tuple[Node, ...], ...]


def load(path: str | pathlib.Path, overrides: Sequence[str] = ()) -> Sweep:
    """Loads a config and resolves every point of its sweep.

    Args:
      path: YAML file, looked up as given, then among the shipped configs.
      overrides: `key=value` arguments, also for the block: `sweep.product.decode.seed=[1, 2]`.
    Raises:
      ConfigError: The block or a point is invalid; the message lists every problem, one line each,
        with the names of the points.
    """
    problems: list[str] = []
    files, origin = merging.read(path, problems)
    command_line = merging.parse_overrides(overrides, problems)
    run, axes = _read_blocks([*files, *command_line], origin, problems)
    if None not in files and run in registry.RUNS:
        kind = registry.load(registry.RUNS[run].schema)
        loader.check_command(files, origin, [kind], of=f"{loader.SWEEP}.run={run}")
    count = math.prod(len(axis.steps) for axis in axes)
    if count > MAX_POINTS:
        problems.append(f"{origin}: {loader.SWEEP}: {count} points exceed the limit {MAX_POINTS}")
    if problems:
        raise errors.ConfigError(*problems)
    schema = registry.load(registry.RUNS[run].schema)
    files = [loader.without_sweep(node) for node in files]
    arguments = [loader.without_sweep(node) for node in command_line]
    points: dict[str, SweepPoint] = {}
    points_by_problem: dict[str, list[str]] = {}
    for steps in itertools.product(*(axis.steps for axis in axes)):
        nodes = {
            key: node
            for axis, step in zip(axes, steps, strict=True)
            for key, node in zip(axis.keys, step, strict=True)
        }
        values = {key: _plain(node) for key, node in nodes.items()}
        name = _name(values)
        layer = [merging.nested(key.split("."), node) for key, node in nodes.items()]
        config, point_problems = loader.resolve(files, [arguments, layer], origin, schema)
        if name in points:
            point_problems.append(f"{origin}: {loader.SWEEP}: the point {name} occurs twice")
        for problem in point_problems:
            points_by_problem.setdefault(problem, []).append(name)
        points[name] = SweepPoint(name, values, config)
    if points_by_problem:
        raise errors.ConfigError(*attributed(points_by_problem, count))
    return Sweep(run, tuple(axis.keys for axis in axes), points)


def _read_blocks(
    nodes: Sequence[Node | None], origin: str, problems: list[str]
) -> tuple[str, list[_Axis]]:
    """Reads the blocks of all files and arguments; later ones win, key by key."""
    run = Node(next(iter(registry.RUNS)), origin)
    groups: dict[str, dict[str, Node]] = {"product": {}, "zip": {}}
    for node in nodes:
        block = node.value.get(loader.SWEEP) if node is not None else None
        if block is None:
            continue
        if not isinstance(block.value, dict):
            problems.append(f"{block.source}: {loader.SWEEP}: expected a mapping")
            continue
        for key, entry in block.value.items():
            if key == "run":
                run = entry
            elif key not in _BLOCK:
                near = registry.suggest(key, _BLOCK)
                problems.append(f"{entry.source}: {loader.SWEEP}.{key}: unknown key{near}")
            elif not isinstance(entry.value, dict):
                problems.append(f"{entry.source}: {loader.SWEEP}.{key}: expected a mapping")
            else:
                groups[key].update(_lists(entry, f"{loader.SWEEP}.{key}", problems))
    name = "a mapping" if isinstance(run.value, dict) else str(merging.text_of(run))
    if name not in registry.RUNS:
        unknown = f"unknown run {name!r}{registry.suggest(name, registry.RUNS)}"
        message = removed_keys.notice((loader.SWEEP, "run"), name) or unknown
        problems.append(f"{run.source}: {loader.SWEEP}.run: {message}")
    product, zipped = groups["product"], groups["zip"]
    if not product and not zipped and not problems:
        problems.append(f"{origin}: {loader.SWEEP}: required: keys and their values, below product")
    _check_overlap(product, zipped, nodes, problems)
    lengths = {len(node.value) for node in zipped.values()}
    if len(lengths) > 1:
        shown = ", ".join(f"{key}: {len(node.value)}" for key, node in zipped.items())
        first = next(iter(zipped.values()))
        problems.append(f"{first.source}: {loader.SWEEP}.zip: lists of different lengths ({shown})")
        zipped = {}
    axes = [_Axis((key,), tuple((item,) for item in node.value)) for key, node in product.items()]
    if zipped:
        steps = zip(*(node.value for node in zipped.values()), strict=True)
        axes.append(_Axis(tuple(zipped), tuple(steps)))
    return name, axes


def _lists(node: Node, prefix: str, problems: list[str]) -> Iterator[tuple[str, Node]]:
    """Yields the lists of nested mappings by dotted key, without `prefix`."""
    for key, entry in node.value.items():
        here = f"{prefix}.{key}"
        if isinstance(entry.value, dict):
            inner = _lists(entry, here, problems)
            yield from ((f"{key}.{inner_key}", values) for inner_key, values in inner)
        elif key.count(".") >= strict_yaml.MAX_DEPTH:
            problems.append(merging.too_deep(entry.source, key))
        elif isinstance(entry.value, tuple) and entry.value:
            yield key, entry
        elif entry.raw is not None and not isinstance(entry.value, tuple | Malformed):
            yield key, dataclasses.replace(entry, value=(entry,))  # A single value is a list.
        else:
            problems.append(f"{entry.source}: {here}: expected a list of values")


def _check_overlap(
    product: Mapping[str, Node],
    zipped: Mapping[str, Node],
    nodes: Sequence[Node | None],
    problems: list[str],
) -> None:
    """Reports keys that are given more than once: in product, in zip or on the command line."""
    placed = [*product.items(), *zipped.items()]
    keys = [key for key, _ in placed]
    for place, (key, node) in enumerate(placed):
        above = [other for other in keys[:place] if _inside(key, other) or _inside(other, key)]
        if above:
            problems.append(f"{node.source}: {loader.SWEEP}: {key} and {above[0]} overlap")
    for node in nodes:
        if node is None or node.source != merging.COMMAND_LINE:
            continue
        path = ".".join(_path(node))
        if any(_inside(path, key) for key in keys):
            problems.append(f"{merging.COMMAND_LINE}: {path}: the sweep sets this key")


def _inside(key: str, other: str) -> bool:
    return key == other or key.startswith(f"{other}.")


def _path(node: Node) -> Iterator[str]:
    """Yields the keys from a mapping that holds one value down to the value."""
    while isinstance(node.value, dict) and len(node.value) == 1:
        ((key, node),) = node.value.items()
        yield key
        if node.raw is not None:
            return


def _plain(node: Node) -> Any:
    if isinstance(node.value, dict):
        return {key: _plain(item) for key, item in node.value.items()}
    if isinstance(node.value, tuple):
        return [_plain(item) for item in node.value]
    return merging.text_of(node) if isinstance(node.value, str | Malformed) else node.value


def _name(values: Mapping[str, Any]) -> str:
    """Returns a point's directory name, such as drafter.block_size=8,decode.temperature=0.8.

    Names get a hash if they are long, have characters that file systems may not accept, or could
    also be the name of other values.
    """
    full = ",".join(f"{key}={label(value)}" for key, value in values.items())
    fit = ",".join(f"{key}={_UNFIT.sub('-', label(value))}" for key, value in values.items())
    ambiguous = any(_is_ambiguous(value) or "," in label(value) for value in values.values())
    if fit == full and len(fit) <= _MAX_NAME_CHARACTERS and not ambiguous:
        return fit
    content = json.dumps(values, sort_keys=True) if ambiguous else full
    digest = hashlib.sha256(content.encode()).hexdigest()[:8]
    return f"{fit[:_MAX_NAME_CHARACTERS]}-{digest}"


def _is_ambiguous(value: Any) -> bool:
    """Returns whether another value may have the same label."""
    words = "null", "true", "false"
    if not isinstance(value, list | dict):
        return isinstance(value, str) and value in words
    items = value.values() if isinstance(value, dict) else value
    return any(
        isinstance(item, list | dict) or "-" in label(item) or label(item) in ("", *words)
        for item in items
    )


def label(value: Any) -> str:
    """Returns a short label of a value: 8, null, a-b for a list, block_size-8 for a mapping."""
    if isinstance(value, dict):
        # Leave out the key `name`: its value alone identifies the group.
        return "-".join(label(v) if k == "name" else f"{k}-{label(v)}" for k, v in value.items())
    if isinstance(value, list):
        return "-".join(map(label, value))
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


def attributed(points_by_problem: Mapping[str, Sequence[str]], count: int) -> Iterator[str]:
    """Yields each problem with its points, unless all points have it."""
    for problem, names in points_by_problem.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        yield problem if len(names) == count else f"{problem} [{names[0]}{more}]"
