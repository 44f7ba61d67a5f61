"""What several tests share: models, meshes, golden vectors, cases, and processes to start."""

import pathlib
import socket

import pytest

from dflash import errors

SUPPORT = pathlib.Path(__file__).parent
TESTS = SUPPORT.parent


def exit_status(main, *arguments) -> int:
    """Returns the exit status of a command."""
    with pytest.raises(SystemExit) as caught:
        main([str(argument) for argument in arguments])
    return caught.value.code


def failure(function, *arguments, kind=errors.CheckpointError, **options) -> str:
    """Returns the message of the error that a call raises, which is one line."""
    with pytest.raises(kind) as caught:
        function(*arguments, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]
