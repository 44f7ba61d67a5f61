"""Terminal output of a benchmark: a table with all figures or a selection, and notes below it."""

import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence

import jax

from dflash.measure import warnings
from dflash.measure.cells import Average, Cell
from dflash.measure.warnings import COST, MARK, SPEEDUP
from dflash.runs import terminal

WIDTH = 80

Column = tuple[str, Callable[[Cell | Average], str]]


def lines(cells: Sequence[Cell], averages: Sequence[Average], *, wide: bool = False) -> list[str]:
    """Returns cells and means as the lines of a table.

    Args:
      cells, averages: Rows of the table; means are left out if there is only one task.
      wide: Show all figures, not only those that fit into 80 columns.
    """
    averages = () if len({cell.task for cell in cells}) == 1 else averages
    columns = _WIDE if wide else _NARROW
    heads = ("task", "strategy", *(head for head, _ in columns))
    names = [(cell.task, cell.strategy) for cell in cells]
    names += [("mean", average.strategy) for average in averages]
    rows = [
        (*name, *(show(row) for _, show in columns))
        for name, row in zip(names, (*cells, *averages), strict=True)
    ]
    return aligned([heads, *rows])


def _plain(name: str, digits: int = 2) -> Column:
    """Returns a column of numbers that no warning concerns; empty for means that lack it."""
    words = {"tau": "τ", "ttft_ms": "TTFT ms", "tpot_ms": "TPOT ms", "tokens_per_second": "tok/s"}
    return words[
        name
    ], lambda row: _number(getattr(row, name), digits) if hasattr(row, name) else ""


def _part(name: str) -> Column:
    def show(cell: Cell | Average) -> str:
        if not hasattr(cell, "cost_ms"):
            return ""
        return _marked(_number(getattr(cell.cost_ms, name, None)), cell, COST)

    return ("cycle ms" if name == "cycle" else name), show


def _marked(text: str, row: Cell | Average, about: str) -> str:
    return text + MARK if text != _NONE and warnings.concern(row.warnings, about) else text


def _speedup(row: Cell | Average) -> str:
    return _marked(_number(row.speedup), row, SPEEDUP)


def _speedup_within(row: Cell | Average) -> str:
    ends = row.speedup_interval
    return _speedup(row) + (f" ({_interval(ends)})" if ends else "")


_NONE = "–"
_SAME = ("same", lambda row: _percent(row.identical_share))
_NARROW: tuple[Column, ...] = (_plain("tau"), ("speed-up (95 %)", _speedup_within), _SAME)
_WIDE: tuple[Column, ...] = (
    *(_plain("tau"), _plain("ttft_ms"), _plain("tpot_ms"), _plain("tokens_per_second", 1)),
    *(("speed-up", _speedup), ("95 %", lambda row: _interval(row.speedup_interval)), _SAME),
    ("right", lambda row: _percent(row.correct_share)),
    *map(_part, ("cycle", "draft", "verify", "rest")),
    ("of ideal", lambda row: _marked(_percent(row.share_of_ideal), row, COST)),
)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns table rows as lines with aligned columns: the first two left, the others right.

    On a terminal, columns that do not fit follow below.
    """
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    return terminal.table_lines(rows, keys=2, width=width)


def limits(cells: Sequence[Cell]) -> list[str]:
    """Returns the largest loss of each strategy that drafts, except for cells with warnings."""
    sentences = []
    for cell in cells:
        if cell.block_size == 1 or not cell.losses or cell.tau is None or cell.warnings:
            continue
        worst = max(cell.losses, key=cell.losses.get)
        rows, loss = cell.block_size, cell.losses[worst]
        words = {
            "verify": f"verifying {rows} rows costs {loss:.2f} plain tokens",
            "draft": f"draft and verification cost {loss:.2f} times the verification",
            "rest": f"a cycle costs {loss:.2f} times its two forwards",
        }
        sentences.append(
            f"{cell.task}, {cell.strategy}: τ {cell.tau:.2f} gives {cell.speedup or 0:.2f}×; "
            f"largest loss: {words[worst]}"
        )
    return sentences


_CONCERNED = {SPEEDUP: "speed-up", COST: "parts and ideal", warnings.EVERYTHING: "all figures"}


def warning_lines(cells: Sequence[Cell]) -> list[str]:
    """Returns a line for each warning, with the cells that it concerns."""
    concerned: dict[warnings.FigureWarning, list[Cell]] = {}
    for cell in cells:
        for warning in cell.warnings:
            concerned.setdefault(warning, []).append(cell)
    which = {warning: f"{_CONCERNED[warning.about]} of {_names(concerned_cells, cells)}"
             for warning, concerned_cells in concerned.items()}  # fmt: skip
    return [f"not trustworthy ({MARK}), {which[warning]}: {warning.words}" for warning in concerned]


def _names(chosen: Sequence[Cell], everything: Sequence[Cell]) -> str:
    """Returns the names of cells: by task, with the strategies if only some of them are meant."""
    if len(chosen) == len(everything):
        return "every cell"
    by_task: dict[str, list[str]] = {}
    for cell in chosen:
        by_task.setdefault(cell.task, []).append(cell.strategy)
    totals = {task: sum(cell.task == task for cell in everything) for task in by_task}
    return ", ".join(
        task if len(names) == totals[task] else f"{task} ({', '.join(names)})"
        for task, names in by_task.items()
    )


def _number(value: float | None, digits: int = 2) -> str:
    return _NONE if value is None else f"{value:.{digits}f}"


def _percent(value: float | None) -> str:
    return _NONE if value is None else f"{100 * value:.0f} %"


def _interval(ends: tuple[float, float] | None) -> str:
    return _NONE if ends is None else f"{ends[0]:.2f}–{ends[1]:.2f}"


def wrapped(sentences: Iterable[str]) -> list[str]:
    """Returns sentences as lines of a terminal, with hanging indents."""
    return [
        line
        for sentence in sentences
        for line in textwrap.wrap(sentence, WIDTH, subsequent_indent="  ", break_on_hyphens=False)
    ]


def show(lines: Sequence[str], notes: Sequence[str]) -> None:
    """Prints lines and then sentences, on the first process only."""
    if jax.process_index() == 0:
        print("\n".join([*lines, "", *wrapped(notes)]), flush=True)
