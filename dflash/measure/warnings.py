"""Warnings about figures that are not trustworthy.

All outputs show these warnings, and none draws conclusions from a figure with one.
"""

import dataclasses
from collections.abc import Iterable, Sequence

from dflash.measure.samples import MIN_GROUPS
from dflash.runs import processor_load, result_text

SPEEDUP, COST, EVERYTHING = "speedup", "cost", "everything"
KEY = "doubts"  # Key or column of the warnings in files.
MARK = result_text.MARK

MAX_SHARE_OF_IDEAL = 1.05
# A measured peak is as noisy as any other time, so a forward may seem slightly faster than it.
LEAST_OVER_ROOFLINE = 0.95
# Parts are timed apart from their cycle, so their sum may slightly exceed an equally long cycle.
MAX_PARTS_OVER_CYCLE = 1.01
LEAST_BUSY_SLOTS = 0.75


@dataclasses.dataclass(frozen=True)
class FigureWarning:
    """Warning that a figure is not trustworthy.

    Attributes:
      about: Figures that it concerns: `SPEEDUP`, `COST` (a cycle, its parts, the ideal) or
        `EVERYTHING`.
    """

    about: str
    words: str


def concern(warnings: Iterable[FigureWarning], about: str) -> bool:
    """Returns whether any of the warnings concerns these figures."""
    return any(warning.about in (about, EVERYTHING) for warning in warnings)


def of_cost(
    cycle_ms: float, parts_ms: Sequence[float], *, share_of_ideal: float | None = None
) -> tuple[FigureWarning, ...]:
    """Warns if the parts of a cycle, which were timed alone, contradict the cycle."""
    reasons, parts = [], sum(parts_ms)
    if parts > MAX_PARTS_OVER_CYCLE * cycle_ms:
        reasons.append(
            f"the parts of a cycle took {parts:.3g} ms, but the whole cycle only {cycle_ms:.3g} ms"
        )
    if share_of_ideal is not None and share_of_ideal > MAX_SHARE_OF_IDEAL:
        reasons.append(f"the speed-up is {100 * share_of_ideal:.0f} % of the ideal one")
    return tuple(FigureWarning(COST, words) for words in reasons)


def of_forward(
    what: str, measured_ms: float | None, roofline_ms: float | None
) -> tuple[FigureWarning, ...]:
    """Warns if a forward was faster than the machine's peak rates allow."""
    if not measured_ms or not roofline_ms or measured_ms >= LEAST_OVER_ROOFLINE * roofline_ms:
        return ()
    words = f"{what} took {measured_ms:.3g} ms, less than the {roofline_ms:.3g} ms of the roofline"
    return (FigureWarning(COST, words),)


def of_prompts(groups: int) -> tuple[FigureWarning, ...]:
    """Warns if a speed-up was measured on few conversations."""
    if groups >= MIN_GROUPS:
        return ()
    plural = "" if groups == 1 else "s"
    words = (
        f"{groups} prompt{plural} (or conversation{plural}): an interval needs {MIN_GROUPS} "
        "or more; raise prompts_per_task"
    )
    return (FigureWarning(SPEEDUP, words),)


def of_outputs(identical_share: float | None, *, exact: bool) -> tuple[FigureWarning, ...]:
    """Warns if a speed-up was measured with outputs other than the baseline's.

    Args:
      identical_share: Fraction of outputs that equal the baseline's; None if not compared.
      exact: Whether all outputs must equal the baseline's.
    """
    if not exact or identical_share is None or identical_share == 1:
        return ()
    words = (
        f"{100 * (1 - identical_share):.0f} % of the outputs differ from those of plain "
        "decoding; none may"
    )
    return (FigureWarning(SPEEDUP, words),)


def of_slots(busy: float | None, slots: int) -> tuple[FigureWarning, ...]:
    """Warns if a speed-up was measured with a queue too short to fill the slots."""
    if busy is None or busy >= LEAST_BUSY_SLOTS * slots:
        return ()
    words = f"{busy:.1f} of {slots} slots were in use on average; raise prompts_per_task"
    return (FigureWarning(SPEEDUP, words),)


def of_load(others_share: float | None) -> tuple[FigureWarning, ...]:
    """Warns if other processes used much of the processor during the measurement.

    Args:
      others_share: Fraction of all cores' time that other processes used; None if unknown.
    """
    words = processor_load.warning(others_share)
    return () if words is None else (FigureWarning(EVERYTHING, words),)
