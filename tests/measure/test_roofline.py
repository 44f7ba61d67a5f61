"""The least time of a forward, computed independently for a target of round numbers."""

import types

import pytest
from support import models
from support.models import make_sharding, make_target

from dflash.measure import roofline
from dflash.measure.roofline import Machine, Work
from dflash.parallel import parameters

MACHINE = Machine("toy", flops_per_s=1e9, bytes_per_s=1e6, source="made up")


def test_the_slower_of_computing_and_reading_counts():
    assert Work(2e6, 1e3).ideal_ms(MACHINE) == pytest.approx(2.0)
    assert Work(2e6, 5e3).ideal_ms(MACHINE) == pytest.approx(5.0)
    assert MACHINE.ridge_rows == 1000


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


def test_a_draft_reads_the_drafter_and_the_head_and_computes_every_row():
    target = make_target()
    drafter = models.drafter("dflash", arch=target.arch, block_size=8)
    weights = parameters.count(drafter) + 48 * 32
    found = roofline.draft_work(target, drafter, batch=3)
    assert found == Work(2 * weights * 3 * 8, 4 * weights)
    assert roofline.draft_work(target, models.drafter("none"), batch=3) == Work(0, 0)


@pytest.mark.parametrize(("kind", "chips"), [("TPU7x", 2), ("TPU v5p", 4)])
def test_a_known_chip_has_its_vendors_peaks(kind, chips):
    """Four devices: of TPU7x two are one chip."""
    devices = [types.SimpleNamespace(device_kind=kind)] * 4
    found = roofline.machine_of(types.SimpleNamespace(devices=devices))
    peak = {"TPU7x": 2307e12, "TPU v5p": 459e12}[kind]
    assert found.flops_per_s == chips * peak
    assert "vendor" in found.source


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
    assert Work(0, 2e6).ideal_ms(machine) == pytest.approx(0.25)
