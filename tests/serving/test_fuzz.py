"""Fuzzed requests beside honest clients; tools/fuzz_server.py has many of them."""

import pytest
from support import scripts, served


@pytest.fixture(scope="module")
def tool():
    return scripts.load("tools/fuzz_server.py")


def test_fuzzed_requests_change_no_honest_output(tool, tmp_path):
    with served.serving(tmp_path, *tool.OPTIONS) as server:
        _, _, findings = tool.fuzz(server, 150, seed=2, at_a_time=12, alone_s=1.0)
        assert findings.problems == []
        assert all(findings.seconds)
        assert {"200", "400"} <= {status for _, status in findings.statuses}
