"""Comparison of training recipes, the points of a sweep of distillations.

Points that differ only in their seed belong to one recipe. The mean acceptance length (τ) of each
recipe is compared with the first recipe's on the same prompts, with a bootstrap interval.
"""

import dataclasses
import io
import pathlib
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from dflash.config.sweep_points import label
from dflash.distillation import stages
from dflash.measure import bootstrap
from dflash.runs import records

TRAINING = "training"  # Name of the cell with the training time.
_SEED_KEY = "train.seed"
_TAU = re.compile(r"(?P<task>.+?)(?:-(?P<way>(?:block|tree)\d+))?\.tau")  # Name of a cell.
_RANDOM_SEED = 0


@dataclasses.dataclass(frozen=True)
class Way:
    """Results of a recipe's drafters with one way of drafting.

    Attributes:
      taus: Mean τ over seeds by data set.
      cycle_ms: Milliseconds per cycle, mean over seeds and data sets; None if not measured.
      speed_up: Speed-up over plain decoding, mean over seeds and data sets; None if not measured.
      ratio: Mean τ over data sets, divided by the first recipe's; None without their outputs.
      interval: Ends of the ratio's bootstrap interval; None for the first recipe, or if a data
        set has too few prompts.
    """

    taus: Mapping[str, float]
    cycle_ms: float | None
    speed_up: float | None
    ratio: float | None
    interval: tuple[float, float] | None

    @property
    def tau(self) -> float:
        """Returns the mean τ over data sets."""
        return statistics.mean(self.taus.values())


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Measured points of one recipe.

    Attributes:
      name: Short name that distinguishes the recipe from the others.
      points: Hours of training (None if unknown) and mean τ over data sets, for each seed.
      ways: Results by way of drafting: "" for the config's own, "block8", "tree32", ….
    """

    name: str
    points: Sequence[tuple[float | None, float]]
    ways: Mapping[str, Way]


def recipes(
    axes: Sequence[Sequence[str]], rows: Mapping[str, Mapping[str, Any]], points: pathlib.Path
) -> list[Recipe]:
    """Returns the measured recipes of a sweep, in the order of their first points.

    Args:
      axes: Keys of the sweep.
      rows: Figures of the finished points, by name.
      points: Parent of the points' directories, whose test outputs give the intervals.
    """
    names = recipe_names([key for axis in axes for key in axis], list(rows.values()))
    grouped: dict[str, list[str]] = {}
    for recipe, point in zip(names, rows, strict=True):
        grouped.setdefault(recipe, []).append(point)
    found, first = [], None
    for name, members in grouped.items():
        theirs = [rows[point] for point in members]
        cells = _cells(theirs)
        if "" not in cells:  # No data set was measured on all points.
            continue
        tests = {way: _read(points, members, way, tasks) for way, tasks in cells.items()}
        first = first or tests
        ways = {
            way: _way(theirs, way, tasks, tests[way], first.get(way))
            for way, tasks in cells.items()
        }
        seeds = [
            (row.get(f"{TRAINING}.hours"), _mean([row], cells[""], "", "tau")) for row in theirs
        ]
        found.append(Recipe(name, seeds, ways))
    return found


def table(found: Sequence[Recipe]) -> str:
    """Returns a Markdown table with a line for each recipe and way of drafting.

    Recipes are sorted by τ, the largest first.
    """
    tasks = list(
        dict.fromkeys(task for one in found for way in one.ways.values() for task in way.taus)
    )
    percent = bootstrap.INTERVAL_PERCENT
    out = io.StringIO()
    out.write(
        f"τ by data set, means over seeds. Against {found[0].name}, drafting in the same way: "
        f"mean τ over its mean τ, and the {percent:g} % bootstrap interval over prompts and seeds; "
        "a difference is significant where the interval does not contain 1.\n\n"
    )
    head = ["recipe", "drafts", *tasks, "mean τ", "by seed", "against the first", "difference"]
    head += ["ms per cycle", "speed-up", "hours"]
    out.write(f"| {' | '.join(head)} |\n|{'---|' * len(head)}\n")
    for one in sorted(found, key=lambda one: one.ways[""].tau, reverse=True):
        seeds = ", ".join(f"{tau:.2f}" for _, tau in one.points)
        hours = [hours for hours, _ in one.points if hours is not None]
        of_all = {"": (seeds, f"{statistics.mean(hours):.2f}" if hours else "–")}
        for name, way in one.ways.items():
            taus = [f"{way.taus[task]:.2f}" if task in way.taus else "–" for task in tasks]
            seeds, trained = of_all.get(name, ("", ""))
            cells = [one.name, name or "chain", *taus, f"{way.tau:.2f}", seeds, *_against(way)]
            cells += ["–" if way.cycle_ms is None else f"{way.cycle_ms:.2f}"]
            cells += ["–" if way.speed_up is None else f"{way.speed_up:.2f} ×", trained]
            out.write(f"| {' | '.join(cells)} |\n")
    return out.getvalue()


def _against(way: Way) -> tuple[str, str]:
    if way.ratio is None:
        return "–", ""
    if way.interval is None:
        return f"{way.ratio:.2f}", ""
    low, high = way.interval
    verdict = "noise" if low <= 1 <= high else "significant"
    return f"{way.ratio:.2f} ({low:.2f}–{high:.2f})", verdict


def plot(found: Sequence[Recipe]) -> bytes:
    """Returns a PNG image of mean τ against hours of training, with a dot for each seed."""
    # Avoid pyplot, which keeps figures alive and looks for a window system.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from dflash.measure import plots

    figure = Figure((8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    timed = [one for one in found if all(hours is not None for hours, _ in one.points)]
    for number, one in enumerate(timed):
        marker = "os^Dv"[number // 10 % 5]  # Colors repeat after ten.
        hours, taus = zip(*one.points, strict=True)
        axes.scatter(hours, taus, label=one.name, color=f"C{number % 10}", marker=marker)
    axes.set_xlabel("hours of training")
    axes.set_ylabel("τ, mean over data sets")
    axes.set_ylim(bottom=1)
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper", fontsize="small")
    return plots.png(figure)


def _cells(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Returns the data sets that all points of a recipe were measured on, by way of drafting."""
    found: dict[str, list[str]] = {}
    for key in rows[0]:
        cell = _TAU.fullmatch(key)
        if cell and all(row.get(key) is not None for row in rows):
            found.setdefault(cell["way"] or "", []).append(cell["task"])
    return found


def _name(task: str, way: str) -> str:
    return f"{task}-{way}" if way else task


def _mean(rows: Sequence[Mapping[str, Any]], tasks: Sequence[str], way: str, figure: str):
    """Returns the mean of a figure over points and data sets; None if one of them lacks it."""
    values = [row.get(f"{_name(task, way)}.{figure}") for row in rows for task in tasks]
    return None if None in values else statistics.mean(values)


# Tokens and cycles of a data set's prompts: float64 [2, seeds, prompts].
_Test = Mapping[str, np.ndarray]


def _read(
    points: pathlib.Path, members: Sequence[str], way: str, tasks: Sequence[str]
) -> _Test | None:
    """Returns the test outputs of a recipe's points by data set.

    The result is None if a file is missing, or if points were tested on different prompts.
    """
    found = {}
    for task in tasks:
        seeds = []
        for member in members:
            file = points / member / stages.TESTS / _name(task, way) / records.OUTPUTS
            try:
                lengths = [record.acceptance_lengths for record in records.read(file)]
            except FileNotFoundError:
                return None
            seeds.append([[sum(some), len(some)] for some in lengths])
        if len(set(map(len, seeds))) > 1:
            return None
        found[task] = np.array(seeds, float).transpose(2, 0, 1)
    return found


def _way(
    rows: Sequence[Mapping[str, Any]],
    way: str,
    tasks: Sequence[str],
    test: _Test | None,
    first: _Test | None,
) -> Way:
    taus = {task: _mean(rows, [task], way, "tau") for task in tasks}
    ratio = interval = None
    comparable = (
        test
        and first
        and {x: a.shape[2] for x, a in test.items()} == {x: a.shape[2] for x, a in first.items()}
    )
    if comparable:
        ratio, interval = compare(list(test.values()), [first[task] for task in test])
    cycle_ms, speed_up = (_mean(rows, tasks, way, name) for name in ("cycle_ms", "speed_up"))
    return Way(taus, cycle_ms, speed_up, ratio, None if test is first else interval)


def compare(
    test: Sequence[np.ndarray], first: Sequence[np.ndarray]
) -> tuple[float, tuple[float, float] | None]:
    """Returns the ratio of two recipes' mean τ on the same prompts, and its bootstrap interval.

    Prompts are drawn with replacement within each data set, the same ones for both recipes. Seeds
    are drawn for each recipe separately, the same ones for all data sets.

    Args:
      test: Tokens and cycles of each data set, float64 [2, seeds, prompts].
      first: Tokens and cycles of the first recipe, whose number of seeds may differ.
    Returns:
      The ratio, and the two ends of its interval, None if a data set has fewer prompts than
      `bootstrap.MIN_GROUPS`.
    """
    ratio = float(_tau(test) / _tau(first))
    if min(one.shape[2] for one in test) < bootstrap.MIN_GROUPS:
        return ratio, None
    random, draws = np.random.default_rng(_RANDOM_SEED), bootstrap.DRAWS
    prompts = [random.integers(0, one.shape[2], (draws, 1, one.shape[2])) for one in test]
    drawn = []
    for side in (test, first):
        seeds = side[0].shape[1]
        chosen = random.integers(0, seeds, (draws, seeds, 1))
        drawn.append(_tau([one[:, chosen, some] for one, some in zip(side, prompts, strict=True)]))
    return ratio, bootstrap.interval(drawn[0] / drawn[1])


def _tau(test: Sequence[np.ndarray]) -> np.ndarray:
    """Returns the mean τ over data sets [...] from tokens and cycles [2, ..., seeds, prompts]."""
    sums = [one.sum(axis=(-2, -1)) for one in test]
    return np.mean([tokens / np.maximum(cycles, 1) for tokens, cycles in sums], axis=0)


def recipe_names(keys: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns a short name of each point's recipe, such as "dflash, kl, causal_head".

    A name consists of the names of groups, such as the drafter's, and of the values in which points
    with these names differ. Seeds and keys of the test are left out.

    Args:
      keys: Keys that the sweep varies.
      rows: Values of each point, by key.
    """
    learned = [key for key in keys if key != _SEED_KEY and not key.startswith("test")]
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
    """Yields the values of nested mappings with their dotted keys."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
