"""Tables keep all columns at any width."""

import pytest

from dflash.runs import terminal

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
