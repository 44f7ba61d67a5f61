"""Tests of the forecast of gaps: what must hold whatever the machine is."""

import jax
import pytest
from support import models, scripts

from dflash.measure import roles_forecast, roofline
from dflash.measure.load_client import Answer

# Arithmetic is the limit, so times are proportional to it.
SLOW = roofline.Machine("slow", 1.0, 1e30, "a test")
time_roles = scripts.load("tools/time_roles.py")


@pytest.mark.parametrize(("chunk", "count"), [(8, 5), (16, 3), (64, 1)])
def test_chunks_compute_every_row_once(chunk, count):
    target = models.target()
    times = roles_forecast.chunks_ms(target, SLOW, prompt=40, chunk=chunk)
    (whole,) = roles_forecast.chunks_ms(target, SLOW, prompt=40, chunk=40)
    heads = (count - 1) * roofline.head_work(target, 1).ideal_ms(SLOW)
    assert len(times) == count
    assert sum(times) == pytest.approx(whole + heads)


def test_rows_have_the_size_of_the_cache_and_of_the_drafter():
    target, drafter = models.target(), models.drafter("dflash")
    cache = target.new_cache(batch=1, pages_per_sequence=3, num_pages=3, page_size=16)
    arrays = jax.tree.leaves((cache.pools, drafter.init_state(1, 64)))
    size = roles_forecast.rows_bytes(target, drafter, prompt=48, max_length=64)
    assert size == sum(array.size * array.dtype.itemsize for array in arrays)


def test_figures_of_a_round():
    streams = [Answer(0.0, (1.0, 1.1, 1.4), 3), Answer(0.0, (1.0, 1.2, 2.0), 5)]
    prompts = [Answer(0.5, (1.0,), 1), Answer(1.0, (1.7,), 1), Answer(1.0, (2.0,), 1)]
    figures = time_roles.Round(streams, prompts).figures()
    assert figures == pytest.approx((250.0, 800.0, 800.0, 700.0, 4.0))
