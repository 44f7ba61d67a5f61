"""Colors of plots: one color stands for one strategy in every plot."""

import dataclasses
import itertools
from collections.abc import Iterable

# Strategies with a color of their own, in the order of the palette; others take later colors.
_KNOWN = (
    *("dflash", "eagle3", "ngram", "autoregressive", "dflash2", "medusa", "lookahead", "dspark"),
    "dflare",
)
_PLAIN = "none"


@dataclasses.dataclass(frozen=True)
class Theme:
    """Colors of a plot.

    Attributes:
      ink: Color of text and axes, and of plain decoding.
      paper: Color of the background.
      warning: Color of notes.
      quiet: Color of marks that stand for no strategy.
      colors: Colors of bars and curves.
    """

    ink: str
    paper: str
    warning: str
    quiet: str
    colors: tuple[str, ...]


# Paul Tol's "bright" scheme, which color-blind readers can tell apart, and four of his "muted" one;
# lighter if the page is dark.
LIGHT = Theme(
    "#1c2430", "#ffffff", "#a03028", "#bbbbbb",
    ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377",
     "#44aa99", "#332288", "#999933", "#cc6677"),
)  # fmt: skip
DARK = Theme(
    "#e7eaee", "#14181d", "#ff9a8a", "#77808c",
    ("#77aadd", "#ff8899", "#55bb66", "#ddcc66", "#88ddff", "#dd77aa",
     "#77ccbb", "#9999ee", "#cccc66", "#eeaabb"),
)  # fmt: skip


def slots(names: Iterable[str]) -> dict[str, int]:
    """Returns the number of each strategy's color; beyond the palette, numbers go on.

    A known strategy always has the same number. Others are numbered after the known ones, in their
    order.
    """
    later = itertools.count(len(_KNOWN))
    return {
        name: _KNOWN.index(name) if name in _KNOWN else next(later)
        for name in dict.fromkeys(names)
        if name != _PLAIN
    }


def line_slots(names: Iterable[str]) -> dict[str, int]:
    """Returns the number of each line's color; lines that are no strategies begin at the first."""
    names = list(dict.fromkeys(names))
    if any(name in (*_KNOWN, _PLAIN) for name in names):
        return slots(names)
    return {name: number for number, name in enumerate(names)}


def color(theme: Theme, slot: int | None) -> str:
    """Returns the color of a number; None is plain decoding."""
    return theme.ink if slot is None else theme.colors[slot % len(theme.colors)]


def marker(theme: Theme, slot: int | None) -> str:
    """Returns the marker of a number, which tells strategies of the same color apart."""
    return "os^D"[(slot or 0) // len(theme.colors) % 4]


def shade(theme: Theme, start: str, amount: float) -> str:
    """Returns a color mixed with the paper's; `amount` 0 is the color itself, and 1 the paper."""
    mixed = (
        round(int(start[i : i + 2], 16) * (1 - amount) + int(theme.paper[i : i + 2], 16) * amount)
        for i in (1, 3, 5)
    )
    return "#" + "".join(f"{part:02x}" for part in mixed)
