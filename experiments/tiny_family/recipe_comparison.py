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
from dflash.measure import samples
from dflash.runs import records

TRAINING = "training"  # Name of the cell with the training time.
_SEED_KEY = "train.seed"
_TAU = re.compile(r"(?P<task>.+?)(?:-(?P<variant>(?:block|tree)\d+))?\.tau")  # Name of a cell.
_RANDOM_SEED = 0


@dataclasses.dataclass(frozen=True)
class VariantResults:
    """Results of a recipe's drafters in one variant, such as with a smaller block or a tree.

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
      variants: Results by variant: "" for the config's own drafting, "block8", "tree32", ….
    """

    name: str
    points: Sequence[tuple[float | None, float]]
    variants: Mapping[str, VariantResults]


def measured_recipes(
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
    recipes, first = [], None
    for name, members in grouped.items():
        own_rows = [rows[point] for point in members]
        cells = _cells(own_rows)
        if "" not in cells:  # No data set was measured on all points.
            continue
        tests = {
            variant: _read(points, members, variant, tasks) for variant, tasks in cells.items()
        }
        first = first or tests
        variants = {
            variant: _variant_results(own_rows, variant, tasks, tests[variant], first.get(variant))
            for variant, tasks in cells.items()
        }
        seeds = [
            (row.get(f"{TRAINING}.hours"), _mean([row], cells[""], "", "tau")) for row in own_rows
        ]
        recipes.append(Recipe(name, seeds, variants))
    return recipes


def table(recipes: Sequence[Recipe]) -> str:
    """Returns a Markdown table with a line for each recipe and variant.

    Recipes are sorted by τ, the largest first.
    """
    results = [variant for recipe in recipes for variant in recipe.variants.values()]
    tasks = list(dict.fromkeys(task for variant in results for task in variant.taus))
    percent = samples.INTERVAL_PERCENT
    out = io.StringIO()
    out.write(
        f"τ by data set, means over seeds. Against {recipes[0].name}, drafting in the same way: "
        f"mean τ over its mean τ, and the {percent:g} % bootstrap interval over prompts and seeds; "
        "a difference is significant where the interval does not contain 1.\n\n"
    )
    head = ["recipe", "drafts", *tasks, "mean τ", "by seed", "against the first", "difference"]
    head += ["ms per cycle", "speed-up", "hours"]
    out.write(f"| {' | '.join(head)} |\n|{'---|' * len(head)}\n")
    for recipe in sorted(recipes, key=lambda recipe: recipe.variants[""].tau, reverse=True):
        seeds = ", ".join(f"{tau:.2f}" for _, tau in recipe.points)
        known_hours = [hours for hours, _ in recipe.points if hours is not None]
        hours = f"{statistics.mean(known_hours):.2f}" if known_hours else "–"
        for name, variant in recipe.variants.items():
            own = name == ""  # Only the line of the config's own drafting has seeds and hours.
            taus = [f"{variant.taus[task]:.2f}" if task in variant.taus else "–" for task in tasks]
            cells = [recipe.name, name or "chain", *taus, f"{variant.tau:.2f}"]
            cells += [seeds if own else "", *_against(variant)]
            cells += ["–" if variant.cycle_ms is None else f"{variant.cycle_ms:.2f}"]
            cells += ["–" if variant.speed_up is None else f"{variant.speed_up:.2f} ×"]
            cells += [hours if own else ""]
            out.write(f"| {' | '.join(cells)} |\n")
    return out.getvalue()


def _against(variant: VariantResults) -> tuple[str, str]:
    if variant.ratio is None:
        return "–", ""
    if variant.interval is None:
        return f"{variant.ratio:.2f}", ""
    low, high = variant.interval
    verdict = "noise" if low <= 1 <= high else "significant"
    return f"{variant.ratio:.2f} ({low:.2f}–{high:.2f})", verdict


def plot(recipes: Sequence[Recipe]) -> bytes:
    """Returns a PNG image of mean τ against hours of training, with a dot for each seed."""
    # Avoid pyplot, which keeps figures alive and looks for a window system.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from dflash.measure import plots

    figure = Figure((8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    timed = [x for x in recipes if all(hours is not None for hours, _ in x.points)]
    slots = plots.line_slots(recipe.name for recipe in timed)
    for recipe in timed:
        slot = slots.get(recipe.name)
        color = plots.color_of(slot)
        marker = plots.marker_of(slot)  # Colors repeat after ten.
        hours, taus = zip(*recipe.points, strict=True)
        axes.scatter(hours, taus, label=recipe.name, color=color, marker=marker)
    axes.set_xlabel("hours of training")
    axes.set_ylabel("τ, mean over data sets")
    axes.set_ylim(bottom=1)
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper", fontsize="small")
    return plots.png(figure)


def _cells(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Returns the data sets on which all points of a recipe were measured, by variant."""
    cells: dict[str, list[str]] = {}
    for key in rows[0]:
        cell = _TAU.fullmatch(key)
        if cell and all(row.get(key) is not None for row in rows):
            cells.setdefault(cell["variant"] or "", []).append(cell["task"])
    return cells


def _name(task: str, variant: str) -> str:
    return f"{task}-{variant}" if variant else task


def _mean(rows: Sequence[Mapping[str, Any]], tasks: Sequence[str], variant: str, figure: str):
    """Returns the mean of a figure over points and data sets; None if one of them lacks it."""
    values = [row.get(f"{_name(task, variant)}.{figure}") for row in rows for task in tasks]
    return None if None in values else statistics.mean(values)


# Tokens and cycles of a data set's prompts: float64 [2, seeds, prompts].
_Test = Mapping[str, np.ndarray]


def _read(
    points: pathlib.Path, members: Sequence[str], variant: str, tasks: Sequence[str]
) -> _Test | None:
    """Returns the test outputs of a recipe's points by data set.

    The result is None if a file is missing, or if points were tested on different prompts.
    """
    test = {}
    for task in tasks:
        seeds = []
        for member in members:
            file = points / member / stages.TESTS / _name(task, variant) / records.OUTPUTS
            try:
                lengths = [record.acceptance_lengths for record in records.read(file)]
            except FileNotFoundError:
                return None
            seeds.append([[sum(cycles), len(cycles)] for cycles in lengths])
        if len(set(map(len, seeds))) > 1:
            return None
        test[task] = np.array(seeds, float).transpose(2, 0, 1)
    return test


def _variant_results(
    rows: Sequence[Mapping[str, Any]],
    variant: str,
    tasks: Sequence[str],
    test: _Test | None,
    first: _Test | None,
) -> VariantResults:
    taus = {task: _mean(rows, [task], variant, "tau") for task in tasks}
    ratio = interval = None
    comparable = (
        test
        and first
        and {x: a.shape[2] for x, a in test.items()} == {x: a.shape[2] for x, a in first.items()}
    )
    if comparable:
        ratio, interval = compare(list(test.values()), [first[task] for task in test])
    cycle_ms, speed_up = (_mean(rows, tasks, variant, name) for name in ("cycle_ms", "speed_up"))
    return VariantResults(taus, cycle_ms, speed_up, ratio, None if test is first else interval)


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
    if min(array.shape[2] for array in test) < samples.MIN_GROUPS:
        return ratio, None
    random, draws = np.random.default_rng(_RANDOM_SEED), samples.DRAWS
    counts = [array.shape[2] for array in test]
    prompts = [random.integers(0, count, (draws, 1, count)) for count in counts]
    drawn = []
    for side in (test, first):
        seeds = side[0].shape[1]
        chosen = random.integers(0, seeds, (draws, seeds, 1))
        drawn.append(
            _tau(
                [
                    x[:, chosen, drawn_prompts]
                    for x, drawn_prompts in zip(side, prompts, strict=True)
                ]
            )
        )
    return ratio, samples.interval(drawn[0] / drawn[1])


def _tau(test: Sequence[np.ndarray]) -> np.ndarray:
    """Returns the mean τ over data sets [...] from tokens and cycles [2, ..., seeds, prompts]."""
    sums = [array.sum(axis=(-2, -1)) for array in test]
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
    named = [{key: x for key, x in point.items() if key.endswith("name")} for point in points]
    recipes = []
    for point, names in zip(points, named, strict=True):
        alike = [other for other, others in zip(points, named, strict=True) if others == names]
        values = [
            label(value) if value is not True else key.rpartition(".")[2]
            for key, value in point.items()
            if key not in names and any(other.get(key) != value for other in alike)
        ]
        recipes.append(", ".join([*map(label, names.values()), *values]) or "all")
    return recipes


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the values of nested mappings with their dotted keys."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
