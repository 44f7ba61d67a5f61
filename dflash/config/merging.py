"""Lookup of config files, reading them with their bases, and merging of the layers."""

import dataclasses
import pathlib
from collections.abc import Collection, Mapping, Sequence

import ml_collections

from dflash import errors
from dflash.config import encoding, registry, strict_yaml
from dflash.config.strict_yaml import Node
from dflash.storage import hub
from dflash.storage.files import read_regular
from dflash.storage.paths import in_bucket, to_path

COMMAND_LINE = "command line"
_SUFFIXES = (".yml", ".yaml")
_NO_CONFIG = f"expected a file of type {' or '.join(_SUFFIXES)}"
_MAX_BYTES = 2**20  # Limit for a config file; the largest resolved config has a few thousand bytes.
Path = tuple[str, ...]  # Path of a key, such as ("decode", "seed").


@dataclasses.dataclass(frozen=True)
class ConfigTree:
    """All layers, merged.

    Attributes:
      content: Nested mappings with nodes as leaves, each from the latest layer that has it.
      places: Node that last wrote each key, mappings included.
      origin: Name of the main file.
    """

    content: ml_collections.ConfigDict
    places: dict[Path, Node]
    origin: str

    def source(self, *paths: Path) -> str:
        """Returns the source to name in a problem with the keys `paths`.

        It is the command line if one of the keys was given there, else the source of the first key
        that was given, else the source of the first key's group.
        """
        written = [self.places[path].source for path in paths if path in self.places]
        if COMMAND_LINE in written:
            return COMMAND_LINE
        groups = (paths[0][:end] for end in range(len(paths[0]) - 1, 0, -1))
        written += [self.places[path].source for path in groups if path in self.places]
        return written[0] if written else self.origin


def package_configs() -> pathlib.Path:
    """Returns the directory of shipped configs: package data or a checkout's `configs/`."""
    # Resolve relative to this file, since the working directory may also have a `dflash` directory.
    package = pathlib.Path(__file__).resolve().parents[1]
    installed = package / "configs"
    return installed if installed.is_dir() else package.parent / "configs"


def find_config(path: str | pathlib.Path) -> pathlib.Path:
    """Returns the path of a config file, looked up as given, then among the shipped configs.

    Raises:
      ConfigError: There is no such file; the message suggests the nearest shipped config.
    """
    candidate = to_path(path) if in_bucket(path) else pathlib.Path(path)
    if exists(candidate):
        if candidate.is_dir():
            raise errors.ConfigError(
                f"{path}: is a directory, expected a config{_inside(candidate)}"
            )
        return candidate
    shipped = _shipped(candidate)
    if shipped is not None:
        return shipped
    configs = package_configs()
    known = [f"configs/{config.relative_to(configs)}" for config in configs.rglob("*.yml")]
    near = registry.suggest(str(path), known, exhaustive=False)
    if not near and candidate.suffix not in _SUFFIXES:
        near = f"; expected a config; give a model as CONFIG target.checkpoint={path}"
    raise errors.ConfigError(f"{path}: no such file{near}")


def read(
    path: str | pathlib.Path, problems: list[str], *, is_named: bool = False
) -> tuple[list[Node | None], str]:
    """Reads a config file and its bases, earliest first.

    Args:
      path: Path of the main file, as `find_config` accepts it.
      problems: List to which problems are appended.
      is_named: Whether another config names the file; see `_is_config`.
    Returns:
      One mapping per file, of which later ones win, None for a file that cannot be read; the main
      file's name for messages.
    """
    try:
        main = find_config(path)
    except errors.ConfigError as error:
        problems.extend(error.problems)
        return [None], str(path)
    if is_named and not _is_config(main):
        problems.append(f"{path}: {_NO_CONFIG}")
        return [None], str(path)
    return _read_with_bases(main, (), problems), _display(main)


def is_checkpoint(path: str | pathlib.Path) -> bool:
    """Returns whether CONFIG names a checkpoint: hf:org/name, or a directory with a config.json.

    A directory with a config.yml is that of a run.
    """
    directory = to_path(path) if in_bucket(path) else pathlib.Path(path)
    model, run = (exists(directory / name) for name in ("config.json", "config.yml"))
    return str(path).startswith(hub.PREFIX) or (model and not run)


def checkpoint_layer(path: str | pathlib.Path) -> Node:
    """Returns the config of a checkpoint alone: the target, without a drafter."""
    source = str(path)
    target = Node({"checkpoint": Node(source, source, source)}, source)
    chat = Node({"chat": Node(None, source)}, source)  # Prompts use the template if there is one.
    return Node({"target": target, "prompts": chat}, source)


def parse_overrides(overrides: Sequence[str], problems: list[str]) -> list[Node]:
    """Parses each `key=value` argument to a mapping, and appends errors to `problems`."""
    nodes = []
    for override in overrides:
        key, equals, text = override.partition("=")
        path = key.split(".")
        if not equals or not all(path):
            problems.append(f"{COMMAND_LINE}: {override!r}: expected key=value")
        elif len(path) > strict_yaml.MAX_DEPTH:
            problems.append(too_deep(COMMAND_LINE, key))
        elif path[0] == "base":
            problems.append(f"{COMMAND_LINE}: base: is only allowed in a file")
        else:
            node = strict_yaml.parse_value(text, COMMAND_LINE)
            for name in reversed(path):
                node = Node({name: node}, COMMAND_LINE)
            nodes.append(node)
    return nodes


def merge(
    layers: Sequence[Sequence[Node]],
    named_groups: Collection[str],
    origin: str,
    alternatives: Sequence[Collection[Path]] = (),
) -> ConfigTree:
    """Merges layers: mappings merge, other values replace.

    A layer that gives one of `named_groups` another `name` resets that group, since keys of one
    drafter do not apply to another. A layer that gives one of several alternatives removes the
    others.

    Args:
      layers: Layers, of which later ones win. The mappings of a layer count as one, such as all
        arguments of the command line.
      named_groups: Top-level keys whose `name` chooses their schema.
      origin: Name of the main file.
      alternatives: Sets of mutually exclusive keys.
    """
    content, places = _empty(), {}
    for layer in layers:
        for group in named_groups:
            if _renames(content.get(group), layer, group):
                del content[group]
                for path in [path for path in places if path[0] == group]:
                    del places[path]
        for paths in alternatives:
            present = [path for path in paths if any(_gives(node, path) for node in layer)]
            for path in paths if present else ():
                if path not in present:
                    _drop(content, path, places)
        for node in layer:
            _merge_into(content, node.value, (), places)
    return ConfigTree(content, places, origin)


def inherit(tree: ConfigTree, mapping: str, group: str, names: Collection[str]) -> list[str]:
    """Completes the entries of `mapping`, each an override of `group`, in place.

    The name of an entry is its `name`, else its key if that is a known name, else the name of
    `group`. An entry inherits the keys of `group` if their names are equal. An entry may also be
    the path of a config file, whose `group` is then used.

    Args:
      tree: All layers, merged.
      mapping: Top-level key of the entries.
      group: Top-level key of the group that they override.
      names: Valid names of `group`.
    Returns:
      Every problem found, one line each.
    """
    entries = tree.content.get(mapping)
    if not isinstance(entries, ml_collections.ConfigDict):
        return []
    problems: list[str] = []
    shared = tree.content.get(group)
    shared = shared if isinstance(shared, ml_collections.ConfigDict) else _empty()
    for key in list(entries):
        entry, here = entries[key], (mapping, key)
        if isinstance(entry, Node):
            if not isinstance(entry.value, str | None):
                continue  # `build` reports it.
            entry = _entry_from_file(entry, tree, here, group, problems)
        name = _name_of(entry)
        if name is None:
            name = key if key in names else _name_of(shared)
        if name is None:
            where = f"{tree.source(here)}: {mapping}.{key}"
            near = registry.suggest(key, names)
            problems.append(f"{where}: unknown name {key!r}{near}; or set {key}.name")
        completed = _empty()
        if name == _name_of(shared):
            _overlay(completed, shared, tree.places, (group,), here)
        _overlay(completed, entry, tree.places, here, here)
        if name is not None and "name" not in completed:
            completed["name"] = Node(name, tree.places[here].source)
        entries[key] = completed
    return problems


def too_deep(source: str, key: str) -> str:
    """Returns the message for a dotted key with too many names."""
    return f"{source}: {key[:40]}…: nested deeper than {strict_yaml.MAX_DEPTH} levels"


def text_of(node: Node) -> object:
    """Returns the value for a string field: the text as typed, if it is from the command line."""
    return node.value if node.raw is None else node.raw


def _empty() -> ml_collections.ConfigDict:
    # Accept keys with dots here, so that `build` can report them as unknown keys.
    return ml_collections.ConfigDict(type_safe=False, allow_dotted_keys=True)


def _merge_into(content, layer: Mapping[str, Node], path: Path, places: dict[Path, Node]) -> None:
    for key, node in layer.items():
        here = (*path, key)
        if not isinstance(node.value, dict):
            content[key], places[here] = node, node
            continue
        if not isinstance(content.get(key), ml_collections.ConfigDict):
            content[key], places[here] = _empty(), node
        elif node.raw is not None:
            places[here] = node
        _merge_into(content[key], node.value, here, places)


def _entry_from_file(
    entry: Node, tree: ConfigTree, here: Path, group: str, problems: list[str]
) -> ml_collections.ConfigDict:
    """Returns the `group` of the config file that an entry names; empty if it names none."""
    content = _empty()
    if entry.value is None:
        return content
    own_problems: list[str] = []
    files, _ = read(entry.value, own_problems, is_named=True)
    problems += [f"{entry.source}: {'.'.join(here)}: {problem}" for problem in own_problems]
    for node in files:
        if node is not None and group in node.value:
            _merge_into(content, {group: node.value[group]}, (), {})
    content = content.get(group, _empty())
    return content if isinstance(content, ml_collections.ConfigDict) else _empty()


def _overlay(content, over, places: dict[Path, Node], written: Path, here: Path) -> None:
    """Merges `over`, whose keys were written below `written`, into `content` at `here`."""
    for key, item in over.items():
        there, place = (*written, key), (*here, key)
        if there in places:
            places[place] = places[there]
        if not isinstance(item, ml_collections.ConfigDict):
            content[key] = item
            places.setdefault(place, item)
            continue
        if not isinstance(content.get(key), ml_collections.ConfigDict):
            content[key] = _empty()
        _overlay(content[key], item, places, there, place)


def _name_of(group: ml_collections.ConfigDict) -> str | None:
    node = group.get("name")
    text = text_of(node) if isinstance(node, Node) else None
    return text if isinstance(text, str) else None


def _renames(current: object, layer: Sequence[Node], group: str) -> bool:
    old = current.get("name") if isinstance(current, ml_collections.ConfigDict) else None
    if not isinstance(old, Node):
        return False
    groups = (node.value[group].value for node in layer if group in node.value)
    names = [entry["name"] for entry in groups if isinstance(entry, dict) and "name" in entry]
    # A null name means to infer it, so it is not another name.
    return bool(names) and names[-1].value is not None and text_of(names[-1]) != text_of(old)


def _inside(directory: pathlib.Path) -> str:
    """Returns a suggestion for a directory that was given instead of a config."""
    if (directory / "config.yml").is_file():
        return f"; the config of the run in it is {directory / 'config.yml'}"
    if (directory / "config.json").is_file():
        return f"; give a checkpoint as CONFIG target.checkpoint={directory}"
    return ", such as configs/tiny_dflash.yml"


def _gives(layer: Node, path: Path) -> bool:
    """Returns whether a layer has a value for a key, neither null nor an empty list."""
    node = layer
    for name in path:
        if not isinstance(node.value, dict) or name not in node.value:
            return False
        node = node.value[name]
    return node.value is not None and node.value != ()


def _drop(content, path: Path, places: dict[Path, Node]) -> None:
    """Removes a key and its place, if present."""
    for name in path[:-1]:
        content = content.get(name) if isinstance(content, ml_collections.ConfigDict) else None
    if isinstance(content, ml_collections.ConfigDict) and path[-1] in content:
        del content[path[-1]]
        places.pop(path, None)


def _shipped(path: pathlib.Path) -> pathlib.Path | None:
    parts = path.parts[1:] if path.parts[:1] == ("configs",) else path.parts
    shipped = package_configs().joinpath(*parts)
    return shipped if exists(shipped) and shipped.is_file() else None


def exists(path: pathlib.Path) -> bool:
    """Returns whether the path exists; False for an invalid path."""
    try:
        return path.exists()
    except (OSError, ValueError):  # The path is too long, or has a null character.
        return False


def _read_with_bases(
    path: pathlib.Path, chain: tuple[pathlib.Path, ...], problems: list[str]
) -> list[Node | None]:
    name = _display(path)
    node, own_problems = _read_one(path, name)
    problems.extend(own_problems)
    if node is None:
        return [None]
    content = dict(node.value)
    bases = content.pop("base", None)
    layers: list[Node | None] = []
    for base in _base_names(bases, problems):
        base_path = path.parent / base.value
        if not exists(base_path):
            base_path = _shipped(pathlib.Path(base.value))
        if base_path is None:
            problem = (
                f"no such file {base.value!r}, neither beside this file nor among the shipped "
                "configs"
            )
        elif not _is_config(base_path):
            problem = f"{base.value!r}: {_NO_CONFIG}"
        elif base_path.resolve() in (resolved := [link.resolve() for link in (*chain, path)]):
            cycle = [*resolved[resolved.index(base_path.resolve()) :], base_path.resolve()]
            problem = f"cycle {' -> '.join(map(_display, cycle))}"
        else:
            problem = None
        if problem:
            problems.append(f"{base.source}: base: {problem}")
            layers.append(None)
        else:
            layers += _read_with_bases(base_path, (*chain, path), problems)
    return [*layers, Node(content, name)]


def _is_config(path: pathlib.Path) -> bool:
    """Returns whether a config may name a file: error messages may quote what is in it."""
    return path.resolve().suffix in _SUFFIXES


def _read_one(path: pathlib.Path, name: str) -> tuple[Node | None, list[str]]:
    try:
        content = read_regular(path, _MAX_BYTES + 1)
        if len(content) > _MAX_BYTES:
            return None, [f"{name}: larger than {_MAX_BYTES:,} bytes, the limit for a config"]
        return strict_yaml.parse(encoding.decode(content), name)
    except errors.InputError as error:
        return None, [f"{name}: {error}"]
    except OSError as error:
        return None, [f"{name}: cannot be read: {error.strerror}"]


def _base_names(bases: Node | None, problems: list[str]) -> list[Node]:
    if bases is None:
        return []
    names = bases.value if isinstance(bases.value, tuple) else ()
    if not names or not all(isinstance(base.value, str) for base in names):
        problems.append(f"{bases.source}: base: expected a list of files, such as [models/x.yml]")
        return []
    return list(names)


def _display(path: pathlib.Path) -> str:
    """Returns the path for messages, relative if it is below the working directory."""
    if not path.is_absolute() and ".." not in path.parts:
        return str(path)
    resolved, here = path.resolve(), pathlib.Path.cwd()
    return str(resolved.relative_to(here) if resolved.is_relative_to(here) else resolved)
