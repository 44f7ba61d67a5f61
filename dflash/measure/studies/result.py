"""The result of a study: a table, and the lines of its plot."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from dflash.measure import plots, results
from dflash.measure.roofline import Machine


@dataclasses.dataclass(frozen=True)
class StudyResult:
    """The answer to a study's question.

    Attributes:
      title: the question.
      rows: of the same keys each.
      lines: places and values of each line of the plot.
      x, y: what they are.
      dashed: lines that are computed, not measured.
      log: both axes logarithmic.
      notes: sentences to be shown with the figures.
    """

    title: str
    rows: Sequence[Mapping[str, Any]]
    lines: Mapping[str, tuple[Sequence[float], Sequence[float]]]
    x: str
    y: str
    dashed: Sequence[str] = ()
    log: bool = False
    notes: Sequence[str] = ()

    def text(self) -> list[str]:
        """The table and its notes, as lines."""
        if not self.rows:
            return [self.title, *self.notes]
        heads = list(self.rows[0])
        body = [[_shown(row[head]) for head in heads] for row in self.rows]
        return [self.title, "", *results.aligned([heads, *body]), "", *self.notes]

    def png(self, note: str = "") -> bytes:
        """The plot."""
        return plots.curves(
            self.lines,
            title=self.title,
            x=self.x,
            y=self.y,
            dashed=self.dashed,
            log=self.log,
            note=note,
        )


def machine_note(machine: Machine) -> str:
    """The peak rates that the roofline assumes."""
    return (
        f"roofline: {machine.name}, {machine.flops_per_s / 1e12:.3g} TFLOP/s and "
        f"{machine.bytes_per_s / 1e9:.4g} GB/s ({machine.source})"
    )


def _shown(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.3f}" if isinstance(value, float) else str(value)
