"""The plots of a report, as PNG. Nothing here touches matplotlib's global state."""

import io
import math
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dflash.measure.cells import Cell

# Paul Tol's "bright" scheme, which colour-blind readers can tell apart.
COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb")
PARTS = {"draft": "#ee6677", "verify": "#4477aa", "rest": "#bbbbbb"}
_DPI = 120
_WITHIN = 8  # curves whose legend still fits into the axes


def speedups(cells: Sequence[Cell], baseline: str, note: str = "") -> bytes:
    """Bars of the speed-up by task, with its interval, and the ideal as a tick above each."""
    tasks = list(dict.fromkeys(cell.task for cell in cells))
    strategies = [one for one in dict.fromkeys(cell.strategy for cell in cells) if one != baseline]
    figure, axes = _figure(max(6.0, 1.6 + 0.55 * len(tasks) * max(len(strategies), 1)))
    width = 0.8 / max(len(strategies), 1)
    for number, strategy in enumerate(strategies):
        own = {cell.task: cell for cell in cells if cell.strategy == strategy and cell.speedup}
        places = [tasks.index(task) + (number - (len(strategies) - 1) / 2) * width for task in own]
        heights = [cell.speedup for cell in own.values()]
        reach = _reach(list(own.values()))
        colour = COLOURS[number % len(COLOURS)]
        axes.bar(places, heights, 0.92 * width, yerr=reach, label=strategy, color=colour,
                 ecolor="#333333", capsize=3)  # fmt: skip
        ideals = [cell.ideal_speedup or math.nan for cell in own.values()]
        label = "ideal: τ·T₁ / (draft + verify)" if number == len(strategies) - 1 else None
        axes.scatter(places, ideals, marker="_", s=160, color="black", label=label, zorder=3)
        tops = [np.nanmax([height, height + up, ideal])
                for height, up, ideal in zip(heights, reach[1], ideals, strict=True)]  # fmt: skip
        for place, height, top in zip(places, heights, tops, strict=True):
            axes.annotate(f"{height:.2f}×", (place, top), (0, 5), textcoords="offset points",
                          ha="center", fontsize=8)  # fmt: skip
    axes.axhline(1.0, color="#333333", linewidth=0.8)
    axes.set_xticks(range(len(tasks)), tasks, rotation=0 if len(tasks) < 6 else 30)
    axes.set_ylabel(f"speed-up over {baseline}")
    axes.margins(y=0.15)
    _finish(axes, "Speed-up by task", note)
    return png(figure)


def _reach(cells: Sequence[Cell]) -> list[list[float]]:
    """How far each interval goes below and above its speed-up; NaN, not drawn, without one."""
    ends = [cell.speedup_interval or (math.nan, math.nan) for cell in cells]
    below = [cell.speedup - low for cell, (low, _) in zip(cells, ends, strict=True)]
    above = [high - cell.speedup for cell, (_, high) in zip(cells, ends, strict=True)]
    return [np.maximum(below, 0).tolist(), np.maximum(above, 0).tolist()]


def survival(cells: Sequence[Cell], note: str = "") -> bytes:
    """The share of cycles that accepted each draft position and all before it."""
    drafting = [cell for cell in cells if cell.joint_acceptance and cell.cycles]
    figure, axes = _figure(7.0 if len(drafting) <= _WITHIN else 9.6)
    strategies = list(dict.fromkeys(cell.strategy for cell in drafting))
    tasks = list(dict.fromkeys(cell.task for cell in drafting))
    lines = ("-", "--", ":", "-.")
    for cell in drafting:
        positions = range(len(cell.joint_acceptance) + 1)
        axes.plot(
            positions,
            (1.0, *cell.joint_acceptance),
            lines[tasks.index(cell.task) // len(COLOURS) % len(lines)]
            if len(strategies) == 1
            else lines[strategies.index(cell.strategy) % len(lines)],
            color=COLOURS[tasks.index(cell.task) % len(COLOURS)],
            marker="os^D"[strategies.index(cell.strategy) // len(lines) % 4],
            markersize=3,
            label=f"{cell.task}, {cell.strategy} (τ {cell.tau:.2f})",
        )
    axes.set_ylim(0, 1.03)
    axes.set_xlabel("draft position (0: the anchor)")
    axes.set_ylabel("share of cycles that accept up to here")
    _finish(axes, "Acceptance by draft position", note)
    return png(figure)


def costs(cells: Sequence[Cell], note: str = "") -> bytes:
    """The parts of a cycle, beside the plain token of its task."""
    shown = [cell for cell in cells if cell.cost_ms and cell.cost_ms.verify]
    figure, axes = _figure(8.0, 1.4 + 0.36 * len(shown))
    labels = [f"{cell.task}, {cell.strategy}" for cell in shown]
    begin = [0.0] * len(shown)
    for part, colour in PARTS.items():
        widths = [max(getattr(cell.cost_ms, part), 0.0) for cell in shown]
        axes.barh(labels, widths, 0.7, left=begin, color=colour, label=part)
        begin = [left + width for left, width in zip(begin, widths, strict=True)]
    for place, cell in enumerate(shown):
        label = "plain token (T₁)" if place == 0 else None
        axes.plot([cell.baseline_cycle_ms] * 2, [place - 0.42, place + 0.42], color="black",
                  linewidth=1.6, label=label)  # fmt: skip
        axes.annotate(f"{cell.cost_ms.cycle:.2f} ms", (begin[place], place), (5, 0),
                      textcoords="offset points", va="center", fontsize=8)  # fmt: skip
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds of a cycle")
    axes.margins(x=0.12)
    _finish(axes, "Cost of a cycle", note, below=True)
    return png(figure)


def curves(
    lines: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    *,
    title: str,
    x: str,
    y: str,
    log: bool = False,
    dashed: Sequence[str] = (),
    note: str = "",
) -> bytes:
    """One line per name over the same axes.

    Args:
      lines: places and values by name.
      title, x, y: of the plot and its axes.
      log: both axes in powers of two.
      dashed: names of lines that are computed, not measured.
      note: small print below the title.
    """
    figure, axes = _figure(7.0)
    solid = 0
    for name, (places, values) in lines.items():
        if name in dashed:
            axes.plot(places, values, "--", color="#777777", label=name)
            continue
        colour = COLOURS[solid % len(COLOURS)]
        solid += 1
        axes.plot(places, values, "o-", color=colour, markersize=4, label=name)
    if log:
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    else:
        axes.set_ylim(bottom=0)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    _finish(axes, title, note)
    return png(figure)


def png(figure: Figure) -> bytes:
    """A figure as a PNG file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=_DPI)
    return buffer.getvalue()


def _figure(width: float, height: float = 4.2) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def _finish(axes: Axes, title: str, note: str, *, below: bool = False) -> None:
    """Title, note, grid and legend, which stands under the axes if `below`, or beside if long."""
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold", pad=18 if note else 8)
    if note:
        axes.annotate(note, (0, 1), (0, 5), xycoords="axes fraction", textcoords="offset points",
                      fontsize=8, color="#aa3333")  # fmt: skip
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.set_axisbelow(True)
    names = axes.get_legend_handles_labels()[1]
    if names:
        beside = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0)}
        under = {"loc": "upper left", "bbox_to_anchor": (0, -0.16), "ncol": 4}
        place = under if below else beside if len(names) > _WITHIN else {}
        axes.legend(fontsize=8, frameon=False, **place)
