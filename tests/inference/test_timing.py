"""Tests of measuring cycles, with a clock that the tests set."""

import functools
import types

import jax
import numpy as np
import pytest
from support.engines import engine
from support.models import drafter, zeros

from dflash.inference import timing
from dflash.inference.request import RequestSampling

SIZES, LENGTHS = (1, 4, 16), (8, 32)


def test_the_fastest_of_rounds_in_which_each_size_has_its_turn(monkeypatch):
    table, order = measure([[1, 20, 60], [2, 10, 40], [3, 15, 500]], monkeypatch)
    assert table == [[0.5, 5.0, 20.0]] * 2
    assert order == [(length, size) for length in LENGTHS for size in SIZES] * 3


def test_a_size_takes_no_longer_than_a_larger_one(monkeypatch):
    table, _ = measure([[6, 4, 8]] * 3, monkeypatch)
    assert table == [[2.0, 2.0, 4.0]] * 2


def test_divisions_are_compared_among_themselves(monkeypatch):
    table, _ = measure([[6, 8, 4]] * 3, monkeypatch, groups=(2, 1))
    assert table == [[3.0, 4.0, 2.0]] * 2


def measure(rounds, monkeypatch, groups=(3,)):
    """The table of three rounds in ms, and the order of lengths and sizes.

    A dispatch of two cycles takes as many ms as `rounds` say.
    """
    now, order, upcoming = [0.0], [], []
    samples = iter([one for each in rounds for one in 2 * each])
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])

    def occupied(state, table, length):
        allowed = np.flatnonzero(np.isfinite(table))
        assert table.dtype == np.float32
        assert allowed.size == 1
        order.append((length, SIZES[allowed[0]]))
        now[0] += 1000.0  # not counted
        upcoming[:] = [next(samples)] * 2
        return state

    def generate(state):
        now[0] += upcoming.pop() / 1000
        return state, types.SimpleNamespace(cycles=2)

    found = timing.cycle_seconds(groups, LENGTHS, 0, occupied, generate, rounds=3)
    assert found.dtype == np.float32
    return np.round(1000 * found.astype(float), 2).tolist(), order


@pytest.mark.parametrize("kv_dtype", [None, "int8"])
def test_no_two_sequences_that_are_measured_are_alike(kv_dtype):
    """Equal rows would choose the same experts."""
    page_size = 16 if kv_dtype is None else 128
    run = engine(drafter("dflash"), batch_size=3, kv_dtype=kv_dtype, page_size=page_size)
    options = {"layout": run.layout, "sampling": RequestSampling(), "vocab_size": 48}
    occupy = functools.partial(timing.occupy, **options)
    state = jax.jit(occupy)(zeros(run.abstract_state()), np.ones((1, 2, 1), np.float32), 24)
    assert state.length.tolist() == [24] * 3
    assert len(set(state.anchor.tolist())) == 3
    for rows in jax.tree.leaves((state.cache.layers, state.drafter)):
        table = np.asarray(rows, np.float32).reshape(-1, rows.shape[-1])
        assert np.isfinite(table).all()
        if rows.dtype != np.int8:  # of which rows of few numbers may meet
            assert len(np.unique(table, axis=0)) == len(table)
