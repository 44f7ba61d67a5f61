"""What several tests share: models, meshes, golden vectors, cases, and processes to start."""

import pathlib
import socket

SUPPORT = pathlib.Path(__file__).parent
TESTS = SUPPORT.parent


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]
