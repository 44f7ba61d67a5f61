"""Tests of drafting on other devices: outputs are those of plain decoding."""

import jax
import pytest
from flax import nnx
from support import models, other_targets
from support.engines import (
    check_plain_outputs,
    completions,
    count_compilations,
    engine,
    expected,
    make_requests,
    outcomes,
    random_prompts,
)
from support.engines import decode as outputs

from dflash.config import schema
from dflash.drafters.autoregressive import Autoregressive
from dflash.drafters.base import Drafter
from dflash.inference.overlap.engine import OverlappedEngine
from dflash.models.decoder import Decoder
from dflash.offline.decoding import decode
from dflash.parallel import sharding

PROMPTS, LIMITS, STOPS = random_prompts([9, 16, 5, 12, 3, 14]), [12, 3, 8, 5, 7, 4], (3,)


def overlapped(
    drafter: str | Drafter, *, on: Decoder | None = None, fan_out: int = 2, **options
) -> OverlappedEngine:
    """An engine over the tiny target, unless told otherwise, whose drafter is on other devices."""
    target = on or models.target()
    there = elsewhere(target)
    if isinstance(drafter, str):
        drafter = models.drafter(drafter, sharding=there, arch=target.arch, block_size=4)
    sizes = {"page_size": 16, "prefill_chunk": 16, "batch_size": 4, "sync_every": 3}
    config = schema.DecodeConfig(**sizes | options)
    return OverlappedEngine(
        target, drafter, config, fan_out=fan_out, drafter_sharding=there, max_length=64
    )


def elsewhere(target: Decoder) -> sharding.Sharding:
    """As many devices beside the target's as it has replicas."""
    return sharding.beside(target.sharding, target.sharding.size("batch"))


def test_a_drafter_that_is_the_target_foresees_every_outcome():
    target = models.target()
    model = type(target)(target.arch, dtype=target.dtype, sharding=elsewhere(target))
    nnx.update(model, jax.device_put(nnx.state(target), elsewhere(target).replicated()))
    drafter = Autoregressive(model, block_size=4)
    run = overlapped(drafter, fan_out=1, batch_size=2, sync_every=2)
    prompts, limits, stats = PROMPTS[:3], [9, 4, 7], []
    run.compile(map(len, prompts))
    with count_compilations() as compilations:
        events = list(decode(run, make_requests(prompts, limits), stats.append))
    assert compilations == []
    assert outcomes(completions(events)) == expected(prompts, limits)
    events = stats[0].events
    assert events["speculation_hits"] == events["speculation_lookups"] > 0
    assert events["redrafted_cycles"] == 0


@pytest.mark.parametrize("name", ["autoregressive", "eagle3", "dflash"])
def test_outputs_are_those_of_plain_decoding(name):
    check_plain_outputs(overlapped(name), PROMPTS, LIMITS, STOPS)


def test_replicas_share_a_drafter():
    run = overlapped("eagle3", on=models.target((2, 1, 1)))
    check_plain_outputs(run, PROMPTS, LIMITS, STOPS)


def test_a_target_may_keep_recurrent_state():
    target = other_targets.target("qwen3_next")
    run = overlapped("eagle3", on=target)
    plain = engine(on=target, batch_size=4, sync_every=3)
    for temperature in (0.0, 0.8):
        how = {"temperature": temperature, "seed": 4}
        done, wanted = (outputs(each, PROMPTS, LIMITS, **how) for each in (run, plain))
        assert outcomes(done) == outcomes(wanted)


def test_a_preempted_sequence_goes_on_where_it_was():
    run = overlapped("autoregressive", num_pages=8)
    check_plain_outputs(run, PROMPTS, LIMITS, STOPS)
