"""Plots tables of docs/results as curves or bars, next to their pages.

    python tools/plot_results.py [DIRECTORY]

The tables on the pages are the only source of the figures, so each plot shows the same figures as
its table. Run the tool after a table has changed. Plots are written to docs/results by default.
"""

import argparse
import collections
import pathlib
import re
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from matplotlib.figure import Figure

from dflash.measure import plots

RESULTS = pathlib.Path(__file__).parents[1] / "docs" / "results"


class TablePlot(NamedTuple):
    """Plot of one table, in which each column of figures is a curve.

    Attributes:
      page: Page in docs/results.
      header: Beginning of the table's first line, which no other table of the page has.
      place: Column with the places on the x-axis.
      values: Columns with the values, and their names in the legend.
      groups: Columns whose values divide the rows into curves of their own.
      labels: Title of the plot, and labels of its axes.
      even: Height of a thin line that marks neither gain nor loss, or None.
    """

    page: str
    header: str
    place: int
    values: Mapping[int, str]
    groups: Sequence[int]
    labels: Mapping[str, str]
    even: float | None = None


class BarPlot(NamedTuple):
    """Plot of one table, in which each row is a bar.

    Attributes:
      page: Page in docs/results.
      header: Beginning of the table's first line, which no other table of the page has.
      value: Column with the lengths of the bars; the first column has their names.
      title: Title of the plot.
      label: Label of the axis.
    """

    page: str
    header: str
    value: int
    title: str
    label: str


PLOTS = {
    "smollm2_peers.png": BarPlot(
        page="smollm2_peers.md",
        header="| tiny family |",
        value=3,
        title="The tiny family in float32 on one core",
        label="tokens per processor-second",
    ),
    "smollm2_learning.png": TablePlot(
        page="smollm2.md",
        header="| tokens seen |",
        place=0,
        values={1: "held-out answers"},
        groups=(),
        labels={
            "title": "A DFlash2 drafter of SmolLM2-135M-Instruct",
            "x": "thousand tokens of training",
            "y": "mean acceptance length (τ)",
        },
        even=1.0,
    ),
    "verification_cost.png": TablePlot(
        page="tpu_compile.md",
        header="| rows | ideal |",
        place=0,
        values={1: "ideal", 2: "roofline", 3: "cycles"},
        groups=(),
        labels={
            "title": "One forward of Qwen3-4B on v5p, by the TPU compiler",
            "x": "rows to verify",
            "y": "ms (estimated, not timed)",
        },
    ),
    "block_width_cost.png": TablePlot(
        page="block_width.md",
        header="| chip | batch | rows |",
        place=2,
        values={5: ""},
        groups=(0, 1),
        labels={
            "title": "Cycle of Qwen3-4B by the width of its block, by roofline",
            "x": "rows of the block",
            "y": "cost relative to 16 rows (estimated)",
        },
        even=1.0,
    ),
}


def read_table(page: str, header: str) -> list[list[str]]:
    """Returns the rows of a table, without its header; an empty cell repeats the cell above.

    Raises:
      ValueError: The page has no table with this header, or several.
    """
    found = [block for block in page.split("\n\n") if block.startswith(header)]
    if len(found) != 1:
        raise ValueError(f"expected one table with the header {header!r}, found {len(found)}")
    rows: list[list[str]] = []
    for line in found[0].splitlines()[2:]:
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        above = rows[-1] if rows else cells
        rows.append([cell or repeated for cell, repeated in zip(cells, above, strict=True)])
    return rows


def lines(plot: TablePlot, rows: Sequence[Sequence[str]]) -> list[plots.Line]:
    """Returns the curves of a plot."""
    points = collections.defaultdict(list)
    for row in rows:
        group = ", ".join(_group_name(row[column]) for column in plot.groups)
        for column, name in plot.values.items():
            label = ", ".join(part for part in (group, name) if part)
            points[label].append((_number(row[plot.place]), _number(row[column])))
    return [plots.Line(name, *zip(*some, strict=True)) for name, some in points.items()]


def bars(plot: BarPlot, rows: Sequence[Sequence[str]]) -> bytes:
    """Returns a plot of bars, one for each row, as a PNG file."""
    figure = Figure(figsize=(7.0, 1.2 + 0.32 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    drawn = axes.barh([row[0] for row in rows], [_number(row[plot.value]) for row in rows])
    axes.bar_label(drawn, padding=3)
    axes.margins(x=0.1)
    axes.invert_yaxis()
    axes.set(title=plot.title, xlabel=plot.label)
    return plots.png(figure)


def _group_name(cell: str) -> str:
    return f"batch {cell}" if cell.isdecimal() else cell


def _number(cell: str) -> float:
    return float(re.sub(r"[^\d.]", "", cell))


def draw(name: str) -> bytes:
    """Returns a plot as a PNG file."""
    plot = PLOTS[name]
    page = (RESULTS / plot.page).read_text(encoding="utf-8")
    rows = read_table(page, plot.header)
    if isinstance(plot, BarPlot):
        return bars(plot, rows)
    curves = lines(plot, rows)
    return plots.curves(curves, **plot.labels, log="x", even=plot.even)


def main(arguments: list[str] | None = None) -> int:
    """Draws all plots and returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", nargs="?", type=pathlib.Path, default=RESULTS)
    directory = parser.parse_args(arguments).directory
    for name in PLOTS:
        (directory / name).write_bytes(draw(name))
    return 0


if __name__ == "__main__":
    sys.exit(main())
