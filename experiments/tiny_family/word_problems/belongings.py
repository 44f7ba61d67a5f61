"""Scenes about belongings of people: things, money, points."""

from experiments.tiny_family.word_problems.scenes import (
    DOUBLE,
    FEWER,
    GAIN,
    GROUPS,
    GROUPS_GAINED,
    GROUPS_LOST,
    HALF,
    LOSE,
    MORE,
    PRICE,
    SHARE,
    TRIPLE,
    Scene,
    ScenePart,
)

_COLLECTION = Scene(
    "collection",
    openings=(
        ScenePart(
            "some",
            "x 5..60",
            (
                "{name} has {x} {things}.",
                "{name} collects {things} and has {x} of them.",
                "There are {x} {things} in {name}'s room.",
            ),
        ),
        ScenePart(
            "packed",
            GROUPS,
            (
                "{name} has {k} {containers} with {m} {things} each.",
                "{name} owns {k} {containers} of {things}, {m} in each.",
            ),
            ("In {k} {containers} of {m} {things} each, {name} has [k * m] {things}.",),
        ),
    ),
    events=(
        ScenePart(
            "gain",
            GAIN,
            (
                "{name} buys {a} more {things}.",
                "{next} gives {name} {a} {things}.",
                "Then {name} finds {a} more {things}.",
                "For a birthday, {name} gets {a} new {things}.",
            ),
            ("With {a} more {things}, {name} has [x + a] {things}.",),
        ),
        ScenePart(
            "lose",
            LOSE,
            (
                "{name} gives {a} {things} to {next}.",
                "Then {name} loses {a} {things}.",
                "{name} sells {a} of the {things}.",
                "{a} of the {things} break.",
            ),
            ("Without {a} of them, {name} has [x - a] {things} left.",),
        ),
        ScenePart(
            "double",
            DOUBLE,
            (
                "Then the number of {things} doubles.",
                "{name} doubles the number of {things}.",
                "A year later, {name} has twice as many {things}.",
            ),
            ("Twice as many {things} are [x * 2] {things}.",),
        ),
        ScenePart(
            "triple",
            TRIPLE,
            (
                "Then the number of {things} triples.",
                "{name} triples the number of {things}.",
                "A year later, {name} has three times as many {things}.",
            ),
            ("Three times as many {things} are [x * 3] {things}.",),
        ),
        ScenePart(
            "half",
            HALF,
            (
                "{name} gives half of the {things} to {next}.",
                "Half of the {things} get lost.",
                "{name} sells half of the {things}.",
            ),
            ("Half of the {things} are [x / 2] {things}, and as many are left.",),
        ),
        ScenePart(
            "packs_gained",
            GROUPS_GAINED,
            (
                "{name} buys {k} {containers} with {m} {things} each.",
                "{next} brings {k} {containers} of {m} {things} for {name}.",
            ),
            (
                "The {k} {containers} of {m} {things} hold [y = k * m] {things}.",
                "Together with them, {name} has [x + y] {things}.",
            ),
        ),
        ScenePart(
            "packs_lost",
            GROUPS_LOST,
            (
                "{name} packs {k} {containers} with {m} {things} each and gives them away.",
                "{name} sells {k} {containers} with {m} {things} in each.",
            ),
            (
                "The {k} {containers} of {m} {things} take [y = k * m] {things}.",
                "Without them, {name} has [x - y] {things} left.",
            ),
        ),
        ScenePart(
            "more",
            MORE,
            (
                "{next} has {a} {things} more than {name} and gives them all to {name}.",
                "{next}, who has {a} more than {name}, gives all of them to {name}.",
            ),
            (
                "{next} has {a} more than {name}, which makes [y = x + a] {things}.",
                "With all of these, {name} has [x + y] {things}.",
            ),
        ),
        ScenePart(
            "fewer",
            FEWER,
            (
                "{next} has {a} {things} fewer than {name} and gives them all to {name}.",
                "{next}, who has {a} fewer than {name}, gives all of them to {name}.",
            ),
            (
                "{next} has {a} fewer than {name}, which makes [y = x - a] {things}.",
                "With all of these, {name} has [x + y] {things}.",
            ),
        ),
    ),
    endings=(
        ScenePart(
            "now",
            "",
            (
                "How many {things} does {name} have now?",
                "How many {things} does {name} have in the end?",
                "How many {things} are there now?",
            ),
            ("In the end, {name} has {x} {things}.",),
        ),
        ScenePart(
            "shared",
            SHARE,
            (
                "{name} shares all of them equally among {k} friends. How many does each get?",
                "If {k} children share the {things} equally, how many does each child get?",
                "{name} divides them equally among {k} {containers}. How many are in each?",
            ),
            ("Divided equally by {k}, that makes [x / k] {things} for each.",),
        ),
        ScenePart(
            "sold",
            PRICE,
            (
                "{name} sells all of them for ${p} each. How many dollars is that?",
                "Each one is worth ${p}. How many dollars are all of them worth?",
            ),
            ("At ${p} each, all of them are worth [x * p] dollars.",),
        ),
    ),
)

_MONEY = Scene(
    "money",
    openings=(
        ScenePart(
            "some",
            "x 5..80",
            (
                "{name} has ${x}.",
                "There are ${x} in {name}'s purse.",
                "{name} begins the week with ${x}.",
            ),
        ),
        ScenePart(
            "earned",
            GROUPS,
            (
                "{name} works for {k} hours and earns ${m} an hour.",
                "{name} saves ${m} a week for {k} weeks.",
                "{name} sells {k} {things} for ${m} each.",
            ),
            ("With {k} times ${m}, {name} has [k * m] dollars.",),
        ),
    ),
    events=(
        ScenePart(
            "gain",
            GAIN,
            (
                "{next} gives {name} ${a}.",
                "{name} earns ${a}.",
                "Then {name} finds ${a} in a drawer.",
            ),
            ("With ${a} more, {name} has [x + a] dollars.",),
        ),
        ScenePart(
            "lose",
            LOSE,
            (
                "{name} spends ${a} on {things}.",
                "{name} lends ${a} to {next}.",
                "{name} pays ${a} at the {place}.",
            ),
            ("After paying ${a}, {name} has [x - a] dollars left.",),
        ),
        ScenePart(
            "double",
            DOUBLE,
            ("{next} doubles the money.", "Then {name} doubles that money."),
            ("Twice as much money is [x * 2] dollars.",),
        ),
        ScenePart(
            "half",
            HALF,
            (
                "{name} spends half of the money.",
                "{name} gives half of the money to {next}.",
            ),
            ("Half of the money is [x / 2] dollars, and as much is left.",),
        ),
        ScenePart(
            "buy",
            GROUPS_LOST,
            (
                "{name} buys {k} {things} at ${m} each.",
                "Then {name} pays for {k} {items} that cost ${m} each.",
            ),
            (
                "For {k} at ${m} each, {name} pays [y = k * m] dollars.",
                "After that, {name} has [x - y] dollars left.",
            ),
        ),
        ScenePart(
            "sell",
            GROUPS_GAINED,
            (
                "{name} sells {k} {things} for ${m} each.",
                "Then {name} works {k} hours for ${m} an hour.",
            ),
            (
                "From {k} times ${m}, {name} gets [y = k * m] dollars.",
                "After that, {name} has [x + y] dollars.",
            ),
        ),
    ),
    endings=(
        ScenePart(
            "now",
            "",
            (
                "How many dollars does {name} have now?",
                "How much money does {name} have in the end?",
                "How many dollars are left?",
            ),
            ("In the end, {name} has {x} dollars.",),
        ),
        ScenePart(
            "each",
            SHARE,
            (
                "{name} spends all of it on {k} {things} of one price. What does each cost?",
                "{name} divides it equally among {k} children. How many dollars does each get?",
            ),
            ("Divided equally by {k}, that makes [x / k] dollars for each.",),
        ),
    ),
)

_POINTS = Scene(
    "points",
    openings=(
        ScenePart(
            "some",
            "x 5..60",
            (
                "{name} has {x} points in a game.",
                "In the first round of a game, {name} scores {x} points.",
            ),
        ),
        ScenePart(
            "hits",
            GROUPS,
            (
                "{name} hits the target {k} times for {m} points each.",
                "In a game, {name} wins {k} rounds and gets {m} points for each.",
            ),
            ("For {k} times {m} points, {name} gets [k * m] points.",),
        ),
    ),
    events=(
        ScenePart(
            "gain",
            GAIN,
            (
                "{name} wins {a} more points.",
                "In the next round, {name} scores {a} points.",
            ),
            ("With {a} points more, {name} has [x + a] points.",),
        ),
        ScenePart(
            "lose",
            LOSE,
            (
                "{name} loses {a} points for a mistake.",
                "Then {a} points are taken away from {name}.",
            ),
            ("With {a} points less, {name} has [x - a] points.",),
        ),
        ScenePart(
            "double",
            DOUBLE,
            ("A joker doubles the points.", "The next card doubles {name}'s points."),
            ("Twice as many points are [x * 2] points.",),
        ),
        ScenePart(
            "triple",
            TRIPLE,
            ("A lucky card triples the points.", "The next card triples {name}'s points."),
            ("Three times as many points are [x * 3] points.",),
        ),
        ScenePart(
            "half",
            HALF,
            ("Then {name} loses half of the points.", "A bad card takes half of the points."),
            ("Half of the points are [x / 2] points, and as many are left.",),
        ),
        ScenePart(
            "bonus",
            GROUPS_GAINED,
            (
                "For {k} {things} found on the way, {name} gets {m} points each.",
                "{name} solves {k} puzzles for {m} points each.",
            ),
            (
                "The bonus for {k} times {m} points is [y = k * m] points.",
                "With the bonus, {name} has [x + y] points.",
            ),
        ),
    ),
    endings=(
        ScenePart(
            "now",
            "",
            (
                "How many points does {name} have now?",
                "What is the score of {name} in the end?",
            ),
            ("In the end, {name} has {x} points.",),
        ),
        ScenePart(
            "ahead",
            LOSE,
            (
                "{next} has {a} points. How many points is {name} ahead of {next}?",
                "{next} ends with {a} points. By how many points does {name} win?",
            ),
            ("Compared with the {a} points of {next}, {name} is ahead by [x - a] points.",),
        ),
        ScenePart(
            "team",
            GAIN,
            (
                "{next} has {a} points. How many points do the two have together?",
                "Together with the {a} points of {next}, how many points does the team have?",
            ),
            ("Together with the {a} points of {next}, the two have [x + a] points.",),
        ),
    ),
)

SCENES = (_COLLECTION, _MONEY, _POINTS)
