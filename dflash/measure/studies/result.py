"""The result of a study: a table, and the lines of its plot; and the steps that lead to it."""

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from dflash.measure import plots, table
from dflash.measure.plots import Line
from dflash.measure.roofline import Machine
from dflash.measure.warnings import MARK, Doubt

DOUBTS = "doubts"  # column of every row; None where there are none


@dataclasses.dataclass(frozen=True)
class StudyResult:
    """The answer to a study's question.

    Attributes:
      title: the question.
      rows: figures by column, the same columns each; `DOUBTS` is one of them.
      lines: of the plot.
      x, y: what its axes are.
      log: both axes logarithmic.
      even: height that neither wins nor loses, such as a speed-up of 1; None: there is none.
      notes: sentences to be shown with the figures.
      narrow: columns that fit on a terminal; none: all.
    """

    title: str
    rows: Sequence[Mapping[str, Any]]
    lines: Sequence[Line]
    x: str
    y: str
    log: bool = False
    even: float | None = None
    notes: Sequence[str] = ()
    narrow: Sequence[str] = ()

    def text(self, *, wide: bool = False) -> list[str]:
        """The table, its doubts and its notes, as lines; all columns if `wide`."""
        if not self.rows:
            return [self.title, *table.wrapped(self.notes)]
        every = [head for head in self.rows[0] if head != DOUBTS]
        heads = every if wide or not self.narrow else list(self.narrow)
        body = [
            [*(_shown(row[head]) for head in heads), MARK if row[DOUBTS] else ""]
            for row in self.rows
        ]
        lines = table.aligned([[*heads, ""], *body])
        return [self.title, "", *lines, "", *table.wrapped([*self._doubts(), *self.notes])]

    def png(self, note: str = "") -> bytes:
        """The plot."""
        return plots.curves(
            self.lines,
            title=self.title,
            x=self.x,
            y=self.y,
            log=self.log,
            even=self.even,
            note=note,
        )

    def _doubts(self) -> list[str]:
        """A sentence for each row that is in doubt."""
        found = []
        for row in self.rows:
            if row[DOUBTS]:
                first, second = list(row.items())[:2]
                where = ", ".join(f"{key} {_shown(value)}" for key, value in (first, second))
                found.append(f"not trustworthy ({MARK}), {where}: {row[DOUBTS]}")
        return found


@dataclasses.dataclass(frozen=True)
class Step:
    """A moment of a study.

    Attributes:
      what: the study does next.
      done: share of it that is behind.
      result: what there is by now; None: nothing new.
    """

    what: str
    done: float
    result: StudyResult | None = None

    def within(self, begin: float, size: float) -> "Step":
        """The step as part of something longer: the share from `begin` that is `size` long."""
        return dataclasses.replace(self, done=begin + size * self.done)


def in_turns(
    calls: Mapping[Hashable, Callable[[], Any]],
    repeats: int,
    names: Callable[[Any], str],
    result: Callable[[Mapping[Any, list]], StudyResult],
) -> Iterator[Step]:
    """Makes calls in turns, so that a machine that slows down slows all of them alike.

    Args:
      calls: by key; each returns what it has measured.
      repeats: turns that count, after one that compiles and does not.
      names: a key in words.
      result: makes the result of what the calls have returned so far, by key.
    Yields:
      a step before each call, and one with a result after each turn.
    """
    found: dict[Hashable, list] = {key: [] for key in calls}
    total, done = (1 + repeats) * len(calls), 0
    for turn in range(1 + repeats):
        which = f"turn {turn} of {repeats}" if turn else "warming up"
        for key, call in calls.items():
            yield Step(f"{which}, {names(key)}", done / total)
            taken = call()
            done += 1
            if turn:
                found[key].append(taken)
        if turn:
            yield Step(f"{which} is over", done / total, result(found))


def doubted(row: Mapping[str, Any], doubts: Iterable[Doubt]) -> dict[str, Any]:
    """A row with its doubts."""
    return {**row, DOUBTS: "; ".join(dict.fromkeys(one.words for one in doubts)) or None}


def machine_note(machine: Machine) -> str:
    """The peak rates that the roofline assumes."""
    rates = f"{machine.bytes_per_s / 1e9:.4g} GB/s"
    if machine.cached_rates:
        size, rate = machine.cached_rates[0]
        rates += f" (up to {rate / 1e9:.4g} GB/s within {size / 2**20:.0f} MiB)"
    return (
        f"roofline: {machine.name}, {machine.flops_per_s / 1e12:.3g} TFLOP/s and {rates}; "
        f"{machine.source}"
    )


def _shown(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.3f}" if isinstance(value, float) else str(value)
