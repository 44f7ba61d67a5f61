"""A small soak; tools/soak_server.py has the long one."""

import asyncio
import collections

import pytest
from support import scripts, served

pytest.importorskip("httpx2", reason="needs the extra test")
REQUESTS = 120


@pytest.fixture(scope="module")
def tool():
    return scripts.load("tools/soak_server.py")


def test_many_requests_leave_no_errors_and_no_state(tool, tmp_path):
    with served.serving(tmp_path, *tool.PAGES) as server:
        done = asyncio.run(tool.soak(server.url, tool.cases(REQUESTS, seed=1), 16))
        assert tool.problems(server, done) == []
        outcomes = collections.Counter(outcome for _, outcome, _ in done)
        assert min(outcomes["whole"], outcomes["cancelled"], outcomes["rejected"]) > 0
        assert tool.count(server, "vllm:num_preemptions_total") > 0
        assert tool.count(server, "vllm:prefix_cache_hits_total") > 0
