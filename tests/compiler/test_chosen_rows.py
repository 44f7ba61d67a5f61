"""Throughput of chosen rows: simulated cycles against figures computed by hand."""

import dataclasses

import numpy as np
import pytest

from dflash.compiler import chosen_rows
from dflash.compiler.chosen_rows import MIX, Choices
from dflash.compiler.forecast import (
    LIMITS,
    PLAIN,
    CompiledCost,
    DeviceMemory,
    Forecast,
    StrategyPoint,
)
from dflash.inference.cycle.choices import WHOLE, Division
from dflash.measure.acceptance import ExpectedAcceptance, tau
from dflash.measure.workload import Recording

SIZES = (1, 2, 4)
ALWAYS, NEVER, HALF = (0, 0, 0, 1), (1, 0, 0, 0), (0.5, 0, 0, 0.5)


def simulate(times, sizes, division, histograms, batch):
    cycles = chosen_rows.drawn(histograms, batch, sizes[-1])
    return chosen_rows.simulate(times, sizes, division, cycles)


def expected(histograms):
    return ExpectedAcceptance({}, histograms, "drawn", 4, published=False)


def recordings(*patterns, confidence=True):
    """A task of one prompt for each pattern of lengths, with certain confidence in its drafts."""
    found = {}
    for i, lengths in enumerate(patterns):
        stated = np.arange(1, 4) < np.array(lengths)[:, None]
        stated = stated.astype(np.float32) if confidence else None
        found[f"task {i}"] = [Recording("here", 8, tuple(lengths), stated)]
    return found


def only(place):
    """Times of which one alone is finite: 2 ms."""
    times = np.full(len(SIZES), np.inf)
    times[place] = 2.0
    return times


@pytest.mark.parametrize("place", range(3))
def test_a_fixed_size_commits_tau_tokens_in_each_cycle(place):
    """Each output loses the tokens past its end: at most a block of 512."""
    expected = 8 * tau(HALF, SIZES[place]) / 2.0
    found = simulate(only(place), SIZES, WHOLE, {"a": HALF}, 8)
    assert found == pytest.approx(expected, rel=0.02)


def test_the_better_size_is_chosen():
    # Blocks of 4 take twice as long as plain cycles, and commit four tokens or one.
    times = [1.0, 1.5, 2.0]
    good = simulate(times, SIZES, WHOLE, {"a": ALWAYS}, 4)
    assert good == pytest.approx(4 * 4 / 2.0, rel=0.02)
    bad = simulate(times, SIZES, WHOLE, {"a": NEVER}, 4)
    assert bad == pytest.approx(4 * 1 / 1.0, rel=0.03)  # Trials cost at most one percent.


def test_a_mix_gains_from_dividing_rows():
    """Half of the sequences accept all drafts, the others none."""
    histograms = {"easy": ALWAYS, "hard": NEVER}
    division = Division((2,), 1)
    times = [1.0, 1.7, 2.0, 1.25]  # The last one verifies two rows per slot on average.
    whole = simulate(times[:3], SIZES, WHOLE, histograms, 8)
    assert whole == pytest.approx(4 * (4 + 1) / 2.0, rel=0.03)
    divided = simulate(times, SIZES, division, histograms, 8)
    # At best each of four sequences has two of the drafts. A new one must be learned about first.
    best = 4 * (3 + 1) / 1.25
    assert 1.15 * whole < divided <= best


def test_no_share_exceeds_what_a_division_drafts():
    """One sequence of eight accepts all of 15 drafts: of the eight spare rows it can use seven."""
    sizes = (1, 2, 4, 8, 16)
    histograms = {"easy": (0,) * 15 + (1,)} | {f"hard {i}": NEVER for i in range(7)}
    times = [np.inf] * 5 + [1.0]
    found = simulate(times, sizes, Division((2,), 1), histograms, 8)
    assert 8 + 5 < found <= 8 + 7


def test_confidence_divides_the_rows_of_recorded_cycles():
    """In each cycle half of the sequences accept all drafts: those whose last cycle accepted none.

    Each of eight sequences has a row for its anchor, and eight drafts are divided.
    """
    times = [np.inf] * 3 + [1.0]
    cycles = chosen_rows.played(recordings([4, 1], [1, 4]), 8, 4)
    assert cycles.lengths[:3, :2].tolist() == [[4, 1], [1, 4], [4, 1]]
    known = chosen_rows.simulate(times, SIZES, Division((2,), 1), cycles)
    assert known == pytest.approx(8 + 8, rel=0.02)
    unknown = cycles._replace(confidence=None)
    guessed = chosen_rows.simulate(times, SIZES, Division((2,), 1), unknown)
    assert guessed == pytest.approx(8 + 4, rel=0.1)


def test_sequences_of_a_task_begin_at_different_places():
    cycles = chosen_rows.played(recordings([1, 2, 3, 9]), 2, 4)
    assert cycles.lengths[:5].tolist() == [[1, 3], [2, 4], [3, 1], [4, 2], [1, 3]]
    assert cycles.confidence.shape == (len(cycles.lengths), 2, 3)
    assert chosen_rows.played(recordings([1, 2], confidence=False), 2, 4).confidence is None


def test_a_drafter_without_confidence_divides_by_statistics(forecast):
    known = dataclasses.replace(expected({"task 0": HALF}), recordings=recordings([4, 1]))
    found = []
    for by_confidence in (False, True):
        division = Division((2,), 1, by_confidence)
        choices = {8: dataclasses.replace(CHOICES[8], division=division)}
        found.append(chosen_rows.throughputs(forecast, choices, known, [64])[0].division[1])
    assert found[1] > 1.2 * found[0]


def point(name, rows, ms, gigabytes=1.0):
    cost = CompiledCost(dict.fromkeys(LIMITS, 0.0) | {"weights": ms}, ms)
    nothing = CompiledCost(dict.fromkeys(LIMITS, 0.0), 0.0)
    memory = DeviceMemory(gigabytes * 1e9, 0.0)
    return StrategyPoint(name, 8, rows, cost, nothing, memory, {})


@pytest.fixture
def forecast():
    points = [
        point(PLAIN, 1, 1.0),
        point("auto 1", 1, 1.0),
        point("auto 2", 2, 1.7),
        point("auto 4", 4, 2.0),
        point("auto ~2", 2, 1.25),
    ]
    return Forecast({(one.strategy, 8): one for one in points}, {}, 2e9)


CHOICES = {8: Choices(SIZES, Division((2,), 1), ("auto 1", "auto 2", "auto 4", "auto ~2"))}


def test_each_task_and_their_mix_are_compared_with_the_best_fixed_choice(forecast):
    histograms = {"easy": ALWAYS, "hard": NEVER}
    found = {
        one.task: one
        for one in chosen_rows.throughputs(forecast, CHOICES, expected(histograms), [64])
    }
    assert set(found) == {"easy", "hard", MIX}
    assert {one.plain for one in found.values()} == {8000.0}
    assert found["easy"].fixed[0] == "auto 4"
    assert found["hard"].fixed == (PLAIN, 8000.0)
    assert found[MIX].divided > 1.15 * found[MIX].whole
    name, always = found[MIX].division
    assert name == "auto ~2"
    assert found[MIX].divided <= always <= 4 * (3 + 1) / 1.25e-3
    text = "\n".join(chosen_rows.lines(list(found.values()), "auto"))
    assert "expected" in text
    assert MIX in text
    png = chosen_rows.plot(list(found.values()), 64, "note")
    assert png.startswith(b"\x89PNG")


def test_choices_that_do_not_fit_have_no_throughput(forecast):
    points = dict(forecast.points)
    points["auto 4", 8] = point("auto 4", 4, 2.0, gigabytes=3.0)
    small = dataclasses.replace(forecast, points=points)
    (one, _) = chosen_rows.throughputs(small, CHOICES, expected({"easy": ALWAYS}), [64])
    assert one.fixed[0] == "auto 2"
    assert one.divided is None
    assert "–" in "\n".join(chosen_rows.lines([one], "auto"))


def test_without_acceptance_nothing_is_said():
    assert chosen_rows.lines([], "auto") == []
