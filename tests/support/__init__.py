"""What several tests share: models, meshes, golden vectors, cases, and processes to start."""

import io
import json
import pathlib
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterable

import pytest

from dflash import errors

SUPPORT = pathlib.Path(__file__).parent
TESTS = SUPPORT.parent


def exit_status(main, *arguments) -> int:
    """Returns the exit status of a command."""
    with pytest.raises(SystemExit) as caught:
        main([str(argument) for argument in arguments])
    return caught.value.code


def outcome(capsys, main, *arguments) -> tuple[int, str, str]:
    """Returns the exit status of a command, and what it writes to stdout and stderr."""
    return exit_status(main, *arguments), *capsys.readouterr()


def run_python(code: str, *arguments, **options) -> subprocess.CompletedProcess:
    """Runs Python code in a process of its own; `options` are those of `subprocess.run`."""
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, **options)


def read_lines(path) -> list:
    """Returns the values of a JSONL file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def write_lines(path, values: Iterable) -> str:
    """Writes values to a JSONL file, in a directory that may have to be made; returns its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(value)}\n" for value in values), encoding="utf-8")
    return str(path)


def failure(function, *arguments, kind=errors.CheckpointError, **options) -> str:
    """Returns the message of the error that a call raises, which is one line."""
    with pytest.raises(kind) as caught:
        function(*arguments, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


class Terminal(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self):
        return True


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]
