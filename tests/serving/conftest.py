"""Servers for all tests of a worker."""

import contextlib

import pytest
from support import served


@contextlib.contextmanager
def healthy(directory, *overrides):
    """A server over the tiny family, ready, which reports no defect until the end."""
    with served.serving(directory, "serve.tool_format=hermes", *overrides) as running:
        yield running
        assert running.process.poll() is None, running.log.read_text()
        assert "Traceback" not in running.log.read_text()


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    with healthy(tmp_path_factory.mktemp("served")) as running:
        yield running


@pytest.fixture(scope="session")
def comparing(tmp_path_factory):
    """A server that also decodes without drafting, with twice as many programs."""
    with healthy(tmp_path_factory.mktemp("comparing"), "serve.compare=true") as running:
        yield running
