"""Plots of a report, as PNG, drawn without matplotlib's global state.

matplotlib takes seconds to import, so functions import it where they draw.
"""

import dataclasses
import io
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np

from dflash.measure.cells import Cell
from dflash.measure.warnings import COST, MARK, SPEEDUP, concern

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

PARTS = {"draft": 0.0, "verify": 0.4, "rest": 0.75}  # How much each part of a cycle is lightened.
_DPI = 120
_WITHIN = 8  # Most curves whose legend fits into the axes.
_HATCH = "////"  # Hatching of a bar with a warning.


# Strategies with a color of their own, in the order of the palette; others take later colors.
_KNOWN = "dflash eagle3 ngram autoregressive dflash2 medusa dflare dspark".split()
_PLAIN = "none"

INK, PAPER, GRAY, RED = "#1c2430", "#ffffff", "#bbbbbb", "#a03028"
# Paul Tol's "bright" scheme, which color-blind readers can tell apart, and four of his "muted" one.
_COLORS = (
    *("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377"),
    *("#44aa99", "#332288", "#999933", "#cc6677"),
)


def strategy_slots(names: Iterable[str]) -> dict[str, int]:
    """Returns the number of each strategy's color; beyond the palette, numbers go on.

    A known strategy always has the same number. Others are numbered after the known ones, in their
    order.
    """
    later = itertools.count(len(_KNOWN))
    return {
        name: _KNOWN.index(name) if name in _KNOWN else next(later)
        for name in dict.fromkeys(names)
        if name != _PLAIN
    }


def line_slots(names: Iterable[str]) -> dict[str, int]:
    """Returns the number of each line's color; lines that are no strategies begin at the first."""
    names = list(dict.fromkeys(names))
    if any(name in (*_KNOWN, _PLAIN) for name in names):
        return strategy_slots(names)
    return {name: number for number, name in enumerate(names)}


def color_of(slot: int | None) -> str:
    """Returns the color of a number; None is plain decoding."""
    return INK if slot is None else _COLORS[slot % len(_COLORS)]


def marker_of(slot: int | None) -> str:
    """Returns the marker of a number, which tells strategies of the same color apart."""
    return "os^D"[(slot or 0) // len(_COLORS) % 4]


def shade(color: str, amount: float) -> tuple[float, ...]:
    """Returns a color mixed with white; `amount` 0 is the color itself, and 1 is white."""
    from matplotlib.colors import to_rgb

    return tuple(part + (1 - part) * amount for part in to_rgb(color))


@dataclasses.dataclass(frozen=True)
class Line:
    """Curve of a plot.

    Attributes:
      flagged: Whether each point has a warning, and is drawn hollow; None if no point has one.
      roofline_of: Name of the line whose roofline this is; it is drawn dashed, in the same color.
        None for measured values.
    """

    name: str
    places: Sequence[float]
    values: Sequence[float]
    flagged: Sequence[bool] | None = None
    roofline_of: str | None = None


def speedups(cells: Sequence[Cell], baseline: str, note: str = "") -> bytes:
    """Plots the speed-up by task as bars, with intervals, and the ideal as a tick on each.

    The value is written below each bar. Bars with a warning are hatched, and ideals with a warning
    are left out.
    """
    tasks = list(dict.fromkeys(cell.task for cell in cells))
    strategies = [
        name for name in dict.fromkeys(cell.strategy for cell in cells) if name != baseline
    ]
    figure, axes = _figure(max(6.0, 1.6 + 0.7 * len(tasks) * max(len(strategies), 1)))
    width = 0.8 / max(len(strategies), 1)
    ideal_label = "ideal: τ·T₁ / (draft + verify)"
    for number, strategy in enumerate(strategies):
        drawn = [cell for cell in cells if cell.strategy == strategy and cell.speedup]
        offset = (number - (len(strategies) - 1) / 2) * width
        places = [tasks.index(cell.task) + offset for cell in drawn]
        color = color_of(strategy_slots(strategies)[strategy])
        bars = axes.bar(places, [cell.speedup for cell in drawn], 0.92 * width, yerr=_reach(drawn),
                        label=strategy, color=color, ecolor=INK, capsize=3)  # fmt: skip
        for bar, cell, place in zip(bars, drawn, places, strict=True):
            flagged = concern(cell.warnings, SPEEDUP)
            height = f"{cell.speedup:.2f}×{MARK if flagged else ''}"
            # An annotation, because of ticks at the same place only one is drawn.
            axes.annotate(height, (place, 0), (0, -4), xycoords=("data", "axes fraction"),
                          textcoords="offset points", ha="center", va="top", fontsize=8,
                          color=INK)  # fmt: skip
            if flagged:
                bar.set(hatch=_HATCH, edgecolor=PAPER)
            if cell.ideal_speedup and not concern(cell.warnings, COST):
                axes.scatter([place], [cell.ideal_speedup], marker="_", s=160, color=INK,
                             label=ideal_label, zorder=3)  # fmt: skip
                ideal_label = None
    _even(axes, 1.0, f"1×: {baseline}")
    narrow = len(tasks) > 5 and len(strategies) == 1
    axes.set_xticks(range(len(tasks)), tasks, rotation=30 if narrow else 0)
    axes.tick_params(axis="x", length=0, pad=18)
    axes.set_xlim(-0.6, len(tasks) - 0.4)
    axes.set_ylim(bottom=0)
    axes.set_ylabel(f"speed-up over {baseline}")
    hatched = any(concern(cell.warnings, SPEEDUP) for cell in cells)
    _finish(axes, "Speed-up by task", [note, _hatch_note(hatched)], below=True)
    return png(figure)


def _hatch_note(hatched: bool) -> str:
    return f"hatched and {MARK}: not trustworthy, see the notes" if hatched else ""


def _reach(cells: Sequence[Cell]) -> list[list[float]]:
    """Returns lower and upper lengths of the error bars; NaN, which is not drawn, without one."""
    ends = [cell.speedup_interval or (math.nan, math.nan) for cell in cells]
    below = [cell.speedup - low for cell, (low, _) in zip(cells, ends, strict=True)]
    above = [high - cell.speedup for cell, (_, high) in zip(cells, ends, strict=True)]
    return [np.maximum(below, 0).tolist(), np.maximum(above, 0).tolist()]


def survival(cells: Sequence[Cell], note: str = "") -> bytes:
    """Plots the fraction of cycles that accepted each draft position and all before it.

    The color is the strategy's; tasks differ in line style and marker.
    """
    from matplotlib import ticker

    drafting = [cell for cell in cells if cell.joint_acceptance and cell.cycles]
    figure, axes = _figure(7.0 if len(drafting) <= _WITHIN else 9.6)
    slots = strategy_slots(cell.strategy for cell in cells)
    tasks = list(dict.fromkeys(cell.task for cell in drafting))
    styles = ("-", "--", ":", "-.")
    for cell in drafting:
        task = tasks.index(cell.task)
        axes.plot(
            range(len(cell.joint_acceptance) + 1),
            (1.0, *cell.joint_acceptance),
            styles[task % len(styles)],
            color=color_of(slots.get(cell.strategy)),
            marker="os^Dv*"[task % 6],
            markersize=3,
            label=f"{cell.task}, {cell.strategy} (τ {cell.tau:.2f})",
        )
    axes.set_ylim(0, 1.03)
    axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
    axes.set_xlabel("draft position (0: the anchor)")
    axes.set_ylabel("share of cycles that accept up to here")
    _finish(axes, "Acceptance by draft position", [note])
    return png(figure)


def costs(cells: Sequence[Cell]) -> bytes:
    """Plots the parts of a cycle as stacked bars, with the plain token of the task as a tick.

    Each bar is as long as its cycle and has the color of its strategy, in three shades. Parts with
    a warning are not drawn.
    """
    from matplotlib.patches import Patch

    shown = [cell for cell in cells if cell.cost_ms and cell.cost_ms.verify]
    figure, axes = _figure(8.0, 1.7 + 0.36 * len(shown))
    names = [f"{cell.task}, {cell.strategy}" for cell in shown]
    trusted = [0.0 if concern(cell.warnings, COST) else 1.0 for cell in shown]
    begin = np.zeros(len(shown))
    slots = strategy_slots(cell.strategy for cell in cells)
    base_colors = [color_of(slots.get(cell.strategy)) for cell in shown]
    for part, amount in PARTS.items():
        widths = np.array([getattr(cell.cost_ms, part) for cell in shown]) * trusted
        colors = [shade(color, amount) for color in base_colors]
        axes.barh(names, widths, 0.7, left=begin, color=colors)
        begin += widths
    flagged = [(cell.cost_ms.cycle, name) for cell, name in zip(shown, names, strict=True)
                if concern(cell.warnings, COST)]  # fmt: skip
    if flagged:
        lengths, which = zip(*flagged, strict=True)
        axes.barh(which, lengths, 0.7, color=PAPER, edgecolor=GRAY, hatch=_HATCH,
                  label="cycle, parts not trustworthy")  # fmt: skip
    for place, cell in enumerate(shown):
        label = "plain token (T₁)" if place == 0 else None
        axes.plot([cell.baseline_cycle_ms] * 2, [place - 0.42, place + 0.42], color=INK,
                  linewidth=1.6, label=label)  # fmt: skip
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.set_xlabel("milliseconds of a cycle")
    parts = [Patch(color=shade(INK, amount), label=part)
             for part, amount in PARTS.items()]  # fmt: skip
    _finish(axes, "Cost of a cycle", [_hatch_note(bool(flagged))], below=True, more=parts)
    return png(figure)


def curves(
    lines: Sequence[Line],
    *,
    title: str,
    x: str,
    y: str,
    log: bool | Literal["x"] = False,
    even: float | None = None,
    note: str = "",
) -> bytes:
    """Plots several lines over the same axes.

    Args:
      log: Whether both axes are logarithmic; "x" for the x-axis alone.
      even: Height of a thin horizontal line; None draws no line.
    """
    figure, axes = _figure(7.0 if len(lines) <= _WITHIN else 9.6)
    slots = line_slots(line.name for line in lines if line.roofline_of is None)
    for line in lines:
        slot = slots.get(line.roofline_of or line.name)
        color, marker = color_of(slot), marker_of(slot)
        if line.roofline_of is not None:
            axes.plot(line.places, line.values, "--", color=color, label=line.name)
            continue
        axes.plot(line.places, line.values, f"{marker}-", color=color, markersize=4,
                  label=line.name)  # fmt: skip
        flagged = [place for place, flagged in enumerate(line.flagged or ()) if flagged]
        axes.plot([line.places[i] for i in flagged], [line.values[i] for i in flagged], "o",
                  color=color, markerfacecolor=PAPER, markersize=6)  # fmt: skip
    if even is not None:
        _even(axes, even, f"{even:g}×")
    if log:
        axes.set_xscale("log", base=2)
    if log is True:
        axes.set_yscale("log")
        _plain_ticks(axes.yaxis)
    else:
        axes.set_ylim(bottom=0)
    places = sorted({place for line in lines for place in line.places})
    axes.set_xticks(places, [f"{place:g}" for place in places])
    axes.xaxis.minorticks_off()
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    hollow = any(any(line.flagged or ()) for line in lines)
    words = "hollow: not trustworthy, see the notes" if hollow else ""
    _finish(axes, title, [note, words])
    return png(figure)


def png(figure: "Figure") -> bytes:
    """Returns a figure as a PNG file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=_DPI)
    return buffer.getvalue()


def _figure(width: float, height: float = 4.2) -> "tuple[Figure, Axes]":
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained", facecolor=PAPER)
    axes = figure.add_subplot(facecolor=PAPER)
    axes.tick_params(colors=INK, which="both")
    return figure, axes


def _even(axes: "Axes", height: float, label: str) -> None:
    axes.axhline(height, color=INK, linewidth=0.9, linestyle=(0, (1, 2)), label=label)


def _plain_ticks(axis) -> None:
    from matplotlib import ticker

    axis.set_major_locator(ticker.LogLocator(base=10, subs=(1, 2, 5)))
    axis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.minorticks_off()


def _finish(
    axes: "Axes", title: str, notes: Sequence[str], *, below: bool = False,
    more: "Sequence[Patch]" = (),
) -> None:  # fmt: skip
    """Adds title, notes, grid and legend.

    Args:
      notes: Notes to join below the title; empty ones are left out.
      below: Put the legend below the axes; else it is inside, or beside them if it is long.
      more: Entries of the legend before those of the axes.
    """
    note = "; ".join(text for text in notes if text)
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold", color=INK,
                   pad=18 if note else 8)  # fmt: skip
    if note:
        axes.annotate(note, (0, 1), (0, 5), xycoords="axes fraction", textcoords="offset points",
                      fontsize=8, color=RED)  # fmt: skip
    axes.spines[["top", "right"]].set_visible(False)
    for spine in axes.spines.values():
        spine.set_color(INK)
    axes.xaxis.label.set_color(INK)
    axes.yaxis.label.set_color(INK)
    axes.grid(alpha=0.25)
    axes.set_axisbelow(True)
    handles = [*more, *axes.get_legend_handles_labels()[0]]
    if handles:
        beside = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0)}
        under = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.18), "ncol": 4}
        place = under if below else beside if len(handles) > _WITHIN else {}
        axes.legend(handles=handles, fontsize=8, frameon=False, labelcolor=INK, **place)
