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
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from dflash.measure import plots

# The first figure of a cell: "1,559, 1,048" and "24.3–25.2" have two.
_NUMBER = re.compile(r"\d+(?:,\d{3})*(?:\.\d+)?")
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


class GroupPlot(NamedTuple):
    """Plot of one table, in which each row is a group of bars.

    Rows without a figure in one of the columns are left out.

    Attributes:
      page: Page in docs/results.
      header: Beginning of the table's first line, which no other table of the page has.
      values: Columns with the lengths of the bars, and their names in the legend. A name that
        begins with a strategy and a comma gets a shade of the strategy's color.
      labels: Title of the plot, and label of its horizontal axis.
      name: Column with the names of the groups.
      only: Columns and the value that a row needs there to be drawn.
      even: Place of a thin line that marks neither gain nor loss, or None.
    """

    page: str
    header: str
    values: Mapping[int, str]
    labels: Mapping[str, str]
    name: int = 0
    only: Mapping[int, str] = {}
    even: float | None = None


PLOTS = {
    "tiny_benchmark.png": GroupPlot(
        page="tiny_family.md",
        header="| speed-up |",
        values={1: "dflash2", 2: "dflash2, chosen", 3: "dflash", 4: "eagle3"},
        labels={"title": "The embedded tiny family on two CPU cores", "xlabel": "speed-up"},
        even=1.0,
    ),
    "trees.png": GroupPlot(
        page="trees.md",
        header="| greedy |",
        values={2: "chain", 3: "tree of 8", 4: "tree of 16", 5: "tree of 32"},
        labels={"title": "SmolLM2-135M, greedy", "xlabel": "mean acceptance length (τ)"},
        name=1,
        only={0: "SmolLM2"},
    ),
    "forecast.png": GroupPlot(
        page="tpu_compile.md",
        header="| context | strategy | batch 1 |",
        values={2: "batch 1", 3: "batch 4", 4: "batch 16", 5: "batch 64"},
        labels={
            "title": "Qwen3-4B on one v5p chip after 512 tokens, by roofline",
            "xlabel": "expected speed-up (not measured)",
        },
        name=1,
        only={0: "512"},
        even=1.0,
    ),
    "overlap_ssd.png": GroupPlot(
        page="overlap.md",
        header="| models | batch | in turn",
        values={3: "ssd, 2 + 2 chips", 4: "ssd, 4 + 1 chips", 2: "in turn, drafter on one chip"},
        labels={
            "title": "One sequence on v5p, by roofline",
            "xlabel": "speed relative to drafting in turn (expected)",
        },
        only={1: "1"},
        even=1.0,
    ),
    "smollm2_speedup.png": GroupPlot(
        page="smollm2.md",
        header="| speed-up |",
        values={1: "blocks of 6", 3: "sizes chosen per cycle"},
        labels={"title": "SmolLM2-135M with DFlash2 on two CPU cores", "xlabel": "speed-up"},
        even=1.0,
    ),
    "smollm2_peers.png": BarPlot(
        page="decode_cpu.md",
        header="| SmolLM2 | identical |",
        value=3,
        title="SmolLM2-135M in float32 on two cores",
        label="tokens per second",
    ),
    "load.png": TablePlot(
        page="load.md",
        header="| model | sequences |",
        place=1,
        values={6: ""},
        groups=(0,),
        labels={
            "title": "A block size chosen per cycle, on a mix of tasks",
            "x": "sequences",
            "y": "speed relative to plain decoding",
        },
        even=1.0,
    ),
    "long_context.png": TablePlot(
        page="long_context.md",
        header="| context | 64 |",
        place=0,
        values={1: "sees 64", 2: "256", 4: "all", 5: "auto"},
        groups=(),
        labels={
            "title": "SmolLM2's drafter by what it sees of its context",
            "x": "context",
            "y": "mean acceptance length (τ)",
        },
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
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, 1.2 + 0.32 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    drawn = axes.barh([row[0] for row in rows], [_number(row[plot.value]) for row in rows])
    axes.bar_label(drawn, padding=3)
    axes.margins(x=0.1)
    axes.invert_yaxis()
    axes.set(title=plot.title, xlabel=plot.label)
    return plots.png(figure)


def groups(plot: GroupPlot, rows: Sequence[Sequence[str]]) -> bytes:
    """Returns a plot of groups of bars, one group for each row, as a PNG file."""
    from matplotlib.figure import Figure

    rows = [
        row
        for row in rows
        if all(row[column] == value for column, value in plot.only.items())
        and all(_NUMBER.search(row[column]) for column in plot.values)
    ]
    # As wide as the site shows it, so that its letters can be read there.
    height = 1.4 + 0.2 * len(rows) * (len(plot.values) + 1)
    figure = Figure(figsize=(7.0, height), layout="constrained")
    axes = figure.add_subplot()
    width = 0.8 / len(plot.values)
    for place, (column, name) in enumerate(plot.values.items()):
        lengths = [_number(row[column]) for row in rows]
        places = [group + place * width for group in range(len(rows))]
        color = _colors(plot.values.values())[name]
        drawn = axes.barh(places, lengths, 0.92 * width, label=name, color=color)
        axes.bar_label(drawn, fmt="%.2f", padding=2, fontsize=8)
    if plot.even is not None:
        axes.axvline(plot.even, color=plots.INK, linewidth=0.9, linestyle=":")
    middle = 0.4 - width / 2
    names = [textwrap.fill(row[plot.name].strip("`").rpartition("=")[2], 16) for row in rows]
    axes.set_yticks([group + middle for group in range(len(rows))], names)
    axes.margins(x=0.12)
    axes.invert_yaxis()
    axes.set(**plot.labels)
    figure.legend(loc="outside lower center", ncols=4, fontsize=9, frameon=False)
    return plots.png(figure)


def _colors(names: Iterable[str]) -> dict[str, str]:
    """Returns the color of each name; further names of one strategy are lighter."""
    slots = plots.line_slots(name.partition(",")[0] for name in names)
    seen: collections.Counter[str] = collections.Counter()
    colors = {}
    for name in names:
        strategy = name.partition(",")[0]
        own = plots.color_of(slots.get(strategy))
        colors[name] = plots.shade(own, min(0.3 * seen[strategy], 0.75))
        seen[strategy] += 1
    return colors


def _group_name(cell: str) -> str:
    return f"batch {cell}" if cell.isdecimal() else cell


def _number(cell: str) -> float:
    return float(_NUMBER.search(cell)[0].replace(",", ""))


def draw(name: str) -> bytes:
    """Returns a plot as a PNG file."""
    plot = PLOTS[name]
    page = (RESULTS / plot.page).read_text(encoding="utf-8")
    rows = read_table(page, plot.header)
    if isinstance(plot, BarPlot):
        return bars(plot, rows)
    if isinstance(plot, GroupPlot):
        return groups(plot, rows)
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
