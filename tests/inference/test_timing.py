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


def test_a_short_sequence_takes_no_longer_than_a_long_one(monkeypatch):
    table, _ = measure([[2, 8, 20]] * 3, monkeypatch, longer=[[4, 6, 24]] * 3)
    assert table == [[1.0, 3.0, 10.0], [2.0, 3.0, 12.0]]


def test_a_size_takes_no_longer_than_a_larger_one(monkeypatch):
    table, _ = measure([[6, 4, 8]] * 3, monkeypatch)
    assert table == [[2.0, 2.0, 4.0]] * 2


def test_divisions_are_compared_among_themselves(monkeypatch):
    table, _ = measure([[6, 8, 4]] * 3, monkeypatch, groups=(2, 1))
    assert table == [[3.0, 4.0, 2.0]] * 2


def test_both_dispatches_count(monkeypatch):
    table, _ = measure([[2, 8, 20]] * 3, monkeypatch, cold=8)
    assert table == [[3.0, 6.0, 12.0]] * 2


def test_the_first_dispatch_counts_alone_if_no_sequence_is_left_for_a_second(monkeypatch):
    table, _ = measure([[6, 8, 10]] * 3, monkeypatch, cycles=(2, 0), cold=4)
    assert table == [[5.0, 6.0, 7.0]] * 2


def test_a_long_dispatch_counts_alone(monkeypatch):
    table, order = measure([[500, 520, 4000]] * 3, monkeypatch, cold=0.5)
    assert table == [[250.25, 260.25, 2000.25]] * 2
    assert len(order) == 3 * 2 * 3, "dispatches of the two lengths in three rounds"


def test_two_rounds_suffice_if_they_take_long(monkeypatch):
    rounds = [[1, 2, 8000], [2, 1, 7000], [0.5, 0.5, 0.5]]
    table, order = measure(rounds, monkeypatch)
    assert table == [[0.5, 0.5, 3500.0]] * 2
    assert order == [(length, size) for length in LENGTHS for size in SIZES] * 2


def measure(rounds, monkeypatch, groups=(3,), cycles=(2, 2), longer=None, cold=0):
    """The table of up to three rounds in ms, and the order of lengths and sizes.

    A warm dispatch of a size takes as many ms as `rounds` say, or `longer` for the longer
    sequences, and the first one `cold` more; the first one runs `cycles[0]` cycles, the second
    `cycles[1]`.
    """
    now, order, upcoming = [0.0], [], []
    both = [each for pair in zip(rounds, longer or rounds, strict=True) for each in pair]
    samples = iter([one for each in both for one in each])
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])

    def occupied(state, table, length):
        allowed = np.flatnonzero(np.isfinite(table))
        assert table.dtype == np.float32
        assert allowed.size == 1
        order.append((length, SIZES[allowed[0]]))
        now[0] += 1000.0  # not counted
        warm = next(samples)
        upcoming[:] = zip((warm + cold, warm), cycles, strict=True)
        return state

    def generate(state):
        taken, count = upcoming.pop(0)
        now[0] += taken / 1000
        return state, types.SimpleNamespace(cycles=count)

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
