"""Study of calibration: how likely drafts are accepted, by what the drafter says of them.

The baseline decodes the prompts, and each drafter's cycles are replayed on these texts. A draft
counts if all drafts before it were accepted: of the others, verification tells nothing.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from dflash import errors
from dflash.checkpoints import files, hf_config
from dflash.config.benchmark_schema import BenchmarkRun
from dflash.drafters.parts import calibration as calibrations
from dflash.drafters.parts.calibration import Calibration
from dflash.inference import replay
from dflash.inference.replay import Text
from dflash.loading.job import Job
from dflash.measure.plots import Line
from dflash.measure.studies import decoded as replayed
from dflash.measure.studies.result import Step, StudyResult, with_warnings

BINS = 10
_LEAST = 1e-6  # Chances are at least this far from 0 and 1, so that their logits are finite.
_LEAST_SLOPE = 0.05  # Chances have to rise with the scores, by which candidates are sorted.
_PRIOR = 1.0  # Weight of the identity, which stays where there are no drafts.
_STEPS = 30  # Steps of Newton's method.


class Outcomes(NamedTuple):
    """N drafts of which all before were accepted.

    Attributes:
      depth: Number of tokens from the anchor, int [N].
      odds: Logits of the drafter's confidence, [N].
      accepted: Whether the draft was accepted, too, bool [N].
    """

    depth: np.ndarray
    odds: np.ndarray
    accepted: np.ndarray


class Bin(NamedTuple):
    """Drafts of similar predicted chances."""

    low: float
    predicted: float
    observed: float
    drafts: int


def calibration(config: BenchmarkRun) -> Iterator[Step]:
    """Fits each strategy's calibration to every other text, and measures it on those between.

    With `study.store`, the calibrations go into the config.json of the checkpoints.
    """
    plain, drafting = replayed.prepare(config, "calibration")
    for name, job in drafting.items():
        _check(name, config, job)
    answers = yield from replayed.decode(plain)
    rows: list[dict] = []
    notes: list[str] = []
    for number, (name, job) in enumerate(drafting.items()):
        yield Step(f"replaying {name}", (1 + number / len(drafting)) / 2)
        fitting, held_out = _replay(job, answers.texts)
        fitted = fit(fitting)
        rows += _rows(name, held_out, fitted)
        notes.append(f'{name}: "calibration": {[list(pair) for pair in fitted]}')
        if config.study.store:
            path = job.drafter_source.directory / hf_config.FILE
            files.write_json(path, files.read_json(path) | {"calibration": fitted})
        done = (1 + (number + 1) / len(drafting)) / 2
        yield Step(f"{name}, done", done, _result(rows, notes))


def _check(name: str, config: BenchmarkRun, job: Job) -> None:
    """Raises ConfigError if a strategy cannot be calibrated, or the result not be stored."""
    if not hasattr(job.drafter, "calibration"):
        raise errors.ConfigError(f"strategies.{name}: this strategy has no calibration")
    job.drafter.calibration = calibrations.IDENTITY
    if not job.drafter.has_confidence:
        raise errors.ConfigError(
            f"strategies.{name}: its chains state no confidence; add tree.budget"
        )
    reference = config.strategies[name].checkpoint or ""
    if config.study.store and (job.drafter_source.hf is None or reference.startswith("hf:")):
        raise errors.ConfigError(
            f"study.store: strategies.{name} has no checkpoint in a local directory; leave store "
            "out, and add the calibration that is printed to a copy's config.json"
        )


def _replay(job: Job, texts: Sequence[Text]) -> tuple[Outcomes, Outcomes]:
    """Returns the outcomes of the drafts of every other text, and of the texts between."""
    job.load_drafter()
    features = replay.compute(job.target, texts, job.drafter.feature_layers)
    drafts = replay.cycles(job.drafter, job.target, features).drafts
    both = []
    for first in (0, 1):
        chance, depth, counted, accepted = (array[first::2] for array in drafts)
        chance = np.clip(chance[counted].astype(np.float64), _LEAST, 1 - _LEAST)
        odds = np.log(chance) - np.log1p(-chance)
        both.append(Outcomes(depth[counted], odds, accepted[counted]))
    if not all(len(outcomes.depth) for outcomes in both):
        raise errors.ConfigError("prompts_per_task: calibration needs at least two prompts in all")
    return both[0], both[1]


def fit(outcomes: Outcomes) -> Calibration:
    """Returns the calibration under which the outcomes are the likeliest."""
    groups = calibrations.group(outcomes.depth)
    which = [groups == number for number in range(groups.max() + 1)]
    return tuple(_fit(outcomes.odds[own], outcomes.accepted[own]) for own in which)


def _fit(odds: np.ndarray, accepted: np.ndarray) -> tuple[float, float]:
    """Returns slope and offset by Newton's method, from the identity on."""
    rows, identity = np.stack([odds, np.ones_like(odds)], axis=1), np.array([1.0, 0.0])
    signs = np.where(accepted, 1.0, -1.0)

    def cost(pair):
        distance = pair - identity
        return np.logaddexp(0, -signs * (rows @ pair)).sum() + _PRIOR / 2 * distance @ distance

    found = identity
    for _ in range(_STEPS):
        chance = _sigmoid(rows @ found)
        gradient = rows.T @ (accepted - chance) - _PRIOR * (found - identity)
        curvature = (rows * (chance * (1 - chance))[:, None]).T @ rows + _PRIOR * np.eye(2)
        step = np.linalg.solve(curvature, gradient)
        # A whole step overshoots where chances are near 0 and 1.
        while cost(found + step) > cost(found) and abs(step).max() > _LEAST:
            step /= 2
        found = found + step
    slope, offset = found.round(4).tolist()
    return max(slope, _LEAST_SLOPE), offset


def chances(outcomes: Outcomes, calibration: Calibration) -> np.ndarray:
    """Returns the calibrated chances of drafts, [N]."""
    depth = int(outcomes.depth.max())
    slope, offset = calibrations.by_depth(calibration, depth)[outcomes.depth - 1].T
    return _sigmoid(slope * outcomes.odds + offset)


def reliability(chance: np.ndarray, accepted: np.ndarray, count: int = BINS) -> list[Bin]:
    """Returns the bins of equal width, of `count` from 0 to 1, that have drafts."""
    index = np.minimum((chance * count).astype(int), count - 1)
    return [
        Bin(i / count, float(chance[own].mean()), float(accepted[own].mean()), int(own.sum()))
        for i in range(count)
        if (own := index == i).any()
    ]


def calibration_error(bins: Sequence[Bin]) -> float:
    """Returns the expected calibration error: the mean distance of a bin, weighted by drafts."""
    total = sum(one.drafts for one in bins)
    return sum(one.drafts * abs(one.predicted - one.observed) for one in bins) / total


def _sigmoid(odds: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-odds))


def _rows(name: str, outcomes: Outcomes, fitted: Calibration) -> list[dict]:
    """Returns a row for each bin, before calibration and after it."""
    rows = []
    for kind, pairs in (("stated", calibrations.IDENTITY), ("calibrated", fitted)):
        bins = reliability(chances(outcomes, pairs), outcomes.accepted)
        error = calibration_error(bins)
        for one in bins:
            row = {"strategy": name, "chance": kind, **one._asdict(), "calibration_error": error}
            rows.append(with_warnings(row, ()))
    return rows


def _result(rows: Sequence[Mapping], notes: Sequence[str]) -> StudyResult:
    lines = []
    for name, kind in dict.fromkeys((row["strategy"], row["chance"]) for row in rows):
        own = [row for row in rows if (row["strategy"], row["chance"]) == (name, kind)]
        label = f"{name}, {kind}: error {own[0]['calibration_error']:.3f}"
        lines.append(Line(label, *([row[key] for row in own] for key in ("predicted", "observed"))))
    explained = "drafts whose predecessors were accepted, of texts that nothing was fitted to"
    return StudyResult(
        "Chances of drafts, predicted and observed",
        list(rows),
        lines,
        "predicted chance",
        "share of drafts that were accepted",
        notes=[explained, *notes],
    )
