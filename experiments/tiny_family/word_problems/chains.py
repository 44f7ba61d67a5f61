"""Scenes in which each sentence compares a person with the previous one: ages, amounts."""

from experiments.tiny_family.word_problems.scenes import (
    DOUBLE,
    GAIN,
    GROUPS,
    HALF,
    LOSE,
    SHARE,
    TRIPLE,
    Scene,
    ScenePart,
)

_AGES = Scene(
    "ages",
    openings=(
        ScenePart("some", "x 4..40", ("{name} is {x} years old.", "{name} is {x}.")),
        ScenePart(
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
        ScenePart(
            "older",
            GAIN,
            ("{next} is {a} years older than {who}.", "{who} is {a} years younger than {next}."),
            ("{next} is {a} years older than {who}, which makes [x + a] years.",),
        ),
        ScenePart(
            "younger",
            LOSE,
            ("{next} is {a} years younger than {who}.", "{who} is {a} years older than {next}."),
            ("{next} is {a} years younger than {who}, which makes [x - a] years.",),
        ),
        ScenePart(
            "twice",
            DOUBLE,
            ("{next} is twice as old as {who}.", "{who} is half as old as {next}."),
            ("{next} is twice as old as {who}, which makes [x * 2] years.",),
        ),
        ScenePart(
            "thrice",
            TRIPLE,
            ("{next} is three times as old as {who}.",),
            ("{next} is three times as old as {who}, which makes [x * 3] years.",),
        ),
        ScenePart(
            "half",
            HALF,
            ("{next} is half as old as {who}.", "{who} is twice as old as {next}."),
            ("{next} is half as old as {who}, which makes [x / 2] years.",),
        ),
    ),
    endings=(
        ScenePart(
            "asked",
            "",
            ("How old is {who}?", "What is the age of {who}?"),
            ("So {who} is {x} years old.",),
        ),
        ScenePart(
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
        ScenePart("some", "x 5..50", ("{name} has {x} {things}.", "{name} counts {x} {things}.")),
        ScenePart(
            "packed",
            GROUPS,
            ("{name} has {k} {containers} of {m} {things} each.",),
            ("In {k} {containers} of {m} {things} each, {name} has [k * m] {things}.",),
        ),
    ),
    events=(
        ScenePart(
            "more",
            GAIN,
            ("{next} has {a} more than {who}.", "{who} has {a} {things} fewer than {next}."),
            ("{next} has {a} more than {who}, which makes [x + a] {things}.",),
        ),
        ScenePart(
            "fewer",
            LOSE,
            ("{next} has {a} fewer than {who}.", "{who} has {a} {things} more than {next}."),
            ("{next} has {a} fewer than {who}, which makes [x - a] {things}.",),
        ),
        ScenePart(
            "twice",
            DOUBLE,
            ("{next} has twice as many as {who}.", "{who} has half as many as {next}."),
            ("{next} has twice as many as {who}, which makes [x * 2] {things}.",),
        ),
        ScenePart(
            "thrice",
            TRIPLE,
            ("{next} has three times as many as {who}.",),
            ("{next} has three times as many as {who}, which makes [x * 3] {things}.",),
        ),
        ScenePart(
            "half",
            HALF,
            ("{next} has half as many as {who}.", "{who} has twice as many as {next}."),
            ("{next} has half as many as {who}, which makes [x / 2] {things}.",),
        ),
    ),
    endings=(
        ScenePart(
            "asked",
            "",
            ("How many {things} does {who} have?", "How many are those of {who}?"),
            ("So {who} has {x} {things}.",),
        ),
        ScenePart(
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
