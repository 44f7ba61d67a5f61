"""Study of what limits trees: acceptance beside that of drafters that know the right candidate."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from dflash.config.benchmark_schema import BenchmarkRun
from dflash.inference import replay
from dflash.inference.replay import Cycles, Text
from dflash.loading.job import Job
from dflash.measure.plots import Line
from dflash.measure.studies import decoded as replayed
from dflash.measure.studies.result import Step, StudyResult, with_warnings
from experiments.acceptance.foresight import Foreseeing

COUNTS = (2, 3, 4, 16)
ALL_CANDIDATES = 2**30
_ALL, _WHOLE = "tau_all", "tau_whole"


def trees(config: BenchmarkRun, counts: Sequence[int] = COUNTS) -> Iterator[Step]:
    """Compares acceptance with that of drafts which foresee the right one of some candidates.

    The baseline decodes the prompts, and each strategy's cycles are replayed on these texts.
    """
    plain, drafting = replayed.prepare(config, "trees")
    answers = yield from replayed.decode(plain)
    rows: list[dict] = []
    for number, (name, job) in enumerate(drafting.items()):
        yield Step(f"replaying {name}", (1 + number / len(drafting)) / 2)
        job.load_drafter()
        rows += _rows(name, job, *answers, counts)
        done = (1 + (number + 1) / len(drafting)) / 2
        yield Step(f"{name}, done", done, _result(rows, counts))


def _rows(
    name: str, job: Job, texts: Sequence[Text], tasks: Sequence[str], counts: Sequence[int]
) -> list[dict]:
    """Returns a row for each task of a strategy."""
    models, everything = (job.drafter, job.target), Foreseeing(ALL_CANDIDATES)
    features = replay.compute(job.target, texts, job.drafter.feature_layers)
    own = replay.cycles(*models, features)
    known = {**{_column(count): count for count in counts}, _ALL: ALL_CANDIDATES}
    foreseen = {
        column: replay.cycles(*models, features, make_sampler=Foreseeing(count))
        for column, count in known.items()
    }
    best = replay.cycles(*models, features, everywhere=True, make_sampler=everything)
    longest = job.drafter.longest_path
    rows = []
    for task in dict.fromkeys(tasks):
        mine = [i for i, one in enumerate(tasks) if one == task]
        row = {
            "strategy": name,
            "task": task,
            "cycles": int((own.committed[mine] > 0).sum()),
            "tau": tau(own.committed[mine]),
            **{column: tau(cycles.committed[mine]) for column, cycles in foreseen.items()},
            _WHOLE: tau(whole_blocks([len(texts[i].answer) - 1 for i in mine], longest)),
            **rejections(own, best, longest, mine),
        }
        rows.append(with_warnings(row, ()))
    return rows


def tau(committed: np.ndarray) -> float:
    """Returns the mean acceptance length of cycles; 0 means that there was none."""
    return float(committed.sum() / max(1, (committed > 0).sum()))


def whole_blocks(lengths: Sequence[int], longest: int) -> np.ndarray:
    """Returns what cycles commit if all drafts are accepted, int [texts, cycles].

    Args:
      lengths: Tokens of each answer after the first one.
      longest: Most tokens that a cycle commits.
    """
    starts = np.arange(0, max(lengths, default=0), longest)
    return np.clip(np.array(lengths)[:, None] - starts, 0, longest)


def rejections(own: Cycles, best: Cycles, longest: int, which: Sequence[int]) -> dict[str, float]:
    """Returns why blocks were not accepted further, as shares of all cycles.

    Args:
      own: Cycles of a strategy.
      best: Cycles from every token on, if the right one of all candidates is drafted first.
      longest: Most tokens that a cycle commits.
      which: Texts that count.
    Returns:
      "missing", where the next token was no candidate, and "undrafted", where it was one.
    """
    used = own.committed[which] > 0
    committed, left = own.committed[which][used], own.remaining[which][used]
    rows = np.broadcast_to(np.array(which)[:, None], used.shape)[used]
    reachable = best.committed[rows, own.anchors[which][used]]
    undrafted = committed < reachable
    missing = ~undrafted & (committed < np.minimum(left, longest))
    return {"missing": float(missing.mean()), "undrafted": float(undrafted.mean())}


def _column(count: int) -> str:
    return f"tau_{count}"


def _result(rows: Sequence[Mapping], counts: Sequence[int]) -> StudyResult:
    columns = ["tau", *map(_column, counts), _ALL, _WHOLE]
    names = list(dict.fromkeys(row["strategy"] for row in rows))
    by_name = {name: [row for row in rows if row["strategy"] == name] for name in names}
    chain = [row["tau"] for row in by_name[names[0]]]
    lines, notes = [], []
    for name, own in by_name.items():
        means = {
            column: float(np.mean([row[column] / tau for row, tau in zip(own, chain, strict=True)]))
            for column in columns
        }
        lines.append(Line(name, (1, *counts), [means[column] for column in columns[:-2]]))
        words = ", ".join(f"{column} {mean:.3f}" for column, mean in means.items())
        notes.append(f"{name}: {words} times the τ of {names[0]}, mean over the tasks")
    return StudyResult(
        "What limits trees: mean acceptance length (τ)",
        list(rows),
        lines,
        "candidates of which the right one is known",
        f"τ over that of {names[0]}",
        even=1.0,
        notes=[
            "tau_n: a draft is the right token wherever that is among the n likeliest candidates, "
            "as in a tree of unlimited size; tau_all: among all candidates",
            "tau_whole: all drafts are accepted",
            "missing: share of cycles that end where the right token is no candidate; undrafted: "
            "where it is one",
            *notes,
        ],
    )
