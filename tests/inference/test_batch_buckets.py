"""Tests of dispatches that cover fewer slots than there are."""

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.engines import (
    completions,
    drain,
    engine,
    expected,
    make_requests,
    outcomes,
    random_prompts,
    watch_dispatches,
)
from support.models import drafter

from dflash.inference import batch_buckets
from dflash.inference.scheduler import Scheduler

PROMPTS = random_prompts([9, 16, 5, 12, 3, 14])
LIMITS = [12, 3, 8, 5, 7, 4]


def check(run, **how) -> list[int]:
    """One request alone, four more, then another one; returns the buckets of the dispatches."""
    watched, buckets = watch_dispatches(run, lambda report, bucket=None, **_: bucket)
    one, requests, events = Scheduler(watched), make_requests(PROMPTS, LIMITS, **how), []
    for group in (requests[:1], requests[1:5], requests[5:]):
        events += drain(one, group)
    assert outcomes(completions(events)) == expected(PROMPTS, LIMITS, **how)
    return buckets


# State in pages, in arrays, and in both with rows that depend on the next token.
@pytest.mark.parametrize("name", ["autoregressive", "dflash", "eagle3"])
def test_every_kind_of_state_is_cut_and_put_back(name):
    model = drafter(name, block_size=3)
    run = engine(model, batch_size=4, sync_every=2, partial_dispatches=True)
    used = check(run, temperature=0.8, seed=2)
    assert used[0] == used[-1] == 1, "one sequence alone needs one slot"
    assert max(used) == 4


@given(slots=st.integers(1, 300))
def test_few_buckets_reach_from_one_slot_to_all(slots):
    found = batch_buckets.bucket_sizes(slots)
    assert found[0] == 1
    assert found[-1] == slots
    assert list(found) == sorted(set(found))
    assert len(found) <= 2 + np.log2(slots) / 2


def test_what_is_put_back_lies_where_it_was():
    whole = jax.numpy.arange(24).reshape(2, 12)
    like = jax.ShapeDtypeStruct((2, 4), whole.dtype)
    part = batch_buckets.take(whole, like, 2)
    assert part.tolist() == [[0, 1, 6, 7], [12, 13, 18, 19]]
    put = batch_buckets.put(whole, -part, 2)
    assert batch_buckets.take(put, like, 2).tolist() == (-part).tolist()
    assert batch_buckets.take(whole, like, 2, 1).tolist() == [[2, 3, 8, 9], [14, 15, 20, 21]]
    rest = np.array(whole) % 6 >= 2
    assert np.array(put)[rest].tolist() == np.array(whole)[rest].tolist()
    with pytest.raises(ValueError, match="more than the number of slots"):
        batch_buckets.take(whole, jax.ShapeDtypeStruct((1, 4), whole.dtype), 1)
