"""Shell completion: dflash completion bash|zsh|fish prints a script.

The scripts call `dflash completion SHELL --line LINE`, which prints the candidates. These follow
from the subcommands, their flags, and the schema of the config on the command line.
"""

import importlib
import os
import pathlib
import shlex
from collections.abc import Iterable, Iterator, Sequence

from absl import flags

from dflash import errors
from dflash.cli import subcommand as cli
from dflash.cli.commands import COMMANDS
from dflash.config import build, keys, loader, merging, registry, schema

_BASH = """\
_dflash() {
    local line="${COMP_LINE:0:COMP_POINT}" found
    # Bash splits words at = and :, and replaces only what follows the last of them.
    local word="${line##*[[:space:]]}"
    local kept="${word%"${word##*[=:]}"}"
    COMPREPLY=()
    while IFS= read -r found; do
        COMPREPLY+=("${found#"$kept"}")
    done < <(dflash completion bash --line="$line" 2>/dev/null)
}
complete -o nospace -F _dflash dflash
"""
_ZSH = """\
#compdef dflash
_dflash() {
    local -a found
    found=("${(@f)$(dflash completion zsh --line="${BUFFER[1,CURSOR]}" 2>/dev/null)}")
    compadd -Q -S '' -U -- ${found:#}
}
compdef _dflash dflash
"""
_FISH = """\
complete -c dflash -f -a '(dflash completion fish --line=(commandline -cp) 2>/dev/null)'
"""
_SCRIPTS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}
# Folders of the shipped configs of each command, if not the top-level one.
_FOLDERS = {
    "train": ("train",),
    "distill": ("distill",),
    "benchmark": ("benchmark",),
    "sweep": ("sweeps",),
    "compile": ("", "train"),
}
_SWEPT = ("sweep.product.", "sweep.zip.")


def _define_flags(values: flags.FlagValues) -> None:
    flags.DEFINE_string(
        "line", None, "Instead, print what may follow this line, for scripts.", flag_values=values
    )


SUBCOMMAND = cli.Subcommand(
    "completion",
    "Prints a script that completes subcommands, flags, configs, keys and values in a shell: bash, "
    "zsh or fish.",
    examples=(
        "source <(dflash completion bash)              # in ~/.bashrc",
        "source <(dflash completion zsh)               # in ~/.zshrc, after compinit",
        "dflash completion fish > ~/.config/fish/completions/dflash.fish",
    ),
    arguments=("SHELL",),
    define_flags=_define_flags,
)


def _completion(command: cli.Command) -> None:
    (shell,) = command.arguments
    if shell not in _SCRIPTS:
        raise errors.ConfigError(f"{shell}: no such shell{registry.suggest(shell, _SCRIPTS)}")
    if command.flags["line"] is None:
        print(_SCRIPTS[shell], end="")
        return
    completions = candidates(*split(command.flags["line"]))
    # fish adds the space after a candidate.
    print("\n".join(text.rstrip() if shell == "fish" else text for text in completions))


def split(line: str) -> tuple[list[str], str]:
    """Splits a command line into its complete words after the program, and the last word."""
    try:
        words = shlex.split(line)
    except ValueError:  # an unclosed quotation mark
        words = line.split()
    word = "" if line[-1:].isspace() or not words else words.pop()
    return words[1:], word


def candidates(words: Sequence[str], word: str) -> list[str]:
    """Returns the candidates for a word; complete words end with a space.

    Args:
      words: Words between `dflash` and the word to complete.
      word: Beginning of the word; may be empty.
    """
    if not words:
        options = [f"{name} " for name in (*COMMANDS, "--help", "--version")]
    elif words[0] in COMMANDS:
        options = _of_subcommand(_subcommand(words[0]), words[1:], word)
    else:
        options = []
    return sorted({option for option in options if option.startswith(word)})


def _subcommand(name: str) -> cli.Subcommand:
    return importlib.import_module(COMMANDS[name][0]).SUBCOMMAND


def _of_subcommand(subcommand: cli.Subcommand, words: Sequence[str], word: str) -> Iterable[str]:
    values = subcommand.flag_values()
    waiting = words[-1].lstrip("-") if words and words[-1].startswith("-") else ""
    if waiting in values and not values[waiting].boolean:
        return _of_flag(values[waiting], word)
    name, equals, begun = word.partition("=")
    if word.startswith("-"):
        if equals and name.lstrip("-") in values:
            return [f"{name}={value}" for value in _of_flag(values[name.lstrip("-")], begun)]
        return _flag_names(values)
    arguments = [argument for argument in words if not argument.startswith("-")]
    if not subcommand.takes_config:
        return paths(word)
    if not arguments or "=" in arguments[0]:
        return [*shipped(subcommand.name), *paths(word, (".yml", ".yaml"))]
    return overrides(known(subcommand, arguments), word, swept=subcommand.name == "sweep")


def _flag_names(values: flags.FlagValues) -> Iterator[str]:
    for name in values:
        if len(name) > 1:
            flag = values[name]
            yield f"--{name} " if flag.boolean else f"--{name}="
            if flag.boolean and flag.default:
                yield f"--no{name} "


def _of_flag(flag: flags.Flag, begun: str) -> Iterable[str]:
    choices = getattr(flag.parser, "enum_values", None)
    if choices is not None:
        return [f"{value} " for value in choices]
    return paths(begun) if isinstance(flag.value, str | None) else []


def known(subcommand: cli.Subcommand, arguments: Sequence[str]) -> list[keys.Key]:
    """Returns the keys of the config of a subcommand, given its file and overrides.

    Args:
      subcommand: Subcommand that takes a config.
      arguments: Path of the config and the overrides so far; invalid ones are ignored.
    """
    problems: list[str] = []
    files, origin = merging.read(arguments[0], problems)
    readable = [loader.without_sweep(file) for file in files if file is not None]
    schemas = subcommand.schema if isinstance(subcommand.schema, tuple) else (subcommand.schema,)
    run = loader.fitting(schemas, readable)
    line = [loader.without_sweep(node) for node in merging.parse_overrides(arguments[1:], problems)]
    layered = [*([file] for file in readable), line]
    tree = merging.merge(layered, build.named_groups(run), origin)
    for mapping, group in build.overriding_groups(run):
        merging.inherit(tree, mapping, group, registry.DRAFTERS)
    return list(keys.known_keys(run, tree.content))


def overrides(config_keys: Sequence[keys.Key], word: str, *, swept: bool = False) -> list[str]:
    """Returns the candidates for key=value: the next part of the key, or the value.

    Args:
      config_keys: Keys of the config.
      word: Beginning of key=value.
      swept: Whether keys may have the prefix of a sweep.
    """
    prefix = next((text for text in _SWEPT if swept and word.startswith(text)), "")
    key, equals, begun = word.removeprefix(prefix).partition("=")
    if not equals:
        names = _parts(config_keys, key)
        blocks = ["sweep.run=", *_SWEPT] if swept and not prefix else []
        return [*(f"{prefix}{name}" for name in names), *blocks]
    if swept and key == "sweep.run":
        return [f"{word[: -len(begun)] if begun else word}{name} " for name in registry.RUNS]
    for config_key in config_keys:
        if ".".join(config_key.path) == key:
            return [f"{prefix}{key}={value}" for value in _values(config_key, begun)]
    return []


def _parts(config_keys: Iterable[keys.Key], begun: str) -> Iterator[str]:
    """Yields the keys that begin with `begun`, up to their next dot."""
    for key in config_keys:
        name = ".".join(key.path)
        if not name.startswith(begun):
            continue
        untyped = name[len(begun) :]
        if "." in untyped:
            yield begun + untyped[: untyped.index(".") + 1]
        elif not key.is_group or key.values:
            yield f"{name}="


def _values(key: keys.Key, begun: str) -> list[str]:
    values = [f"{value} " for value in key.values]
    if key.place == "checkpoint":
        values.append(f"{schema.RANDOM} ")
    if key.place in ("checkpoint", "tokenizer"):
        assets = pathlib.Path(__file__).parent / "assets"
        values += [f"assets/{path.name} " for path in sorted(assets.iterdir()) if path.is_dir()]
    return [*values, *paths(begun)] if key.place is not None else values


def shipped(command: str) -> list[str]:
    """Returns the shipped configs of a command, in the form that the command accepts."""
    directory = merging.package_configs()
    folders = (directory / folder for folder in _FOLDERS.get(command, ("",)))
    configs = [path.relative_to(directory) for folder in folders for path in folder.glob("*.yml")]
    return [f"configs/{path} " for path in configs]


def paths(begun: str, suffixes: tuple[str, ...] = ("",)) -> list[str]:
    """Returns the files and directories that complete a path; keeps `~` unexpanded."""
    name = begun.rpartition("/")[2]
    shown = begun[: len(begun) - len(name)]
    matches = []
    try:
        with os.scandir(pathlib.Path(shown or ".").expanduser()) as entries:
            for entry in entries:
                if entry.name.startswith(".") and not name.startswith("."):
                    continue
                if entry.is_dir():
                    matches.append(f"{shown}{entry.name}/")
                elif entry.name.endswith(suffixes):
                    matches.append(f"{shown}{entry.name} ")
    except (OSError, RuntimeError, ValueError):  # the directory or the user does not exist
        return []
    return matches


main = cli.entry_point(SUBCOMMAND, _completion)

if __name__ == "__main__":
    main()
