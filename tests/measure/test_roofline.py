"""The least time of a forward, computed independently for a target of round numbers."""

import jax.numpy as jnp
import pytest
from support import models
from support.models import make_sharding, make_target

from dflash.loading import quantization
from dflash.measure import roofline
from dflash.measure.roofline import ForwardWork, Machine
from dflash.models.deepseek_v3 import DeepseekV3
from dflash.models.dense import Qwen3
from dflash.models.qwen3_moe import Qwen3Moe
from dflash.parallel import parameters

MACHINE = Machine("toy", flops_per_s=1e9, bytes_per_s=1e6, source="made up")


def test_the_slower_of_computing_and_reading_counts():
    assert ForwardWork(2e6, 1e3).ideal_ms(MACHINE) == pytest.approx(2.0)
    assert ForwardWork(2e6, 5e3).ideal_ms(MACHINE) == pytest.approx(5.0)


def test_a_target_reads_its_weights_once_and_computes_every_row():
    """D 32, F 48, V 48, 3 layers, N/K/H 4/2/16, head not tied."""
    target = make_target()
    layer = 32 * (2 * 4 + 2 * 2) * 16 + 3 * 32 * 48 + 2 * 32 + 2 * 16  # projections, mlp, norms
    weights = 3 * layer + 32 + 48 * 32
    one = roofline.target_work(target, batch=1, rows=1, context=0)
    assert one.size_bytes == 4 * (weights + 2 * 3 * 2 * 16 * 1)
    assert one.flops == 2 * weights + 4 * 3 * 4 * 16
    many = roofline.target_work(target, batch=2, rows=8, context=100)
    assert many.size_bytes == 4 * (weights + 2 * 3 * 2 * 16 * 2 * 108)
    assert many.flops == 2 * weights * 16 + 4 * 3 * 4 * 16 * 2 * 8 * 108
    # In 8 bits a row of 16 has a byte a number, and 4 for its scale.
    small = roofline.target_work(target, batch=2, rows=8, context=100, kv_dtype="int8")
    assert small.size_bytes == 4 * weights + 2 * 3 * 2 * (16 + 4) * 2 * 108
    assert small.flops == many.flops


def test_experts_count_as_far_as_rows_touch_them():
    """E 8 of width 24, 2 of them a token, beside attention as in the dense target."""
    arch = models.family_architecture("qwen3_moe")
    target = Qwen3Moe(arch, dtype=jnp.float32, sharding=make_sharding())
    experts = 3 * 8 * 3 * 32 * 24
    rest = 3 * (32 * 12 * 16 + 2 * 32 + 2 * 16 + 32 * 8) + 32 + 48 * 32
    one = roofline.target_work(target, batch=1, rows=1, context=0)
    assert one.size_bytes == pytest.approx(4 * (rest + experts * 2 / 8 + 2 * 3 * 2 * 16))
    assert one.flops == pytest.approx(2 * (rest + experts * 2 / 8) + 4 * 3 * 4 * 16)
    many = roofline.target_work(target, batch=2, rows=4, context=0)
    read = 1 - (6 / 8) ** 8
    assert many.size_bytes == pytest.approx(4 * (rest + experts * read + 2 * 3 * 2 * 16 * 8))
    assert many.flops == pytest.approx(16 * (rest + experts * 2 / 8) + 4 * 3 * 4 * 16 * 8 * 4)


def test_latent_attention_reads_its_latents_and_weights_of_eight_bits_a_byte_each():
    arch = models.family_architecture("deepseek_v3")
    target = DeepseekV3(arch, dtype=jnp.float32, sharding=make_sharding())
    plain = roofline.target_work(target, batch=1, rows=1, context=0)
    longer = roofline.target_work(target, batch=1, rows=1, context=9)
    assert longer.size_bytes - plain.size_bytes == 4 * 3 * (20 + 8) * 9
    assert longer.flops - plain.flops == 2 * 3 * 4 * (2 * 20 + 8) * 9
    narrow = Qwen3(make_target().arch, dtype=jnp.float32, sharding=make_sharding())
    quantization.quantize(narrow, "int8")
    kernels = sum(one.kernel.get_value().size for _, one in quantization.projections(narrow))
    scales = sum(one.kernel_scale.get_value().size for _, one in quantization.projections(narrow))
    wide, found = (
        roofline.target_work(one, batch=1, rows=1, context=0) for one in (make_target(), narrow)
    )
    assert wide.size_bytes - found.size_bytes == 3 * kernels - 4 * scales
    assert wide.flops == found.flops


@pytest.mark.parametrize(("block_size", "tree"), [(8, False), (4, True)])
def test_a_draft_reads_the_drafter_and_the_head_and_computes_every_row(block_size, tree):
    """A pass over four rows drafts a tree of seven."""
    target = make_target()
    drafter = models.drafter("dflash", arch=target.arch, block_size=block_size, tree=tree)
    weights = parameters.count(drafter) + 48 * 32
    found = roofline.draft_work(target, drafter, batch=3)
    assert found == ForwardWork(2 * weights * 3 * block_size, 4 * weights)
    assert roofline.draft_work(target, models.drafter("none"), batch=3) == ForwardWork(0, 0)


def test_an_unknown_machine_is_measured():
    machine = roofline.machine_of(make_sharding())
    assert "measured" in machine.source
    assert machine.flops_per_s > 1e8
    assert machine.bytes_per_s > 1e7
    sizes, rates = zip(*machine.cached_rates, strict=True)
    assert list(sizes) == sorted(sizes)
    assert list(rates) == sorted(rates, reverse=True)
    assert rates[-1] == machine.bytes_per_s


def test_what_fits_into_a_cache_is_read_at_the_rate_of_the_cache():
    """The weights of a small model are; the peak of the memory would be a bound that they beat."""
    rates = ((1e6, 8e9), (8e6, 4e9), (64e6, 1e9))
    machine = Machine("toy", 1e12, 1e9, "made up", rates)
    for size, rate in ((5e5, 8e9), (1e6, 8e9), (2e6, 8e9), (8e6, 4e9), (1e9, 1e9)):
        assert machine.read_s(size) == pytest.approx(size / rate)
    assert ForwardWork(0, 2e6).ideal_ms(machine) == pytest.approx(0.25)
