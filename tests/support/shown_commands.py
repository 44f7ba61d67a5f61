"""Runs commands of a page in an environment that has dflash, the named extras, and nothing else.

Usage: shown_commands.py FILE, where FILE holds as JSON the top-level modules to hide, and the
commands in order: [directory, module, arguments].
"""

import contextlib
import functools
import importlib.metadata
import importlib.util
import io
import json
import os
import pathlib
import shlex
import signal
import sys
import tomllib
from collections.abc import Iterable
from importlib.machinery import PathFinder

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = pathlib.Path(__file__).parents[2]


@functools.cache
def _providers() -> dict[str, list[str]]:
    return importlib.metadata.packages_distributions()


def hidden_modules(extras: Iterable[str]) -> list[str]:
    """Returns the installed top-level modules that dflash with some extras would not bring."""
    brought = _distributions(extras) | {"pip"}
    return sorted(
        module
        for module, names in _providers().items()
        if brought.isdisjoint(map(canonicalize_name, names)) and module != "dflash"
    )


def _distributions(extras: Iterable[str]) -> set[str]:
    """Returns the distributions that pip installs for dflash and its extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    optional = project["optional-dependencies"]
    lines = [project["dependencies"], *(optional[extra] for extra in extras)]
    pending, visited = [Requirement(line) for group in lines for line in group], set()
    while pending:
        requirement = pending.pop()
        key = canonicalize_name(requirement.name), frozenset(requirement.extras)
        if key in visited:
            continue
        visited.add(key)
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            for line in importlib.metadata.requires(key[0]) or ():
                needed = Requirement(line)
                environments = [{"extra": extra} for extra in ("", *requirement.extras)]
                if needed.marker is None or any(map(needed.marker.evaluate, environments)):
                    pending.append(needed)
    return {name for name, _ in visited}


class Hiding(PathFinder):
    """Finder of modules in `sys.path`, as if some top-level ones were not installed."""

    hidden: frozenset[str] = frozenset()

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        known = name.partition(".")[0] not in cls.hidden
        return super().find_spec(name, path, target) if known else None


class Stopping(io.StringIO):
    """Output of a server, which is stopped as soon as it prints its URL."""

    def write(self, text: str) -> int:
        if text.startswith("http://"):
            os.kill(os.getpid(), signal.SIGTERM)
        return super().write(text)


def run(directory: str, module: str, arguments: list[str]) -> int:
    """Runs a command in a directory; a chat is told one line, a server is stopped once it serves.

    Returns:
      Its exit status.
    """
    os.chdir(directory)
    sys.stdin = io.StringIO("Hi\n")
    output = Stopping() if module == "dflash.serve" else sys.stdout
    try:
        with contextlib.redirect_stdout(output):
            importlib.import_module(module).main(arguments)
    except SystemExit as exit:
        return exit.code or 0


def main() -> None:
    job = json.loads(pathlib.Path(sys.argv[1]).read_text())
    Hiding.hidden = frozenset(job["hidden"])
    sys.meta_path[sys.meta_path.index(PathFinder)] = Hiding
    for directory, module, arguments in job["commands"]:
        print("$", module, shlex.join(arguments), file=sys.stderr, flush=True)
        if status := run(directory, module, arguments):
            sys.exit(status)


if __name__ == "__main__":
    main()
