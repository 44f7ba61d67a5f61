"""Fuzzed requests beside honest clients; tools/fuzz_server.py has many of them."""

import importlib.util
import pathlib
import sys

import pytest
from support import served

TOOL = pathlib.Path(__file__).parents[2] / "tools" / "fuzz_server.py"


@pytest.fixture(scope="module")
def tool():
    specification = importlib.util.spec_from_file_location("fuzz_server", TOOL)
    module = importlib.util.module_from_spec(specification)
    sys.modules["fuzz_server"] = module  # Dataclasses look their module up.
    specification.loader.exec_module(module)
    return module


def test_fuzzed_requests_change_no_honest_output(tool, tmp_path):
    with served.serving(tmp_path, *tool.OPTIONS) as server:
        _, _, findings = tool.fuzz(server, 150, seed=2, at_a_time=12, alone_s=1.0)
        assert findings.problems == []
        assert all(findings.seconds)
        assert {"200", "400"} <= {status for _, status in findings.statuses}
