"""Tests of drafting on other devices: outputs are those of plain decoding."""

import pytest
from support import models
from support.engines import check_plain_outputs, random_prompts

from dflash.config import schema
from dflash.inference.overlap.engine import OverlappedEngine
from dflash.inference.overlap.overlap import Overlap
from dflash.parallel import sharding

SSD, PING_PONG = Overlap(groups=1, fan_out=2), Overlap(groups=2, fan_out=0)
PROMPTS, LIMITS, STOPS = random_prompts([9, 16, 5, 12, 3, 14]), [12, 3, 8, 5, 7, 4], (3,)


def overlapped(name: str, overlap: Overlap, **options) -> OverlappedEngine:
    """An engine over the tiny target whose drafter is on the next device."""
    target = models.target()
    there = sharding.beside(target.sharding, 1)
    sizes = {"block_size": 4} if models.takes(name, "block_size") else {}
    drafter = models.drafter(name, sharding=there, **sizes)
    config = schema.DecodeConfig(**{"page_size": 16, "prefill_chunk": 16} | options)
    return OverlappedEngine(
        target, drafter, config, overlap=overlap, drafter_sharding=there, max_length=64
    )


@pytest.mark.parametrize("overlap", [SSD, PING_PONG], ids=["ssd", "pingpong"])
@pytest.mark.parametrize("name", ["autoregressive", "eagle3", "dflash"])
def test_outputs_are_those_of_plain_decoding(name, overlap):
    run = overlapped(name, overlap, batch_size=4, sync_every=3)
    check_plain_outputs(run, PROMPTS, LIMITS, STOPS)


def test_a_preempted_sequence_goes_on_where_it_was():
    run = overlapped("autoregressive", SSD, batch_size=4, sync_every=3, num_pages=8)
    check_plain_outputs(run, PROMPTS, LIMITS, STOPS)
