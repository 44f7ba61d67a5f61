"""Tests of drafting on other devices: outputs are those of plain decoding."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from support import models
from support.engines import (
    check_plain_outputs,
    count_compilations,
    engine,
    expected,
    make_requests,
    random_prompts,
)
from support.engines import decode as outputs

from dflash.config import schema
from dflash.drafters.autoregressive import Autoregressive
from dflash.drafters.base import Drafter
from dflash.inference.overlap.engine import OverlappedEngine
from dflash.inference.request import RequestOutput
from dflash.models.qwen3_next import Qwen3Next
from dflash.offline.decoding import decode
from dflash.parallel import parameters, sharding

PROMPTS, LIMITS, STOPS = random_prompts([9, 16, 5, 12, 3, 14]), [12, 3, 8, 5, 7, 4], (3,)


def overlapped(drafter: str | Drafter, fan_out: int = 2, **options) -> OverlappedEngine:
    """An engine over the tiny target whose drafter is on the next device."""
    if isinstance(drafter, str):
        sizes = {"block_size": 4} if models.takes(drafter, "block_size") else {}
        drafter = models.drafter(drafter, sharding=elsewhere(), **sizes)
    config = schema.DecodeConfig(**{"page_size": 16, "prefill_chunk": 16} | options)
    return OverlappedEngine(
        models.target(),
        drafter,
        config,
        fan_out=fan_out,
        drafter_sharding=elsewhere(),
        max_length=64,
    )


def elsewhere() -> sharding.Sharding:
    """The device beside the target's."""
    return sharding.beside(models.target().sharding, 1)


def test_a_drafter_that_is_the_target_foresees_every_outcome():
    target = models.target()
    model = type(target)(target.arch, dtype=target.dtype, sharding=elsewhere())
    nnx.update(model, jax.device_put(nnx.state(target), elsewhere().replicated()))
    drafter = Autoregressive(model, block_size=4)
    run = overlapped(drafter, fan_out=1, batch_size=2, sync_every=2)
    prompts, limits, stats = PROMPTS[:3], [9, 4, 7], []
    run.compile(map(len, prompts))
    with count_compilations() as compilations:
        events = list(decode(run, make_requests(prompts, limits), stats.append))
    assert compilations == []
    done = {event.id: event for event in events if isinstance(event, RequestOutput)}
    assert [(done[i].output_ids, done[i].finish_reason) for i in range(3)] == expected(
        prompts, limits
    )
    events = stats[0].events
    assert events["speculation_hits"] == events["speculation_lookups"] > 0
    assert events["redrafted_cycles"] == 0


@pytest.mark.parametrize("name", ["autoregressive", "eagle3", "dflash"])
def test_outputs_are_those_of_plain_decoding(name):
    run = overlapped(name, batch_size=4, sync_every=3)
    check_plain_outputs(run, PROMPTS, LIMITS, STOPS)


def test_replicas_share_a_drafter():
    target = models.target((2, 1, 1))
    there = sharding.beside(target.sharding, 2)
    config = schema.DecodeConfig(page_size=16, prefill_chunk=16, batch_size=4, sync_every=3)
    run = OverlappedEngine(
        target, models.drafter("eagle3", sharding=there), config, fan_out=2, drafter_sharding=there,
        max_length=64,
    )  # fmt: skip
    check_plain_outputs(run, PROMPTS, LIMITS, STOPS)


def test_a_target_may_keep_recurrent_state():
    arch = models.family_architecture("qwen3_next", models.ARCHITECTURE)
    target = Qwen3Next(arch, dtype=jnp.float32, sharding=models.make_sharding())
    parameters.initialize(target, jax.random.key(0))
    drafter = models.drafter("eagle3", sharding=elsewhere(), arch=arch)
    config = schema.DecodeConfig(page_size=16, prefill_chunk=16, batch_size=4, sync_every=3)
    run = OverlappedEngine(
        target, drafter, config, fan_out=2, drafter_sharding=elsewhere(), max_length=64
    )
    plain = engine(on=target, batch_size=4, sync_every=3)
    for temperature in (0.0, 0.8):
        how = {"temperature": temperature, "seed": 4}
        done, wanted = (outputs(each, PROMPTS, LIMITS, **how) for each in (run, plain))
        assert [one.output_ids for one in done] == [one.output_ids for one in wanted]


def test_a_preempted_sequence_goes_on_where_it_was():
    run = overlapped("autoregressive", batch_size=4, sync_every=3, num_pages=8)
    check_plain_outputs(run, PROMPTS, LIMITS, STOPS)
