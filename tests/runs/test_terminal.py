"""Tables keep all columns at any width."""

import io
import re

import pytest

from dflash.config.sweep_points import Sweep
from dflash.runs import sweeps, terminal
from dflash.runs.display import Display

ROWS = [
    ["drafter.block_size", "decode.batch_size", *(f"figure_{n}" for n in range(12))],
    ["8", "16", *(f"{n}.125" for n in range(12))],
    ["16", "1", *(f"{n}{n}.5" for n in range(12))],
]


@pytest.mark.parametrize("width", [80, 60, 45, 20, None])
def test_a_table_keeps_every_column_and_figure(width):
    lines = terminal.table_lines(ROWS, keys=2, width=width)
    words = " ".join(lines).split()
    assert {cell for row in ROWS for cell in row} <= set(words)
    if width and width > 50:
        assert max(map(len, lines)) <= width
        assert max(map(len, lines)) > width - 12
    if width is None:
        assert len(lines) == 3
    # Every block names its rows.
    assert words.count("drafter.block_size") == words.count("figure_0") * (lines.count("") + 1)


def test_columns_of_a_sweep_are_kept_on_a_terminal():
    """A narrow terminal cut the last columns off, and figures in two."""
    figures = [
        f"cells.{task}.{name}" for task in ("math", "code", "chat") for name in ("tau", "speedup")
    ]
    rows = {str(n): {"decode.batch_size": n, **dict.fromkeys(figures, 12345.678)} for n in (1, 16)}
    sweep = Sweep("decode", (("decode.batch_size",),), {})
    err = io.StringIO()
    err.isatty = lambda: True
    display = Display(stdout=io.StringIO(), stderr=err)
    display._console.width = 80
    display.table(sweeps.table(sweep, figures, rows), 1)
    shown = re.sub(r"\x1b\[[0-9;]*m", "", err.getvalue())
    assert set(figures) <= set(shown.split())
    assert shown.split().count("1.235e+04") == 12
    assert max(map(len, shown.splitlines())) <= 80
