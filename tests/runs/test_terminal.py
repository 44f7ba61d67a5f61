"""Tables keep all columns at any width, and words stay whole at the edge of a terminal."""

import io
import re

import hypothesis
import hypothesis.strategies as st
import pytest
from rich.cells import cell_len

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


def screen(pieces, width: int) -> list[str]:
    """Returns the lines of a terminal that was given some output."""
    lines: list[list[str]] = [[]]
    for piece in pieces:
        assert piece.erase <= sum(map(cell_len, lines[-1]))
        erased = 0
        while erased < piece.erase:
            erased += cell_len(lines[-1].pop())
        for character in piece.text:
            if character == "\n":
                lines.append([])
            else:
                lines[-1].append(character)
        assert all(sum(map(cell_len, line)) < width for line in lines)
    return ["".join(line) for line in lines]


def fed(pieces, width):
    wrap = terminal.WordWrap()
    return [out for text, style in pieces for out in wrap.feed(text, width, style)]


@hypothesis.given(
    st.lists(st.tuples(st.text("abc de\n字", max_size=9), st.sampled_from("xy")), max_size=30),
    st.integers(8, 20),
)
@hypothesis.example([(" aaaaa", "x"), ("a字", "y")], 8)
@hypothesis.example([("aaaaa字 ", "x"), ("a", "x")], 8)
@hypothesis.settings(max_examples=300, deadline=None)
def test_streamed_words_stay_whole(pieces, width):
    text = "".join(piece for piece, _ in pieces)
    lines = screen(fed(pieces, width), width)
    assert "".join("".join(lines).split()) == "".join(text.split())
    on_a_line = [word for line in lines for word in line.split()]
    for word in text.split():
        if word.isascii() and len(word) < width - 1:
            assert word in on_a_line


def test_a_moved_word_keeps_its_styles():
    out = fed([("one tw", "x"), ("elve", "y")], 10)
    assert screen(out, 10) == ["one ", "twelve"]
    moved = [(o.text, o.style) for o in out if len(o.text) == 1 and o.text != "\n"]
    assert moved[:2] == [("t", "x"), ("w", "x")]


def test_a_word_longer_than_a_line_is_cut_at_the_edge():
    assert screen(fed([("a" * 25, "")], 10), 10) == ["a" * 9, "a" * 9, "a" * 7]
