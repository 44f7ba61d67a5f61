"""Draws heat maps of a sweep's figures, over its two longest axes.

python -m experiments.heat_maps CONFIG WORKDIR [key=value …]    # as for dflash sweep
"""

import io
import itertools
import pathlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from dflash import errors
from dflash.config import registry, sweep_points
from dflash.config.sweep_points import Sweep, label
from dflash.runs import sweeps
from dflash.storage import files

MAX_PANELS = 16
MAX_LABEL = 30  # Limit of characters of a step's label.
_CELL_INCHES = 0.9


def main(config: str, workdir: str, *overrides: str) -> None:
    """Draws the shown figures of a sweep's finished points, and prints the names of the files."""
    sweep, directory = sweep_points.load(config, overrides), pathlib.Path(workdir)
    runner = registry.load(registry.RUNS[sweep.run].implementation)
    rows = sweeps.finished(sweep, directory)
    for path in draw_all(sweep, sweeps.columns(runner, rows.values()), rows, directory):
        print(path)


def draw_all(
    sweep: Sweep,
    metrics: Iterable[str],
    rows: Mapping[str, Mapping[str, Any]],
    directory: pathlib.Path,
) -> list[pathlib.Path]:
    """Draws a heat map of each metric, and returns the files."""
    paths = {metric: directory / f"{metric}.png" for metric in metrics}
    return [path for metric, path in paths.items() if draw(sweep, metric, rows, path)]


def draw(
    sweep: Sweep, metric: str, rows: Mapping[str, Mapping[str, Any]], path: pathlib.Path
) -> bool:
    """Draws a metric over the two longest axes, with a panel per combination of the others.

    Cells of unfinished points stay blank.

    Args:
      metric: Key of a number in each row; a value of None leaves the cell blank.
    Returns:
      True if a file was written; False if there is nothing to draw, or if the map would be
      illegible, with too many panels or too long labels.
    """
    panels = panels_of(sweep, metric, rows)
    values = itertools.chain.from_iterable(line for panel in panels.values() for line in panel)
    filled = [value for value in values if value is not None]
    down, across, _ = _roles(sweep)
    downs, acrosses = _steps(sweep, down), _steps(sweep, across)
    longest = max(len(_label(step)) for step in (*downs, *acrosses))
    if not filled or len(panels) > MAX_PANELS or longest > MAX_LABEL:
        return False
    width = 2.5 + _CELL_INCHES * len(acrosses)
    height = 1.6 + 0.6 * _CELL_INCHES * len(downs)
    figure = Figure((width, height * len(panels)), layout="constrained")
    figure.suptitle(metric)
    all_axes = figure.subplots(len(panels), squeeze=False)[:, 0]
    low, high = min(filled), max(filled)
    for axes, (title, panel) in zip(all_axes, panels.items(), strict=True):
        grid = [[float("nan") if value is None else value for value in line] for line in panel]
        image = axes.imshow(grid, vmin=low, vmax=high, cmap="viridis", aspect="auto")
        axes.set_title(title, fontsize="small")
        axes.set_xticks(range(len(acrosses)), [_label(step) for step in acrosses])
        axes.set_yticks(range(len(downs)), [_label(step) for step in downs])
        axes.set_xlabel(", ".join(across))
        axes.set_ylabel(", ".join(down))
        for (y, line), x in itertools.product(enumerate(panel), range(len(acrosses))):
            if line[x] is not None:
                dark = line[x] <= (low + high) / 2  # Equal values all take the darkest color.
                color = "white" if dark else "black"
                axes.text(x, y, f"{line[x]:.3g}", ha="center", va="center", color=color)
    figure.colorbar(image, ax=list(all_axes))
    image_file = io.BytesIO()
    figure.savefig(image_file, format="png", dpi=120)
    files.write_whole(path, image_file.getvalue())
    return True


def panels_of(
    sweep: Sweep, metric: str, rows: Mapping[str, Mapping[str, Any]]
) -> dict[str, list[list[float | None]]]:
    """Returns the grids of a heat map by title: [steps down][steps across]."""
    down, across, remaining = _roles(sweep)
    downs, acrosses = _steps(sweep, down), _steps(sweep, across)
    keys = [key for axis in remaining for key in axis]
    panels: dict[str, list[list[float | None]]] = {}
    for point in sweep.points.values():
        title = ", ".join(f"{key}={label(point.values[key])}" for key in keys)
        empty = [[None] * len(acrosses) for _ in downs]
        panel = panels.setdefault(title, empty)
        y = downs.index([point.values[key] for key in down])
        x = acrosses.index([point.values[key] for key in across])
        panel[y][x] = rows.get(point.name, {}).get(metric)
    return panels


def _roles(sweep: Sweep) -> tuple[Sequence[str], Sequence[str], Sequence[Sequence[str]]]:
    """Returns the axes drawn down and across, which are the two longest, and the rest."""
    lengths = {axis: len(_steps(sweep, axis)) for axis in sweep.axes}
    longest = sorted(sweep.axes, key=lambda axis: -lengths[axis])[:2]
    chosen = [axis for axis in sweep.axes if axis in longest]
    remaining = [axis for axis in sweep.axes if axis not in longest]
    down = chosen[0] if len(chosen) > 1 else ()
    return down, chosen[-1], remaining


def _steps(sweep: Sweep, axis: Sequence[str]) -> list[list[Any]]:
    steps: list[list[Any]] = []
    for point in sweep.points.values():
        step = [point.values[key] for key in axis]
        if step not in steps:
            steps.append(step)
    return steps


def _label(step: Sequence[Any]) -> str:
    return ", ".join(map(label, step))


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except errors.UserError as error:
        sys.exit(f"error: {error}")
