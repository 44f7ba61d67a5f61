"""The server of all tests of a worker."""

import pytest
from support import served


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    """A server with and without drafting, ready, which reports no defect until the end."""
    options = "serve.tool_format=hermes", "serve.compare=true"
    with served.serving(tmp_path_factory.mktemp("served"), *options) as running:
        yield running
        assert running.process.poll() is None, running.log.read_text()
        assert "Traceback" not in running.log.read_text()
