"""Scenes about work that adds up day by day: reading, walking, baking, planting."""

from experiments.tiny_family.word_problems.scenes import (
    DOUBLE,
    FEWER,
    GAIN,
    GROUPS,
    GROUPS_GAINED,
    MORE,
    Scene,
    ScenePart,
)


def _effort(
    name: str, unit: str, did: str, does: str, place: str, openings: tuple[str, str]
) -> Scene:
    """Builds a scene about an amount of work that grows day by day, such as pages read."""
    return Scene(
        name,
        openings=(
            ScenePart(
                "some", "x 5..40", (f"On Monday, {{name}} {does} {{x}} {unit}.", openings[0])
            ),
            ScenePart(
                "days",
                GROUPS,
                (f"For {{k}} days, {{name}} {does} {{m}} {unit} a day.", openings[1]),
                (f"With {{k}} times {{m}} {unit}, {{name}} {did} [k * m] {unit}.",),
            ),
        ),
        events=_events(unit, did, does),
        endings=(
            ScenePart(
                "all",
                "",
                (f"How many {unit} is that in all?", f"How many {unit} are these together?"),
                (f"In all, {{name}} {did} {{x}} {unit}.",),
            ),
            ScenePart(
                "left",
                "a 2..30 if x + a < 101; t = x + a",
                (
                    f"{place} {{t}} {unit}. How many {unit} are still to come?",
                    f"The goal is {{t}} {unit}. How many {unit} are still missing?",
                ),
                (f"Of the {{t}} {unit}, there are still [t - x] {unit} left.",),
            ),
        ),
    )


def _events(unit: str, did: str, does: str) -> tuple[ScenePart, ...]:
    return (
        ScenePart(
            "gain",
            GAIN,
            (
                f"The next day, {{name}} {does} {{a}} {unit}.",
                f"Then {{name}} {does} {{a}} more {unit}.",
            ),
            (f"With {{a}} {unit} more, {{name}} {did} [x + a] {unit}.",),
        ),
        ScenePart(
            "again",
            DOUBLE,
            (
                f"After that, {{name}} {does} the same number of {unit} again.",
                f"Then {{name}} {does} as many {unit} as before once more.",
            ),
            (f"Twice as many {unit} are [x * 2] {unit}.",),
        ),
        ScenePart(
            "days",
            GROUPS_GAINED,
            (
                f"For {{k}} more days, {{name}} {does} {{m}} {unit} a day.",
                f"On each of the next {{k}} days, {{name}} {does} {{m}} {unit}.",
            ),
            (
                f"On {{k}} days of {{m}} {unit}, it was [y = k * m] {unit}.",
                f"Together with them, {{name}} {did} [x + y] {unit}.",
            ),
        ),
        ScenePart(
            "more",
            MORE,
            (
                f"In the next week, {{name}} {does} {{a}} {unit} more than so far.",
                f"Then {{name}} {does} {{a}} {unit} more than up to then.",
            ),
            (
                f"That was {{a}} {unit} more, which makes [y = x + a] {unit}.",
                f"Together with them, {{name}} {did} [x + y] {unit}.",
            ),
        ),
        ScenePart(
            "fewer",
            FEWER,
            (
                f"In the next week, {{name}} {does} {{a}} {unit} fewer than so far.",
                f"Then {{name}} {does} {{a}} {unit} fewer than up to then.",
            ),
            (
                f"That was {{a}} {unit} fewer, which makes [y = x - a] {unit}.",
                f"Together with them, {{name}} {did} [x + y] {unit}.",
            ),
        ),
    )


_READING = _effort(
    "reading",
    "pages",
    "has read",
    "reads",
    "The book has",
    (
        "{name} opens a new book and reads {x} pages.",
        "{name} begins a book and reads {m} pages a day for {k} days.",
    ),
)
_WALKING = _effort(
    "walking",
    "kilometres",
    "has walked",
    "walks",
    "The whole way is",
    (
        "{name} sets off on a long way and walks {x} kilometres.",
        "{name} goes on a hike and walks {m} kilometres a day for {k} days.",
    ),
)
_BAKING = _effort(
    "baking",
    "cookies",
    "has baked",
    "bakes",
    "The school needs",
    (
        "{name} bakes {x} cookies for a feast.",
        "{name} bakes {k} trays of {m} cookies for a feast.",
    ),
)
_PLANTING = _effort(
    "planting",
    "trees",
    "has planted",
    "plants",
    "The park has room for",
    (
        "{name} plants {x} trees in a park.",
        "{name} plants {k} rows of {m} trees in a park.",
    ),
)

SCENES = (_READING, _WALKING, _BAKING, _PLANTING)
