"""One server for all tests of a worker."""

import pytest
from support import served


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    """A server over the tiny family, ready."""
    with served.serving(
        tmp_path_factory.mktemp("served"), "serve.compare=true", "serve.tool_format=hermes"
    ) as running:
        yield running
        assert running.process.poll() is None, running.log.read_text()
        assert "Traceback" not in running.log.read_text()
