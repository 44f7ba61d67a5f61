"""The `dflash` command, which runs a subcommand with the remaining arguments.

    dflash COMMAND …        the same as python -m dflash.COMMAND …

Nothing heavy is imported before the subcommand is known.
"""

import importlib
import sys
from collections.abc import Sequence

from dflash.cli.commands import COMMANDS

_HELP = ("--help", "-h", "help")
_USAGE_ERROR = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a subcommand, and returns its exit status or exits with it."""
    argv = list(sys.argv[1:] if argv is None else argv)
    name, *rest = argv or [""]
    if name == "help" and rest:
        name, rest = rest[0], ["--help"]
    if name in COMMANDS:
        return importlib.import_module(COMMANDS[name][0]).main(rest)
    if name in _HELP:
        print(help_text())
        return 0
    if name == "--version":
        from dflash.version import __version__

        print(f"dflash {__version__}")
        return 0
    print(f"error: {_problem(name, rest)}" if name else help_text(), file=sys.stderr)
    return _USAGE_ERROR


def help_text() -> str:
    """Returns the text of `dflash --help`."""
    lines = [f"  {name:<16}  {summary}" for name, (_, summary) in COMMANDS.items()]
    return "\n".join(
        [
            "Fast, lossless decoding of large language models by speculative decoding.",
            "",
            "usage: dflash COMMAND …",
            "",
            "commands:",
            *lines,
            "",
            "dflash COMMAND --help explains a command, with its flags and examples.",
            "",
            "examples:",
            "  dflash decode configs/tiny_dflash.yml      the embedded models; no download",
            "  dflash decode configs/qwen3_4b_dflash.yml --dry_run",
            "  dflash doctor",
        ]
    )


def _problem(name: str, rest: Sequence[str]) -> str:
    from dflash import errors
    from dflash.config import registry, removed_keys

    if name.endswith((".yml", ".yaml")):
        line = errors.shorten(" ".join(["dflash decode", name, *rest]), 200)
        return f"{name}: a config, where a command is expected; did you mean {line!r}?"
    unknown = f"no such command{registry.suggest(name, list(COMMANDS))}"
    notice = removed_keys.notice((f"dflash {name}",)) or unknown
    return f"{errors.shorten(name, 60)}: {notice}"


if __name__ == "__main__":
    sys.exit(main())
