"""Sweep points that are distillations, for comparing recipes for the same target."""

import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dflash.config.distill_schema import DistillRun
from dflash.config.schema import PromptsConfig
from dflash.config.sweep_points import Sweep
from dflash.distillation import distill_plan, stages
from dflash.loading import job as decode_jobs
from dflash.runs import dates, sweeps
from dflash.runs.sweeps import Runner
from dflash.storage import files
from experiments import heat_maps
from experiments.tiny_family import recipe_comparison

TABLE, PLOT = "recipes.md", "tau_by_training_time.png"


class DistillPoints(Runner):
    """Runner that distills at each point; its directory is a work directory of `dflash.distill`.

    The cells of a point are its tests, named by data set and drafting variant, such as math,
    math-block8 and math-tree32. The further cell `training` has the cost of training.
    """

    metrics = ("tau", "speed_up", "cycle_ms", "tokens_per_second", "hours", "weights", "steps")
    shown = ("tau", "speed_up", "cycle_ms", "hours")

    def check(self, config: DistillRun) -> None:
        distill_plan.make(config, answers=stages.ANSWERS, dry=True)

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

    def finish(
        self, sweep: Sweep, rows: Mapping[str, Mapping[str, Any]], directory: pathlib.Path
    ) -> Sequence[str]:
        """Writes heat maps, a table of the recipes, and a plot of τ against training time."""
        heat_maps.draw_all(sweep, sweeps.columns(self, rows.values()), rows, directory)
        recipes = recipe_comparison.measured_recipes(sweep.axes, rows, directory / sweeps.POINTS)
        if not recipes:
            return ()
        files.write_whole(directory / TABLE, recipe_comparison.table(recipes))
        files.write_whole(directory / PLOT, recipe_comparison.plot(recipes))
        return TABLE, PLOT


def figures(
    trained: Mapping[str, Any], tested: Mapping[str, Mapping[str, Any]]
) -> Iterator[tuple[str, float | None]]:
    """Yields the figures of a finished distillation as pairs of "cell.figure" and value.

    Args:
      trained: Results of training.
      tested: Results of the tests by cell.
    """
    for cell, test in tested.items():
        tau, rate = test["tau"], test["tokens_per_second"]
        yield f"{cell}.tau", tau
        yield f"{cell}.speed_up", test["baseline"]["speed_up"]
        # Each slot commits τ tokens per cycle.
        yield f"{cell}.cycle_ms", 1e3 * tau * test["slots"] / rate if tau and rate else None
        yield f"{cell}.tokens_per_second", rate
    step_s = trained["step_seconds"]
    yield f"{recipe_comparison.TRAINING}.hours", step_s and step_s * trained["steps"] / 3600
    yield f"{recipe_comparison.TRAINING}.weights", trained["weights"]
    yield f"{recipe_comparison.TRAINING}.steps", trained["steps"]
