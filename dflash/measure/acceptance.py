"""Acceptance that is known before a run: published, or recorded by an earlier one."""

import dataclasses
import json
import pathlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from dflash import errors
from dflash.measure import published, workload
from dflash.storage import paths

# Share of cycles that committed 1, 2, … tokens, or their number, by task.
Histograms = Mapping[str, Sequence[float]]


@dataclasses.dataclass(frozen=True)
class Known:
    """Histograms of acceptance lengths by task, and whose they are.

    Attributes:
      histograms: by task.
      strategy: name of the strategy that they were recorded with; None where that is not said.
      source: where they are from.
      published: whether they are those that `published` holds.
    """

    histograms: Histograms
    strategy: str | None
    source: str
    published: bool = False


@dataclasses.dataclass(frozen=True)
class Shape:
    """What a strategy drafts.

    Attributes:
      drafter: name of its drafter.
      rows: that the target verifies of a sequence.
      tree: drafts of its trees; None for chains.
    """

    drafter: str
    rows: int
    tree: int | None = None


@dataclasses.dataclass(frozen=True)
class Expected:
    """What a strategy is expected to commit in a cycle.

    Attributes:
      tokens: τ by task, bonus included.
      source: where that is from and what it assumes.
      longest: tokens of the longest block that it was recorded with.
      published: whether it is of what is published.
    """

    tokens: Mapping[str, float]
    source: str
    longest: int
    published: bool


def expected(
    known: Sequence[Known], shapes: Mapping[str, Shape], drafter: str
) -> dict[str, Expected]:
    """What strategies are expected to commit; those of which nothing is known are left out.

    Args:
      known: of `read`.
      shapes: of the strategies, by name.
      drafter: name of the drafter that acceptance is of where no strategy is named.
    """
    found = {}
    for name, shape in shapes.items():
        for one in known:
            if one.strategy == name or (one.strategy is None and shape.drafter == drafter):
                what = _expected(one, shape, own=one.strategy == name)
                if what is not None:
                    found[name] = what
    return found


def _expected(known: Known, shape: Shape, *, own: bool) -> Expected | None:
    longest = max(map(len, known.histograms.values()))
    if shape.tree is None or own:
        rows = longest if shape.tree is not None else shape.rows
        if rows > longest and not own:
            return None
        tokens = {task: tau(shares, rows) for task, shares in known.histograms.items()}
        cut = f"; blocks of {longest} cut to {rows}, as if their first drafts were the same"
        source = known.source + (cut if rows < longest else "")
        return Expected(tokens, source, longest, known.published)
    gain = published.TREE_GAINS.get(shape.tree)
    if gain is None or not known.published:
        return None
    tokens = {task: gain * tau(shares, longest) for task, shares in known.histograms.items()}
    words = f"{gain:g} times τ of the chain of {longest} on every task: {published.TREE_ORIGIN}"
    return Expected(tokens, f"assumed: {words}", longest, published=True)


def tau(shares: Sequence[float], rows: int) -> float:
    """τ of a block cut to `rows` rows, as if its first drafts were those of the longer block.

    Args:
      shares: of cycles that committed 1, 2, … tokens, in any unit.
      rows: of the shorter block, anchor included.
    """
    lengths = (min(length, rows) * share for length, share in enumerate(shares, 1))
    return sum(lengths) / sum(shares)


def read(file: str | None) -> list[Known]:
    """Reads acceptance; None is what is published.

    Args:
      file: a trace, `results.json` of a benchmark, or `summary.json` of a decode run.
    Raises:
      InputError: it cannot be read, or is none of these.
    """
    if file is None:
        return [Known(published.HISTOGRAMS, None, f"published: {published.ORIGIN}", published=True)]
    content = _content(file)
    source = f"recorded: {file}"
    if isinstance(content, list):
        return [Known(_of_trace(file), None, source)]
    if isinstance(content, dict) and isinstance(content.get("cells"), list):
        return _of_benchmark(content["cells"], file, source)
    if isinstance(content, dict) and "acceptance_histogram" in content:
        shares = _shares(content["acceptance_histogram"], file)
        return [Known({pathlib.Path(file).parent.name or "run": shares}, None, source)]
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


def _of_trace(file: str) -> Histograms:
    found = {}
    for task, recordings in workload.read_trace(file).items():
        counts = Counter(length for one in recordings for length in one.lengths)
        found[task] = [counts[length] for length in range(1, max(counts) + 1)]
    return found


def _of_benchmark(cells: Sequence[Any], file: str, source: str) -> list[Known]:
    """One for each strategy that ran cycles."""
    found: dict[str, dict[str, Sequence[float]]] = {}
    try:
        for cell in cells:
            if cell["cycles"]:
                shares = _shares(cell["acceptance_histogram"], file)
                found.setdefault(cell["strategy"], {})[cell["task"]] = shares
    except (KeyError, TypeError) as error:
        raise errors.InputError(f"{file}: cells: not those of a benchmark: {error}") from error
    return [Known(histograms, strategy, source) for strategy, histograms in found.items()]


def _shares(histogram: Any, file: str) -> Sequence[float]:
    """A histogram by length, from "1", as a sequence."""
    try:
        counts = {int(length): float(count) for length, count in histogram.items()}
    except (AttributeError, TypeError, ValueError):
        counts = {}
    if not counts or min(counts) < 1 or max(counts) > 2**12 or sum(counts.values()) <= 0:
        raise errors.InputError(f"{file}: acceptance_histogram: expected cycles by length, from 1")
    return [counts.get(length, 0.0) for length in range(1, max(counts) + 1)]
