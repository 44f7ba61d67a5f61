"""Scenes in which each sentence compares a person with the previous one: ages, amounts."""

from dflash.data.generated.word_problems.scenes import (
    DOUBLE,
    GAIN,
    GROUPS,
    HALF,
    LOSE,
    SHARE,
    TRIPLE,
    Piece,
    Scene,
)

_AGES = Scene(
    "ages",
    openings=(
        Piece("some", "x 4..40", ("{name} is {x} years old.", "{name} is {x}.")),
        Piece(
            "later",
            "b 4..30; a 2..20",
            (
                "{name} was {b} years old {a} years ago.",
                "When {name} was {b} years old, {name} moved here, {a} years ago.",
            ),
            ("After {a} years, {name} is [b + a] years old.",),
        ),
    ),
    events=(
        Piece(
            "older",
            GAIN,
            ("{next} is {a} years older than {who}.", "{who} is {a} years younger than {next}."),
            ("{next} is {a} years older than {who}, which makes [x + a] years.",),
        ),
        Piece(
            "younger",
            LOSE,
            ("{next} is {a} years younger than {who}.", "{who} is {a} years older than {next}."),
            ("{next} is {a} years younger than {who}, which makes [x - a] years.",),
        ),
        Piece(
            "twice",
            DOUBLE,
            ("{next} is twice as old as {who}.", "{who} is half as old as {next}."),
            ("{next} is twice as old as {who}, which makes [x * 2] years.",),
        ),
        Piece(
            "thrice",
            TRIPLE,
            ("{next} is three times as old as {who}.",),
            ("{next} is three times as old as {who}, which makes [x * 3] years.",),
        ),
        Piece(
            "half",
            HALF,
            ("{next} is half as old as {who}.", "{who} is twice as old as {next}."),
            ("{next} is half as old as {who}, which makes [x / 2] years.",),
        ),
    ),
    endings=(
        Piece(
            "asked",
            "",
            ("How old is {who}?", "What is the age of {who}?"),
            ("So {who} is {x} years old.",),
        ),
        Piece(
            "future",
            GAIN,
            (
                "How old will {who} be {a} years later?",
                "What will be the age of {who} after {a} more years?",
            ),
            ("Another {a} years later, {who} will be [x + a] years old.",),
        ),
    ),
)

_FRIENDS = Scene(
    "friends",
    openings=(
        Piece("some", "x 5..50", ("{name} has {x} {things}.", "{name} counts {x} {things}.")),
        Piece(
            "packed",
            GROUPS,
            ("{name} has {k} {containers} of {m} {things} each.",),
            ("In {k} {containers} of {m} {things} each, {name} has [k * m] {things}.",),
        ),
    ),
    events=(
        Piece(
            "more",
            GAIN,
            ("{next} has {a} more than {who}.", "{who} has {a} {things} fewer than {next}."),
            ("{next} has {a} more than {who}, which makes [x + a] {things}.",),
        ),
        Piece(
            "fewer",
            LOSE,
            ("{next} has {a} fewer than {who}.", "{who} has {a} {things} more than {next}."),
            ("{next} has {a} fewer than {who}, which makes [x - a] {things}.",),
        ),
        Piece(
            "twice",
            DOUBLE,
            ("{next} has twice as many as {who}.", "{who} has half as many as {next}."),
            ("{next} has twice as many as {who}, which makes [x * 2] {things}.",),
        ),
        Piece(
            "thrice",
            TRIPLE,
            ("{next} has three times as many as {who}.",),
            ("{next} has three times as many as {who}, which makes [x * 3] {things}.",),
        ),
        Piece(
            "half",
            HALF,
            ("{next} has half as many as {who}.", "{who} has twice as many as {next}."),
            ("{next} has half as many as {who}, which makes [x / 2] {things}.",),
        ),
    ),
    endings=(
        Piece(
            "asked",
            "",
            ("How many {things} does {who} have?", "How many are those of {who}?"),
            ("So {who} has {x} {things}.",),
        ),
        Piece(
            "shared",
            SHARE,
            (
                "{who} divides them equally among {k} {containers}. How many are in each?",
                "{who} gives them to {k} children in equal shares. How many does each child get?",
            ),
            ("Divided equally by {k}, that makes [x / k] {things} for each.",),
        ),
    ),
)

SCENES = (_AGES, _FRIENDS)
