"""Templates about money, sharing, ages, travel and work."""

from dflash.data.word_problems.template import Template

TEMPLATES = (
    Template(
        "two_items",
        "a 3..60; p 2..9; b 3..60; q 2..9",
        (
            "{name} buys {a} {things} at ${p} each and {b} {items} at ${q} each. "
            "How much does {name} pay?",
            "At the {place}, {things} cost ${p} and {items} cost ${q}. {name} takes {a} {things} "
            "and {b} {items}. What is the total price in dollars?",
        ),
        (
            "The {things} cost [x = a * p] dollars.",
            "The {items} cost [y = b * q] dollars.",
            "Together they cost [x + y] dollars.",
        ),
    ),
    Template(
        "change",
        "n 3..60; p 2..9; paid in 50 100 200 500",
        (
            "{name} buys {n} {things} at ${p} each and pays with ${paid}. How much is the change?",
            "A {place} sells {things} for ${p} each. {name} has ${paid} and buys {n} {things}. "
            "How many dollars are left?",
        ),
        ("The {things} cost [cost = n * p] dollars.", "What is left is [paid - cost] dollars."),
    ),
    Template(
        "discount",
        "price 20..400; percent in 10 20 25 30 40 50",
        (
            "A set of {things} costs ${price}. Today it is {percent}% off. What does {name} pay?",
            "{name} gets a discount of {percent}% on {things} worth ${price}. "
            "How many dollars does {name} pay?",
        ),
        (
            "The discount is [cut = price * percent / 100] dollars.",
            "The price after it is [price - cut] dollars.",
        ),
    ),
    Template(
        "tip",
        "meal 20..300; percent in 5 10 15 20 25",
        (
            "A meal costs ${meal}. {name} adds a tip of {percent}%. How much does {name} pay?",
            "{name} pays ${meal} for dinner and tips {percent}% on top. What is the total?",
        ),
        (
            "The tip is [tip = meal * percent / 100] dollars.",
            "The total is [meal + tip] dollars.",
        ),
    ),
    Template(
        "savings",
        "s 5..60; w 3..30; c 10..200",
        (
            "{name} saves ${s} every week for {w} weeks and then spends ${c} on {things}. "
            "How much is left?",
            "Every week {name} puts ${s} aside. After {w} weeks {name} buys {things} for ${c}. "
            "How many dollars remain?",
        ),
        ("{name} saves [saved = s * w] dollars.", "What is left is [saved - c] dollars."),
    ),
    Template(
        "savings_goal",
        "have 10..200; s 4..25; w 3..20; goal = have + s * w",
        (
            "{name} has ${have} and saves ${s} a week. After how many weeks does {name} have "
            "${goal}?",
            "A bicycle costs ${goal}. {name} has ${have} already and earns ${s} a week. "
            "How many weeks does it take to afford it?",
        ),
        (
            "{name} still needs [need = goal - have] dollars.",
            "That takes [need / s] weeks.",
        ),
    ),
    Template(
        "share_pool",
        "a 10..120; b 10..120; k 3..9",
        (
            "{name} has {a} {things} and {other} has {b}. They put them together and divide them "
            "equally among {k} friends. How many does each friend get?",
            "{name} brings {a} {things}, {other} brings {b}. If {k} children share all of them "
            "equally, how many {things} does each one get?",
        ),
        ("Together they have [all = a + b] {things}.", "Each gets [all / k] {things}."),
    ),
    Template(
        "boxes_left",
        "n 60..600; m 4..20; size 4..24",
        (
            "A {place} has {n} {things}. {name} fills {m} {containers} with {size} {things} each. "
            "How many {things} are left?",
            "{name} packs {m} {containers} of {size} {things} out of a stock of {n}. "
            "How many {things} remain?",
        ),
        (
            "The {containers} hold [packed = m * size] {things}.",
            "What remains is [n - packed] {things}.",
        ),
    ),
    Template(
        "give_away",
        "n 30..300; a 5..60; b 5..60; c 5..60",
        (
            "{name} has {n} {things}, gives {a} to {other}, loses {b} and then finds {c}. "
            "How many {things} does {name} have now?",
            "Of {n} {things}, {name} sells {a} and breaks {b}. Then {c} new ones arrive. "
            "How many {things} are there now?",
        ),
        (
            "After the first change there are [x = n - a] {things}.",
            "After the second there are [y = x - b].",
            "In the end there are [y + c].",
        ),
    ),
    Template(
        "ages_later",
        "b 5..50; d 2..15; y 2..20",
        (
            "{name} is {d} years older than {other}, who is {b}. How old will {name} be in {y} "
            "years?",
            "{other} is {b} years old. {name} is {d} years older. What will be the age of {name} "
            "in {y} years?",
        ),
        ("{name} is now [a = b + d] years old.", "In {y} years it will be [a + y]."),
    ),
    Template(
        "ages_together",
        "b 4..30; k 2..4; y 2..15",
        (
            "{name} is {k} times as old as {other}, who is {b}. How old will they be together in "
            "{y} years?",
            "{other} is {b} and {name} is {k} times that age. What will be the sum of their ages "
            "in {y} years?",
        ),
        (
            "{name} is [a = b * k] years old.",
            "Together they are [now = a + b].",
            "In {y} years both gain [more = 2 * y] years together.",
            "Then they are [now + more].",
        ),
    ),
    Template(
        "ages_past",
        "b 12..50; y 2..9; k 2..4; b > y",
        (
            "{other} is {b} years old. {y} years ago {name} was {k} times as old as {other}. "
            "How old is {name} now?",
        ),
        (
            "{y} years ago {other} was [x = b - y].",
            "{name} was then [z = x * k].",
            "Now {name} is [z + y].",
        ),
    ),
    Template(
        "two_legs",
        "v 20..110; t 2..9; u 20..110; s 2..9",
        (
            "{name} drives {t} hours at {v} km per hour and then {s} hours at {u} km per hour. "
            "How far does {name} drive?",
            "A train runs at {v} km/h for {t} hours and at {u} km/h for another {s} hours. "
            "How many kilometres does it cover?",
        ),
        (
            "The first part is [x = v * t] km long.",
            "The second part is [y = u * s] km long.",
            "The whole way is [x + y] km.",
        ),
    ),
    Template(
        "trip_with_rest",
        "v 30..100; t 2..12; r 1..4; d = v * t",
        (
            "{name} drives {d} km at {v} km per hour and rests for {r} hours on the way. "
            "How many hours does the trip take?",
            "A bus covers {d} km at {v} km/h. Its breaks take {r} hours in all. "
            "After how many hours does it arrive?",
        ),
        ("Driving takes [x = d / v] hours.", "With the rest it takes [x + r] hours."),
    ),
    Template(
        "there_and_back",
        "v in 20 30 40 60; u in 20 30 40 60; m 1..40; d = 120 * m; v != u",
        (
            "A ship sails {d} km at {v} km per hour and returns at {u} km per hour. "
            "How many hours does it travel?",
            "{name} goes {d} km at {v} km/h and comes back the same way at {u} km/h. "
            "How long do both ways take, in hours?",
        ),
        (
            "The way out takes [x = d / v] hours.",
            "The way back takes [y = d / u] hours.",
            "Both take [x + y] hours.",
        ),
    ),
    Template(
        "approach",
        "v 20..90; u 20..90; t 2..9; gap = (v + u) * t",
        (
            "Two trains are {gap} km apart and run towards each other at {v} and {u} km per hour. "
            "How far does the first one go before they meet?",
            "{name} and {other} start {gap} km apart and drive towards each other, {name} at {v} "
            "km/h and {other} at {u} km/h. How many kilometres does {name} drive until they meet?",
        ),
        (
            "Each hour they come [near = v + u] km closer.",
            "They meet after [t = gap / near] hours.",
            "The first has gone [v * t] km by then.",
        ),
    ),
    Template(
        "catch_up",
        "v 10..60; h 1..6; more in 2 3 4 5 6 10 12 15 20; u = v + more; t = v * h / more",
        (
            "{name} leaves at {v} km per hour. {other} follows {h} hours later at {u} km per hour. "
            "After how many hours of driving does {other} catch up?",
        ),
        (
            "{name} leads by [lead = v * h] km.",
            "Each hour {other} gains [gain = u - v] km.",
            "{other} catches up after [lead / gain] hours.",
        ),
    ),
    Template(
        "machines",
        "r 5..60; n 2..12; t 2..12",
        (
            "A machine makes {r} {things} an hour. How many {things} do {n} machines make in {t} "
            "hours?",
            "{n} machines run for {t} hours. Each makes {r} {things} per hour. "
            "How many {things} do they make in all?",
        ),
        (
            "In one hour they make [x = r * n] {things}.",
            "In {t} hours they make [x * t] {things}.",
        ),
    ),
    Template(
        "work_together",
        "a 3..40; b 3..40; t 3..20; n = (a + b) * t",
        (
            "{name} folds {a} letters a minute and {other} folds {b}. How many minutes do they "
            "need for {n} letters together?",
            "In an hour {name} paints {a} {things} and {other} paints {b}. After how many hours "
            "have they painted {n} {things}?",
        ),
        ("Together they do [x = a + b].", "They need [n / x]."),
    ),
    Template(
        "workers_days",
        "n 2..30; d 3..30; m 2..20; n != m",
        (
            "{n} workers build a wall in {d} days. How many days do {m} workers need for it?",
            "A job takes {n} people {d} days. How many days does it take {m} people?",
        ),
        ("The job takes [x = n * d] days of work.", "{m} workers need [x / m] days."),
    ),
    Template(
        "reading",
        "p 8..60; d 2..10; q 8..60; e 2..10; pages = p * d + q * e",
        (
            "A book has {pages} pages. {name} reads {p} pages a day for {d} days and then {q} "
            "pages a day. How many more days does the rest take?",
        ),
        (
            "In {d} days {name} reads [x = p * d] pages.",
            "The rest has [rest = pages - x] pages.",
            "It takes [rest / q] days.",
        ),
    ),
    Template(
        "seats",
        "r 8..40; c 8..40; s 40..900",
        (
            "A hall has {r} rows of {c} seats. {s} people come. How many seats stay empty?",
            "The theatre of the {place} has {r} rows with {c} seats each. {s} seats are sold. "
            "How many are still free?",
        ),
        ("There are [x = r * c] seats.", "Of these, [x - s] are free."),
    ),
    Template(
        "bus",
        "n 15..70; a 3..30; b 3..30; c 3..30; d 3..30",
        (
            "A bus starts with {n} people. At the first stop {a} get off and {b} get on, at the "
            "second {c} get off and {d} get on. How many people are on the bus?",
            "There are {n} people on a tram. {a} leave and {b} enter, then {c} leave and {d} "
            "enter. How many are on it now?",
        ),
        (
            "After the first stop there are [x = n - a + b] people.",
            "After the second there are [x - c + d].",
        ),
    ),
    Template(
        "bakery",
        "t 3..30; n 6..24; s 10..200; k 3..12",
        (
            "A baker fills {t} trays with {n} rolls each, sells {s} rolls and packs the rest in "
            "bags of {k}. How many bags are there?",
        ),
        (
            "The trays hold [x = t * n] rolls.",
            "After the sale [y = x - s] rolls are left.",
            "They fill [y / k] bags.",
        ),
    ),
    Template(
        "tickets",
        "a 10..150; p 6..20; c 10..150; q 2..9",
        (
            "{a} adults pay ${p} each and {c} children pay ${q} each at the {place}. "
            "How much more do the adults pay together than the children?",
        ),
        (
            "The adults pay [x = a * p] dollars.",
            "The children pay [y = c * q] dollars.",
            "The difference is [x - y] dollars.",
        ),
    ),
    Template(
        "profit",
        "n 10..120; p 2..30; q 3..50; q > p",
        (
            "{name} buys {n} {things} at ${p} each and sells them at ${q} each. "
            "How much does {name} gain?",
            "A shop buys {things} for ${p} and sells them for ${q}. What does it earn on {n} "
            "{things}?",
        ),
        ("Each one brings [x = q - p] dollars.", "All of them bring [x * n] dollars."),
    ),
    Template(
        "wages",
        "h 20..45; r 8..30; o 2..12",
        (
            "{name} works {h} hours at ${r} an hour and {o} hours of overtime at double pay. "
            "How much does {name} earn?",
            "At the {place} an hour pays ${r}, and overtime pays twice as much. What does {name} "
            "get for {h} hours and {o} hours of overtime?",
        ),
        (
            "The normal hours pay [x = h * r] dollars.",
            "An hour of overtime pays [y = r * 2] dollars.",
            "The overtime pays [z = o * y] dollars.",
            "In all {name} earns [x + z] dollars.",
        ),
    ),
)
