"""Tests of the forecast of overlapped drafting: what must hold whatever the times are."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import models

from dflash.measure import overlap_forecast
from dflash.measure.overlap_forecast import IN_TURN, PING_PONG, SSD, Stages

MS = st.floats(0.01, 100.0)


@given(MS, MS, MS, st.floats(1, 50), st.integers(1, 8), st.integers(1, 8), st.floats(0, 1))
def test_overlap_cannot_pay_where_all_work_splits(verify, observe, draft, forks, n, m, hit_rate):
    """Of n + m chips, each does its share of the time; speculation is at least one draft."""
    apart = Stages(verify, observe, draft, forks * draft)
    half = Stages(*(value / 2 for value in (verify, observe, draft)))
    in_turn = (n * verify + m * (observe + draft)) / (n + m)
    ssd = overlap_forecast.ssd_cycle_ms(apart, hit_rate=hit_rate, batch=4)
    assert ssd >= in_turn * (1 - 1e-9)
    assert overlap_forecast.pingpong_cycle_ms(half) >= in_turn * (1 - 1e-9)


@given(MS, MS, st.floats(0, 1), st.integers(1, 64))
def test_speculation_hides_a_draft_behind_the_verification(verify, draft, hit_rate, batch):
    stages = Stages(verify, 0.0, draft, verify)
    hidden = overlap_forecast.ssd_cycle_ms(stages, hit_rate=1.0, batch=batch)
    assert hidden == verify
    between = overlap_forecast.ssd_cycle_ms(stages, hit_rate=hit_rate, batch=batch)
    assert hidden <= between <= overlap_forecast.cycle_ms(stages) * (1 + 1e-9)


@given(MS, MS)
def test_the_choice_is_never_slower_than_drafting_in_turn(ssd, pingpong):
    speeds = {IN_TURN: 1.0, SSD: ssd, PING_PONG: pingpong}
    assert speeds[overlap_forecast.choose(speeds)] == max(speeds.values()) >= 1.0
    assert overlap_forecast.choose(dict.fromkeys(speeds, 1.0)) == IN_TURN


@pytest.mark.parametrize(
    ("name", "observe", "passes"),
    [("autoregressive", True, (3, 5)), ("eagle3", True, (3, 8)), ("dflash", False, (1, 2))],
)
def test_passes_of_a_drafter(name, observe, passes):
    work = overlap_forecast.work_of(
        models.target(), models.drafter(name), batch=2, drafts=4, fan_out=3, context=16
    )
    assert (len(work.draft), len(work.speculate)) == passes
    assert (work.observe.flops > 0) == observe
    # The last passes run 5 · 3 continuations of each sequence.
    assert work.speculate[-1].flops == pytest.approx(15 * work.draft[-1].flops)
