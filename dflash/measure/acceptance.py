"""Expected acceptance lengths of a run, published or recorded by an earlier run."""

import dataclasses
import json
import pathlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from dflash import errors
from dflash.measure import published, workload
from dflash.measure.workload import Recording
from dflash.storage import paths

# By task: the number, or the fraction, of cycles that committed 1, 2, … tokens.
Histograms = Mapping[str, Sequence[float]]
# By task: the cycles of each prompt.
Recordings = Mapping[str, Sequence[Recording]]


@dataclasses.dataclass(frozen=True)
class KnownAcceptance:
    """Histograms of acceptance lengths by task, with their source.

    Attributes:
      strategy: Name of the recorded strategy; None if the source does not name it.
      published: Whether the histograms are those in the module `published`.
      recordings: Cycles of each task in their order, if the source has them; else empty.
    """

    histograms: Histograms
    strategy: str | None
    source: str
    published: bool = False
    recordings: Recordings = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class DraftShape:
    """Shape of a strategy's drafts.

    Attributes:
      rows: Rows per sequence that the target verifies.
      tree: Number of drafts per tree; None for chains.
    """

    drafter: str
    rows: int
    tree: int | None = None


@dataclasses.dataclass(frozen=True)
class ExpectedAcceptance:
    """Expected acceptance of a strategy.

    Attributes:
      tokens: Mean acceptance length (τ) by task, bonus included.
      histograms: Histograms by task that τ is computed from; empty if τ is assumed.
      source: Description of the source and of its assumptions.
      published: Whether the source is the module `published`.
    """

    tokens: Mapping[str, float]
    histograms: Histograms
    source: str
    longest: int
    published: bool
    recordings: Recordings = dataclasses.field(default_factory=dict)


def expected(
    known: Sequence[KnownAcceptance], shapes: Mapping[str, DraftShape], drafter: str
) -> dict[str, ExpectedAcceptance]:
    """Returns what strategies are expected to commit per cycle, by name.

    Strategies without a matching recording are left out.

    Args:
      known: Histograms, as from `read`.
      drafter: Drafter that histograms without a strategy name belong to.
    """
    expectations = {}
    for name, shape in shapes.items():
        for recording in known:
            if recording.strategy == name or (
                recording.strategy is None and shape.drafter == drafter
            ):
                expectation = _expected(recording, shape, own=recording.strategy == name)
                if expectation is not None:
                    expectations[name] = expectation
    return expectations


def _expected(known: KnownAcceptance, shape: DraftShape, *, own: bool) -> ExpectedAcceptance | None:
    longest = max(map(len, known.histograms.values()))
    if shape.tree is None or own:
        rows = longest if shape.tree is not None else shape.rows
        if rows > longest and not own:
            return None
        tokens = {task: tau(shares, rows) for task, shares in known.histograms.items()}
        cut = f"; blocks of {longest} cut to {rows}, as if their first drafts were the same"
        source = known.source + (cut if rows < longest else "")
        facts = longest, known.published, known.recordings
        return ExpectedAcceptance(tokens, known.histograms, source, *facts)
    gain = published.TREE_GAINS.get(shape.tree)
    if gain is None or not known.published:
        return None
    tokens = {task: gain * tau(shares, longest) for task, shares in known.histograms.items()}
    words = f"{gain:g} times τ of the chain of {longest} on every task: {published.TREE_ORIGIN}"
    return ExpectedAcceptance(tokens, {}, f"assumed: {words}", longest, published=True)


def tau(shares: Sequence[float], rows: int) -> float:
    """Returns the mean acceptance length (τ) of a block that is cut to `rows` rows.

    It assumes that the first drafts of the shorter block equal those of the longer one.

    Args:
      shares: Number or fraction of cycles that committed 1, 2, … tokens.
      rows: Rows of the shorter block, anchor included.
    """
    lengths = (min(length, rows) * share for length, share in enumerate(shares, 1))
    return sum(lengths) / sum(shares)


def read(file: str | None) -> list[KnownAcceptance]:
    """Reads acceptance lengths from a file; None returns the published ones.

    Args:
      file: Trace, `results.json` of a benchmark, or `summary.json` of a decode run.
    Raises:
      InputError: The file cannot be read, or has another format.
    """
    if file is None:
        return [
            KnownAcceptance(
                published.HISTOGRAMS, None, f"published: {published.ORIGIN}", published=True
            )
        ]
    content = _content(file)
    source = f"recorded: {file}"
    if isinstance(content, list):
        recordings = workload.read_trace(file)
        return [KnownAcceptance(_histograms(recordings), None, source, recordings=recordings)]
    if isinstance(content, dict) and isinstance(content.get("cells"), list):
        return _of_benchmark(content["cells"], file, source)
    if isinstance(content, dict) and "acceptance_histogram" in content:
        shares = _shares(content["acceptance_histogram"], file)
        return [KnownAcceptance({pathlib.Path(file).parent.name or "run": shares}, None, source)]
    raise errors.InputError(
        f"{file}: expected a trace, results.json of a benchmark, or summary.json of a decode run"
    )


def _content(file: str) -> Any:
    try:
        return json.loads(paths.to_path(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise errors.InputError(f"{file}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise errors.InputError(f"{file}: not JSON: {error}") from error


def _histograms(recordings: Recordings) -> Histograms:
    histograms = {}
    for task, prompts in recordings.items():
        counts = Counter(length for prompt in prompts for length in prompt.lengths)
        histograms[task] = [counts[length] for length in range(1, max(counts) + 1)]
    return histograms


def _of_benchmark(cells: Sequence[Any], file: str, source: str) -> list[KnownAcceptance]:
    recorded: dict[str, dict[str, Sequence[float]]] = {}
    try:
        for cell in cells:
            if cell["cycles"]:
                shares = _shares(cell["acceptance_histogram"], file)
                recorded.setdefault(cell["strategy"], {})[cell["task"]] = shares
    except (KeyError, TypeError) as error:
        raise errors.InputError(
            f"{file}: cells: not in the format of a benchmark: {error}"
        ) from error
    return [
        KnownAcceptance(histograms, strategy, source) for strategy, histograms in recorded.items()
    ]


def _shares(histogram: Any, file: str) -> Sequence[float]:
    """Converts a histogram with acceptance lengths as keys, from "1", to a sequence."""
    try:
        counts = {int(length): float(count) for length, count in histogram.items()}
    except (AttributeError, TypeError, ValueError):
        counts = {}
    if not counts or min(counts) < 1 or max(counts) > 2**12 or sum(counts.values()) <= 0:
        raise errors.InputError(
            f"{file}: acceptance_histogram: expected numbers of cycles by length, from 1"
        )
    return [counts.get(length, 0.0) for length in range(1, max(counts) + 1)]
