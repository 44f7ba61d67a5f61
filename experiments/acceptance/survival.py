"""Study of survival estimates: predicted beside observed acceptance of drafts."""

import json
import math
import pathlib
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from dflash import errors
from dflash.config.benchmark_schema import BenchmarkRun
from dflash.inference import replay
from dflash.inference.replay import Cycles, Text
from dflash.loading.job import Job
from dflash.measure.plots import Line
from dflash.measure.studies.result import Step, StudyResult, with_warnings
from experiments.acceptance import answers as replayed
from experiments.acceptance import estimates
from experiments.acceptance.estimates import Bin

ONLINE, HEAD, CALIBRATED = "online", "head", "head, calibrated"
MEAN_ROWS = (4,)
_FITTING, _HELD_OUT = slice(0, None, 2), slice(1, None, 2)  # Texts.


def survival(
    config: BenchmarkRun, directory: pathlib.Path, means: Sequence[int] = MEAN_ROWS
) -> Iterator[Step]:
    """Compares estimates of the chance that drafts are accepted with what is accepted.

    The baseline decodes the prompts, and each drafter's cycles are replayed on these texts.
    Temperatures are fitted to every other text, and all figures are those of the texts between.
    Each drafter's cycles are written to `directory`, as traces that a benchmark can replay.
    """
    plain, drafting = replayed.prepare(config, "survival")
    _check_chains(drafting)
    texts, tasks = yield from replayed.decode(plain)
    rows, notes = [], []
    for number, (name, job) in enumerate(drafting.items()):
        yield Step(f"replaying {name}", (1 + number / len(drafting)) / 2)
        job.load_drafter()
        features = replay.compute(job.target, texts, job.drafter.feature_layers)
        cycles = replay.cycles(job.drafter, job.target, features)
        fresh, said = _rows(name, job, cycles, means)
        rows, notes = [*rows, *fresh], [*notes, *said]
        trace = json.dumps(_trace(tasks, texts, cycles))
        (directory / f"trace_{name}.json").write_text(trace, encoding="utf-8")
        done = (1 + (number + 1) / len(drafting)) / 2
        yield Step(f"{name}, done", done, _result(rows, notes))


def _trace(tasks: Sequence[str], texts: Sequence[Text], cycles: Cycles) -> list[dict]:
    """Returns the cycles of each text in the format of `workload.read_trace`."""
    found = []
    for i, (task, text) in enumerate(zip(tasks, texts, strict=True)):
        used = cycles.committed[i] > 0
        lengths = cycles.committed[i, used].tolist()
        row = {"dataset": task, "prompt_tokens": len(text.prompt), "acceptance_lengths": lengths}
        if cycles.confidence is not None:
            # In float64, so that rounded numbers have few digits.
            row["confidence"] = cycles.confidence[i, used].astype(float).round(4).tolist()
        if lengths:
            found.append(row)
    return found


def _check_chains(drafting: Mapping[str, Job]) -> None:
    """Raises ConfigError if a strategy drafts trees."""
    for name, job in drafting.items():
        if job.drafter.drafts_trees:
            raise errors.ConfigError(
                f"strategies.{name}: survival replays chains, and this strategy drafts trees; "
                "leave its tree out"
            )


def _rows(
    name: str, job: Job, cycles: Cycles, means: Sequence[int]
) -> tuple[list[dict], list[str]]:
    """Returns a row for each bin of each estimate, and the notes on a strategy."""
    count = job.drafter.num_draft_tokens
    fitting, held_out = (estimates.of_texts(cycles, which) for which in (_FITTING, _HELD_OUT))
    if held_out.committed.size == 0:
        raise errors.ConfigError("prompts_per_task: survival needs at least two prompts in all")
    found = {ONLINE: estimates.online_rates(cycles, count)[_HELD_OUT]}
    rows, notes = [], []
    if cycles.confidence is not None:
        temperatures = estimates.fit_temperatures(
            fitting.confidence.reshape(-1, count), estimates.drafts_of(fitting, count)
        )
        found[HEAD] = held_out.confidence
        found[CALIBRATED] = estimates.calibrated(held_out.confidence, temperatures)
        notes.append(_temperatures_note(name, job, temperatures))
    for estimate, rates in found.items():
        bins, figures = _figures(rates, held_out, means)
        words = ", ".join(f"{key.replace('_', ' ')} {value:.3f}" for key, value in figures.items())
        notes.append(f"{name}, {estimate}: {words}")
        for one in bins:
            row = {"strategy": name, "estimate": estimate, **one._asdict(), **figures}
            rows.append(with_warnings(row, ()))
    return rows, notes


def _figures(
    rates: np.ndarray, cycles: Cycles, means: Sequence[int]
) -> tuple[list[Bin], dict[str, float]]:
    """Returns the bins of an estimate's rates [B, C, G], and its figures by name."""
    count = rates.shape[-1]
    flat, drafts = rates.reshape(-1, count), estimates.drafts_of(cycles, count)
    bins = estimates.reliability(flat, drafts)
    return bins, {
        "calibration_error": estimates.calibration_error(bins),
        "squared_error": estimates.squared_error(flat, drafts),
        **{f"tokens_{mean}": estimates.divided_tokens(rates, cycles, mean) for mean in means},
    }


def _temperatures_note(name: str, job: Job, temperatures: Sequence[float]) -> str:
    """Returns the config key that calibrates the drafter, which may be calibrated already."""
    present = getattr(job.drafter, "confidence_temperatures", ())
    if present:
        temperatures = map(math.prod, zip(present, temperatures, strict=False))
    values = ",".join(f"{value:.3g}" for value in temperatures)
    return f"{name}: drafter.confidence_temperatures=[{values}]"


def _result(rows: Sequence[dict], notes: Sequence[str]) -> StudyResult:
    lines = []
    for name, estimate in dict.fromkeys((row["strategy"], row["estimate"]) for row in rows):
        own = [row for row in rows if (row["strategy"], row["estimate"]) == (name, estimate)]
        places, observed = ([row[key] for row in own] for key in ("predicted", "observed"))
        lines.append(Line(f"{name}, {estimate}", places, observed))
    return StudyResult(
        "Survival of drafts, predicted and observed",
        list(rows),
        lines,
        "predicted survival",
        "share of drafts that survived",
        notes=[
            "survival: the draft and all before it are accepted; bins by predicted survival",
            "tokens_n: tokens per cycle if 16 sequences divide n rows each by the estimate",
            *notes,
        ],
        narrow=("strategy", "estimate", "low", "predicted", "observed", "drafts"),
    )
