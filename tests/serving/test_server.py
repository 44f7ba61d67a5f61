"""Tests of the server's log: advice on the block size, from its own counters."""

import asyncio
import types

import pytest

from dflash.drafters.dflash_config import DFlashConfig
from dflash.serving import server
from dflash.serving.metrics import Totals


def test_acceptance_lengths_follow_from_the_counters():
    totals = Totals(cycles=100, accepted_at=[50, 20, 0])
    assert server.acceptance(totals).cycles == {1: 50, 2: 30, 3: 20, 4: 0}
    assert server.acceptance(totals).tau(4) == pytest.approx(1 + 0.5 + 0.2)


@pytest.mark.parametrize(("cycles", "told"), [(server.ADVISE_AFTER, 1), (10, 0)])
def test_blocks_that_are_longer_than_needed_are_told_once(monkeypatch, capsys, cycles, told):
    monkeypatch.setattr(server, "EVERY_S", 0.0)
    totals = Totals(cycles=cycles, accepted_at=[cycles // 2] + [0] * 14)
    service = types.SimpleNamespace(
        metrics=types.SimpleNamespace(totals=totals), in_flight=0, stats={}
    )

    async def write() -> None:
        task = asyncio.create_task(server.write_log(service, DFlashConfig()))
        for _ in range(20):
            await asyncio.sleep(0)
        task.cancel()

    asyncio.run(write())
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == told
    assert all("cycles of 16 rows commit 1.50 tokens" in line for line in lines)
    assert all("drafter.block_size=2 (or auto, which measures)" in line for line in lines)
