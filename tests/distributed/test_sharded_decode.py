"""Decoding over a mesh gives what one device gives: data × fsdp × tensor on eight CPU devices."""

import jax
import pytest
from support.engines import (
    check_plain_outputs,
    completions,
    decode,
    drain,
    engine,
    expected,
    make_requests,
    outcomes,
    random_prompts,
)
from support.models import drafter

from dflash.config import registry
from dflash.inference.scheduler import Scheduler

LENGTHS = [9, 16, 41, 10, 13, 31, 48, 12, 11]  # 41 takes three chunks; all one prefill program
LIMITS = [20, 1, 12, 32, 7, 9, 2, 16, 25]
STOP_IDS = (8,)
ALL_AXES = (2, 2, 2)
OTHER_MESHES = [(2, 1, 4), (8, 1, 1)]
# Every drafter on a mesh of all axes; the loop itself, which they share, on the other meshes too.
# test_prefill_rounds.py decodes without one.
CASES = [(name, ALL_AXES) for name in sorted(registry.DRAFTERS)]
CASES += [("dflash", mesh) for mesh in OTHER_MESHES]


@pytest.mark.parametrize(
    ("name", "mesh"), CASES, ids=lambda x: x if isinstance(x, str) else "x".join(map(str, x))
)
def test_a_mesh_decodes_as_one_device(name, mesh):
    data, fsdp, _ = mesh
    run = engine(drafter(name, mesh=mesh), mesh=mesh, batch_size=data * fsdp, sync_every=4)
    check_plain_outputs(run, random_prompts(LENGTHS), LIMITS, STOP_IDS)
    state = run.new_state()
    keys = state.cache.pools[0]
    assert len(keys.sharding.device_set) == 8
    assert keys.addressable_shards[0].data.size * 8 == keys.size, "the cache is not split"
    assert jax.tree.all(jax.tree.map(lambda x: len(x.sharding.device_set) == 8, state))


def test_a_mesh_splits_quantized_pages_and_their_scales():
    prompts, limits = random_prompts([9, 16, 13, 31]), [20, 7, 12, 16]
    wanted = decode(engine(batch_size=4, kv_dtype="int8"), prompts, limits)
    model = drafter("dflash", mesh=ALL_AXES, tree=True)
    run = engine(model, mesh=ALL_AXES, batch_size=4, sync_every=4, kv_dtype="int8")
    done = decode(run, prompts, limits)
    assert [one.output_ids for one in done] == [one.output_ids for one in wanted]
    assert max(max(one.acceptance_lengths) for one in done) > 1, "no draft was accepted"
    keys = run.new_state().cache.pools[0]
    for part in (keys.values, keys.scales):
        assert part.addressable_shards[0].data.size * 8 == part.size, "the cache is not split"


# Rows in an array per sequence, with one that depends on the next token, and in pages.
@pytest.mark.parametrize("name", ["dflash", "eagle3", "autoregressive"])
def test_a_mesh_shares_cached_pages_within_each_replica(name):
    """The prompts of a second round find the pages of the first, with the same drafts."""
    options = {"batch_size": 4, "sync_every": 4, "page_size": 8, "prefix_cache": True}
    run = engine(drafter(name, mesh=ALL_AXES), mesh=ALL_AXES, **options)
    assert run.num_prefill_slots == 4
    prompts, limits = random_prompts([33, 20, 26, 9, 30, 12]), [20, 12, 9, 17, 7, 20]
    how = {"temperature": 0.8, "seed": 4}
    one, rounds = Scheduler(run), []
    for _ in range(2):
        rounds.append(completions(drain(one, make_requests(prompts, limits, **how))))
    first, second = rounds
    assert outcomes(first) == outcomes(second) == expected(prompts, limits, **how)
    assert [d.acceptance_lengths for d in second] == [d.acceptance_lengths for d in first]
    assert sum(d.cached_tokens for d in first) == 0
    # A prompt goes where its pages are, unless that replica is taken.
    assert sum(d.cached_tokens for d in second) > sum(map(len, prompts)) / 3
    assert one.stats().pages_used == 0
