"""Scenes about the contents of places: a bus, a tank, a shop."""

from experiments.tiny_family.word_problems.scenes import (
    DOUBLE,
    GAIN,
    GROUPS,
    GROUPS_GAINED,
    GROUPS_LOST,
    HALF,
    LOSE,
    PRICE,
    SHARE,
    TRIPLE,
    Scene,
    ScenePart,
)

_BUS = Scene(
    "bus",
    openings=(
        ScenePart(
            "some",
            "x 5..60",
            (
                "A bus leaves the {place} with {x} people on board.",
                "There are {x} people on a train.",
                "A ship carries {x} passengers.",
            ),
        ),
        ScenePart(
            "rows",
            GROUPS,
            (
                "On a bus, {k} rows of {m} seats each are taken.",
                "A train has {k} carriages with {m} people in each.",
            ),
            ("In {k} groups of {m}, there are [k * m] people on board.",),
        ),
    ),
    events=(
        ScenePart(
            "gain",
            GAIN,
            ("At a stop, {a} people get on.", "Then {a} more people come on board."),
            ("When {a} people get on, there are [x + a] people on board.",),
        ),
        ScenePart(
            "lose",
            LOSE,
            ("At a stop, {a} people get off.", "Then {a} people leave."),
            ("When {a} people get off, there are [x - a] people on board.",),
        ),
        ScenePart(
            "half",
            HALF,
            ("At the {place}, half of the people get off.", "Half of the people leave."),
            ("Half of the people are [x / 2] people, and as many stay on board.",),
        ),
        ScenePart(
            "double",
            DOUBLE,
            ("At the market, the number of people doubles.", "Then it has twice as many people."),
            ("Twice as many people are [x * 2] people on board.",),
        ),
        ScenePart(
            "families",
            GROUPS_GAINED,
            (
                "Then {k} families of {m} people each get on.",
                "At a stop, {k} groups of {m} people come on board.",
            ),
            (
                "The {k} groups of {m} people each are [y = k * m] people.",
                "When they get on, there are [x + y] people on board.",
            ),
        ),
        ScenePart(
            "classes",
            GROUPS_LOST,
            (
                "Then {k} groups of {m} people each get off.",
                "At the zoo, {k} families of {m} people leave.",
            ),
            (
                "The {k} groups of {m} people each are [y = k * m] people.",
                "When they get off, there are [x - y] people on board.",
            ),
        ),
    ),
    endings=(
        ScenePart(
            "now",
            "",
            (
                "How many people are on board now?",
                "How many people are on board in the end?",
            ),
            ("In the end, there are {x} people on board.",),
        ),
        ScenePart(
            "fares",
            PRICE,
            (
                "Each of them pays ${p}. How many dollars do they pay together?",
                "A ride costs ${p}. How many dollars do all of them pay?",
            ),
            ("At ${p} for each, all of them pay [x * p] dollars.",),
        ),
        ScenePart(
            "cars",
            SHARE,
            (
                "They go on in {k} taxis, the same number in each. How many are in a taxi?",
                "They form {k} groups of equal size. How many people are in each?",
            ),
            ("Divided equally by {k}, that makes [x / k] people for each.",),
        ),
    ),
)

_TANK = Scene(
    "tank",
    openings=(
        ScenePart(
            "some",
            "x 5..60",
            (
                "A tank holds {x} litres of water.",
                "There are {x} litres of water in a pool.",
                "{name} has {x} litres of juice in a barrel.",
            ),
        ),
        ScenePart(
            "filled",
            GROUPS,
            (
                "A pump runs for {k} minutes and fills {m} litres a minute into an empty tank.",
                "{name} pours {k} buckets of {m} litres each into an empty barrel.",
            ),
            ("From {k} times {m} litres, it holds [k * m] litres.",),
        ),
    ),
    events=(
        ScenePart(
            "gain",
            GAIN,
            ("{name} adds {a} litres.", "Rain adds {a} litres.", "Then {a} litres flow in."),
            ("After {a} litres more, it holds [x + a] litres.",),
        ),
        ScenePart(
            "lose",
            LOSE,
            ("{name} takes out {a} litres.", "Then {a} litres leak out.", "{a} litres are used."),
            ("After {a} litres less, it holds [x - a] litres.",),
        ),
        ScenePart(
            "half",
            HALF,
            ("Half of it is used.", "Then half of it flows out."),
            ("Half of it is [x / 2] litres, and as much is left.",),
        ),
        ScenePart(
            "double",
            DOUBLE,
            ("{name} doubles the amount.", "Then the amount is doubled."),
            ("Twice as much is [x * 2] litres.",),
        ),
        ScenePart(
            "poured",
            GROUPS_GAINED,
            (
                "{name} pours in {k} buckets of {m} litres each.",
                "For {k} minutes, {m} litres a minute flow in.",
            ),
            (
                "The {k} times {m} litres are [y = k * m] litres.",
                "With these, it holds [x + y] litres.",
            ),
        ),
        ScenePart(
            "drained",
            GROUPS_LOST,
            (
                "{name} fills {k} cans with {m} litres each from it.",
                "For {k} minutes, {m} litres a minute flow out.",
            ),
            (
                "The {k} times {m} litres are [y = k * m] litres.",
                "Without these, it holds [x - y] litres.",
            ),
        ),
    ),
    endings=(
        ScenePart(
            "now",
            "",
            ("How many litres are in it now?", "How many litres does it hold in the end?"),
            ("In the end, it holds {x} litres.",),
        ),
        ScenePart(
            "bottled",
            SHARE,
            (
                "All of it is filled into bottles of {k} litres. How many bottles is that?",
                "It is divided equally among {k} cans. How many litres are in each?",
            ),
            ("Divided equally by {k}, that makes [x / k] for each.",),
        ),
    ),
)

_SHOP = Scene(
    "shop",
    openings=(
        ScenePart(
            "some",
            "x 5..60",
            ("A {place} has {x} {things}.", "There are {x} {things} on a shelf of the {place}."),
        ),
        ScenePart(
            "shelves",
            GROUPS,
            (
                "A {place} has {k} shelves with {m} {things} on each.",
                "In a {place}, there are {k} rows of {m} {things}.",
            ),
            ("In {k} rows of {m} {things}, the {place} has [k * m] {things}.",),
        ),
    ),
    events=(
        ScenePart(
            "gain",
            GAIN,
            ("Then {a} more {things} arrive.", "{name} brings {a} {things}."),
            ("When {a} {things} arrive, the {place} has [x + a] {things}.",),
        ),
        ScenePart(
            "lose",
            LOSE,
            ("Then {a} {things} are sold.", "{name} takes {a} {things} away.", "{a} get broken."),
            ("When {a} {things} are gone, the {place} has [x - a] {things}.",),
        ),
        ScenePart(
            "triple",
            TRIPLE,
            ("The {place} triples its stock.", "Then the number of {things} triples."),
            ("Three times as many {things} are [x * 3] {things}.",),
        ),
        ScenePart(
            "half",
            HALF,
            ("Half of the {things} are sold.", "{name} takes half of the {things}."),
            ("Half of the {things} are [x / 2] {things}, and as many are left.",),
        ),
        ScenePart(
            "delivery",
            GROUPS_GAINED,
            (
                "A van delivers {k} {containers} with {m} {things} each.",
                "Then {k} {containers} of {m} {things} arrive.",
            ),
            (
                "The {k} {containers} of {m} {things} hold [y = k * m] {things}.",
                "Together with them, the {place} has [x + y] {things}.",
            ),
        ),
        ScenePart(
            "orders",
            GROUPS_LOST,
            (
                "Then {k} customers buy {m} {things} each.",
                "The {place} sends {k} {containers} with {m} {things} each to {name}.",
            ),
            (
                "The {k} times {m} {things} take [y = k * m] {things}.",
                "Without them, the {place} has [x - y] {things}.",
            ),
        ),
    ),
    endings=(
        ScenePart(
            "now",
            "",
            (
                "How many {things} does the {place} have now?",
                "How many {things} are left in the end?",
            ),
            ("In the end, the {place} has {x} {things}.",),
        ),
        ScenePart(
            "sold",
            PRICE,
            (
                "All of them are sold for ${p} each. How many dollars does that bring?",
                "One costs ${p}. How many dollars do all of them cost?",
            ),
            ("At ${p} each, all of them are worth [x * p] dollars.",),
        ),
        ScenePart(
            "shelved",
            SHARE,
            (
                "They are put on {k} shelves, as many on each. How many are on a shelf?",
                "{name} divides them equally among {k} {containers}. How many are in each?",
            ),
            ("Divided equally by {k}, that makes [x / k] {things} for each.",),
        ),
    ),
)

SCENES = (_BUS, _TANK, _SHOP)
