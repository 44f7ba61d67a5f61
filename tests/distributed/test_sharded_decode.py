"""Decoding over a mesh gives what one device gives: data × fsdp × tensor on eight CPU devices."""

import jax
import pytest
from tiny_models import decode, drafter, engine, expected, random_prompts, resampled

from dflash import registry

LENGTHS = [1, 16, 33, 9, 5, 3, 40, 2, 11]  # 33 takes three chunks
LIMITS = [20, 1, 12, 32, 7, 9, 2, 16, 25]
STOP_IDS = (8,)
MESHES = [(2, 1, 4), (2, 2, 2), (8, 1, 1)]


@pytest.mark.parametrize("name", sorted(registry.DRAFTERS))
@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: "data{}-fsdp{}-tensor{}".format(*mesh))
def test_a_mesh_decodes_as_one_device(name, mesh):
    data, fsdp, _ = mesh
    run = engine(
        drafter(name, mesh=mesh), mesh=mesh, batch_size=data * fsdp, sync_every=4, stop_ids=STOP_IDS
    )
    prompts = random_prompts(LENGTHS)
    for temperature in (0.0, 0.8):
        how = {"temperature": temperature, "seed": 4}
        done = decode(resampled(run, **how), prompts, LIMITS)
        wanted = expected(prompts, LIMITS, stop_ids=STOP_IDS, **how)
        assert [(one.output_ids, one.finish_reason) for one in done] == wanted
    state = run.new_state()
    keys = state.cache.keys[0]
    assert len(keys.sharding.device_set) == 8
    assert keys.addressable_shards[0].data.size * 8 == keys.size, "the cache is not split"
    assert jax.tree.all(jax.tree.map(lambda x: len(x.sharding.device_set) == 8, state))
