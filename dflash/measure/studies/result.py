"""Results of studies, as tables and plots, and the steps that lead to them."""

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from dflash.measure import plots, table
from dflash.measure.plots import Line
from dflash.measure.roofline import Machine
from dflash.measure.warnings import KEY, MARK, FigureWarning


@dataclasses.dataclass(frozen=True)
class StudyResult:
    """Answer to a study's question.

    Attributes:
      rows: Figures by column; all rows have the same columns, `warnings.KEY` among them.
      even: Height of no gain and no loss, such as a speed-up of 1; None if there is none.
      narrow: Columns for a narrow terminal; empty selects all.
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
        """Returns the table, its warnings and its notes as lines; all columns if `wide`."""
        if not self.rows:
            return [self.title, *table.wrapped(self.notes)]
        every = [head for head in self.rows[0] if head != KEY]
        heads = every if wide or not self.narrow else list(self.narrow)
        body = [
            [*(_shown(row[head]) for head in heads), MARK if row[KEY] else ""] for row in self.rows
        ]
        lines = table.aligned([[*heads, ""], *body])
        return [self.title, "", *lines, "", *table.wrapped([*self._warnings(), *self.notes])]

    def png(self, note: str = "") -> bytes:
        """Returns the plot as a PNG file."""
        return plots.curves(
            self.lines,
            title=self.title,
            x=self.x,
            y=self.y,
            log=self.log,
            even=self.even,
            note=note,
        )

    def _warnings(self) -> list[str]:
        """Returns a sentence for each row with a warning."""
        sentences = []
        for row in self.rows:
            if row[KEY]:
                first, second = list(row.items())[:2]
                where = ", ".join(f"{key} {_shown(value)}" for key, value in (first, second))
                sentences.append(f"not trustworthy ({MARK}), {where}: {row[KEY]}")
        return sentences


@dataclasses.dataclass(frozen=True)
class Step:
    """Progress of a study.

    Attributes:
      what: Description of what the study does next.
      result: Result so far; None if it has not changed.
    """

    what: str
    done: float
    result: StudyResult | None = None

    def within(self, begin: float, size: float) -> "Step":
        """Returns the step as part of a whole, of which it covers `size` from `begin` on."""
        return dataclasses.replace(self, done=begin + size * self.done)


def in_turns(
    calls: Mapping[Hashable, Callable[[], Any]],
    repeats: int,
    names: Callable[[Any], str],
    result: Callable[[Mapping[Any, list]], StudyResult],
) -> Iterator[Step]:
    """Calls functions in turns, so that drift of the machine affects all of them alike.

    Args:
      calls: Functions by key; each returns a measurement.
      repeats: Number of turns that count, after one that compiles.
      names: Maps a key to its description.
      result: Makes the result from the measurements so far, by key.
    Yields:
      A step before each call, and a step with a result after each turn.
    """
    measured: dict[Hashable, list] = {key: [] for key in calls}
    total, done = (1 + repeats) * len(calls), 0
    for turn in range(1 + repeats):
        which = f"turn {turn} of {repeats}" if turn else "warming up"
        for key, call in calls.items():
            yield Step(f"{which}, {names(key)}", done / total)
            taken = call()
            done += 1
            if turn:
                measured[key].append(taken)
        if turn:
            yield Step(f"{which}, done", done / total, result(measured))


def with_warnings(row: Mapping[str, Any], warnings: Iterable[FigureWarning]) -> dict[str, Any]:
    """Returns a row with the column `warnings.KEY` added; its value is None without warnings."""
    return {**row, KEY: "; ".join(dict.fromkeys(warning.words for warning in warnings)) or None}


def machine_note(machine: Machine) -> str:
    """Describes the peak rates that the roofline assumes."""
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
