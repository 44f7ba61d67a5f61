"""Points of a sweep that are distillations: a race of recipes for the same target."""

import json
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dflash.config.distill_schema import DistillRun
from dflash.config.schema import PromptsConfig
from dflash.config.sweep import Sweep, label
from dflash.distillation import plan, stages
from dflash.offline import job as decode_jobs
from dflash.runs import dates, files
from dflash.runs.sweeps import Runner

PLOT = "tau_by_training_time.png"
_TRAINING = "training"  # the cell of what training took
_FURTHER = re.compile(r"-(block|tree)\d+\.")  # cells of other than what `drafter` says


class DistillPoints(Runner):
    """Makes drafters; a point's directory is a work directory of `dflash.distill`.

    The cells of a point are its tests: a data set, or a data set and what is drafted, such as
    math-block8 and math-tree32.
    One more, `training`, has what the training took.
    """

    metrics = ("tau", "speed_up", "cycle_ms", "tokens_per_second", "hours", "weights", "steps")
    shown = ("tau", "speed_up", "cycle_ms", "hours")

    def check(self, config: DistillRun) -> None:
        plan.make(config, answers=stages.ANSWERS, dry=True)

    def affinity(self, config: DistillRun) -> str:
        return decode_jobs.target_key(config.answer_run(PromptsConfig()))

    def run(self, config: DistillRun, directory: pathlib.Path) -> Mapping[str, Any]:
        date = dates.find(directory)
        with stages.open_directory(directory, config, date) as opened:
            status = stages.run(config, opened, date, self._display)
        if status:
            raise SystemExit(status)
        trained, tested = (
            json.loads((directory / name).read_text(encoding="utf-8"))
            for name in (stages.TRAINED, stages.TESTED)
        )
        return dict(figures(trained, tested))

    def draw(
        self, sweep: Sweep, rows: Mapping[str, Mapping[str, Any]], directory: pathlib.Path
    ) -> None:
        """Heat maps, and the mean τ over data sets against the time of training."""
        super().draw(sweep, rows, directory)
        draw_race(sweep.axes, rows, directory / PLOT)


def figures(
    trained: Mapping[str, Any], tested: Mapping[str, Mapping[str, Any]]
) -> Iterator[tuple[str, float | None]]:
    """The figures of a finished distillation, as "cell.figure" and value.

    Args:
      trained: what ended the training.
      tested: results of the tests by cell.
    """
    for cell, found in tested.items():
        tau, rate = found["tau"], found["tokens_per_second"]
        yield f"{cell}.tau", tau
        yield f"{cell}.speed_up", found["baseline"]["speed_up"]
        # Each slot commits τ tokens a cycle.
        yield f"{cell}.cycle_ms", 1e3 * tau * found["slots"] / rate if tau and rate else None
        yield f"{cell}.tokens_per_second", rate
    step_s = trained["step_seconds"]
    yield f"{_TRAINING}.hours", step_s and step_s * trained["steps"] / 3600
    yield f"{_TRAINING}.weights", trained["weights"]
    yield f"{_TRAINING}.steps", trained["steps"]


def recipe_names(keys: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A short name of each point's recipe, such as "dflash, kl, causal_head".

    It has the names of groups, such as that of the drafter, and of the rest what tells it from
    other points with these names; never the seed, nor what is only measured.

    Args:
      keys: those that the sweep varies.
      rows: their values, by key.
    """
    learned = [key for key in keys if key != "train.seed" and not key.startswith("test")]
    points = [dict(_leaves({key: row[key] for key in learned})) for row in rows]
    named = [{key: x for key, x in one.items() if key.endswith("name")} for one in points]
    found = []
    for point, names in zip(points, named, strict=True):
        like = [other for other, theirs in zip(points, named, strict=True) if theirs == names]
        rest = [
            label(value) if value is not True else key.rpartition(".")[2]
            for key, value in point.items()
            if key not in names and any(other.get(key) != value for other in like)
        ]
        found.append(", ".join([*map(label, names.values()), *rest]) or "all")
    return found


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Values of nested mappings by dotted key."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def draw_race(
    axes: Sequence[Sequence[str]], rows: Mapping[str, Mapping[str, Any]], path: pathlib.Path
) -> bool:
    """Draws a point for each distillation, in the color of its recipe; see `recipe_names`.

    Args:
      axes: keys of the sweep.
      rows: figures of the finished points.
      path: the PNG file; written whole.
    Returns:
      Whether there was anything to draw.
    Raises:
      OSError: it cannot be written.
    """
    names = recipe_names([key for axis in axes for key in axis], list(rows.values()))
    recipes: dict[str, list[tuple[float, float]]] = {}
    for name, row in zip(names, rows.values(), strict=True):
        taus = [
            value
            for key, value in row.items()
            if key.endswith(".tau") and not _FURTHER.search(key) and value is not None
        ]
        hours = row.get(f"{_TRAINING}.hours")
        if taus and hours is not None:
            recipes.setdefault(name, []).append((hours, sum(taus) / len(taus)))
    if not recipes:
        return False
    # Not pyplot, which keeps figures alive and looks for a window system.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from dflash.measure import plots

    figure = Figure((8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    plot = figure.subplots()
    for number, (name, points) in enumerate(recipes.items()):
        marker = "os^Dv"[number // 10 % 5]  # colors repeat after ten
        plot.scatter(*zip(*points, strict=True), label=name, color=f"C{number % 10}", marker=marker)
    plot.set_xlabel("hours of training")
    plot.set_ylabel("τ, mean over data sets")
    plot.set_ylim(bottom=1)
    plot.grid(alpha=0.3)
    figure.legend(loc="outside right upper", fontsize="small")
    files.write_whole(path, plots.png(figure))
    return True
