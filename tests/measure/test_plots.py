"""Plots name every value, and give a strategy one color wherever it is drawn."""

import pytest
from support.made_samples import task_round

from dflash.measure import cells, plots
from dflash.measure.warnings import MARK

LENGTHS = {"dflash": ([4, 2, 4, 2], [3, 3, 3, 3]), "eagle3": ([2, 2, 2, 2], [2, 2, 2, 2]),
           "mine": ([3, 2, 2, 3], [2, 2, 2, 2])}  # fmt: skip
STRATEGIES = ("none", *LENGTHS)


def every_cell(strategies=STRATEGIES, tasks=("math", "code")):
    drafting = [name for name in strategies if name != "none"]
    cycles = {"none": ([[1] * 12] * 2, 3.0)} | {name: (LENGTHS[name], 6.0) for name in drafting}
    parts = {"none": (0.0, 2.5), **dict.fromkeys(drafting, (1.0, 4.0))}
    done = [task_round(task, 0, cycles, parts) for task in tasks]
    sizes = {name: 1 if name == "none" else 4 for name in strategies}
    return cells.cells(done, cells.Setting("none", sizes, sizes))


@pytest.mark.parametrize("strategies", [STRATEGIES, STRATEGIES[:2], STRATEGIES[:3]])
def test_every_bar_is_labeled(monkeypatch, strategies):
    """The label of a middle bar, at the place of the task's own, was left out."""
    monkeypatch.setattr(plots, "png", lambda figure: figure)
    some = every_cell(strategies)
    figure = plots.speedups(some, "none")
    figure.draw_without_rendering()
    (axes,) = figure.axes
    ticks = [*axes.get_xticklabels(), *axes.get_xticklabels(minor=True)]
    shown = [text.get_text() for text in (*axes.texts, *ticks) if text.get_visible()]
    wanted = [cell for cell in some if cell.strategy != "none"]
    labels = sorted(f"{cell.speedup:.2f}×{MARK}" for cell in wanted)
    assert sorted(text for text in shown if text.startswith(("1.", "2."))) == labels


def test_known_strategies_keep_their_colors_and_others_share_none():
    assert plots.strategy_slots(["none", "a", "dflash", "b"]) == {"dflash": 0, "a": 8, "b": 9}
    assert plots.strategy_slots(["b", "eagle3", "a"]) == {"eagle3": 1, "b": 8, "a": 9}
    assert plots.line_slots(["batch 1", "batch 8"]) == {"batch 1": 0, "batch 8": 1}
    assert plots.line_slots(["none", "dflash2"]) == {"dflash2": 4}
    numbers = plots.strategy_slots(map(str, range(20))).values()
    looks = {(plots.color_of(n), plots.marker_of(n)) for n in numbers}
    assert len(looks) == 20
