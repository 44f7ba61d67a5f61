"""Templates about amounts, parts, shapes, units, sequences and rates."""

from dflash.data.word_problems.template import Template

TEMPLATES = (
    Template(
        "garden_part",
        "r 4..40; c 4..40; k 2..6",
        (
            "A garden has {r} rows of {c} tulips. One in {k} is red. How many are not red?",
            "{name} plants {r} rows with {c} seeds each. One seed in {k} fails. How many grow?",
        ),
        (
            "There are [x = r * c] in all.",
            "One in {k} makes [y = x / k].",
            "The others are [x - y].",
        ),
    ),
    Template(
        "library_part",
        "n 40..900; k 2..8; back 5..60; back < n / k",
        (
            "A library has {n} books. One in {k} is lent out, then {back} come back. "
            "How many books are in the library?",
            "Of {n} {things} one in {k} is taken away, and {back} are brought back. "
            "How many are there then?",
        ),
        (
            "Out are [x = n / k].",
            "That leaves [y = n - x].",
            "With those that come back there are [y + back].",
        ),
    ),
    Template(
        "legs",
        "a 4..60; b 4..60",
        (
            "A farm has {a} hens and {b} cows. How many legs do they have together?",
            "{name} counts {a} ducks and {b} sheep. How many legs is that in all?",
        ),
        (
            "The birds have [x = a * 2] legs.",
            "The others have [y = b * 4] legs.",
            "Together that is [x + y] legs.",
        ),
    ),
    Template(
        "recipe",
        "s 2..8; c 2..9; k 2..30; people = s * k",
        (
            "A recipe for {s} people needs {c} cups of flour. How many cups does {name} need for "
            "{people} people?",
            "{c} eggs make a cake for {s} people. How many eggs are needed for {people} people?",
        ),
        ("That is [x = people / s] times the recipe.", "It needs [x * c]."),
    ),
    Template(
        "fence",
        "l 8..80; w 5..60; p 2..12",
        (
            "A field is {l} m long and {w} m wide. A metre of fence costs ${p}. "
            "How much does the fence around the field cost?",
            "{name} builds a fence around a garden of {l} m by {w} m. Each metre costs ${p}. "
            "What does {name} pay?",
        ),
        (
            "One long and one short side make [x = l + w] m.",
            "All around it is [y = x * 2] m.",
            "The fence costs [y * p] dollars.",
        ),
    ),
    Template(
        "tiles",
        "a 3..30; b 3..30; s 2..5; l = a * s; w = b * s",
        (
            "A floor of {l} m by {w} m is covered with square tiles of {s} m. "
            "How many tiles does it take?",
        ),
        (
            "The floor has [x = l * w] square metres.",
            "A tile has [y = s * s] square metres.",
            "It takes [x / y] tiles.",
        ),
    ),
    Template(
        "lawn_and_pond",
        "l 10..60; w 10..60; a 2..9; b 2..9",
        (
            "A lawn of {l} m by {w} m has a pond of {a} m by {b} m in it. "
            "How many square metres of grass are there?",
            "{name} paints a wall of {l} m by {w} m, but not the window of {a} m by {b} m. "
            "How many square metres does {name} paint?",
        ),
        (
            "The whole has [x = l * w] square metres.",
            "The hole has [y = a * b] square metres.",
            "What counts is [x - y] square metres.",
        ),
    ),
    Template(
        "box_volume",
        "l 3..30; w 3..20; h 2..12; u 10..400",
        (
            "A tank is {l} dm long, {w} dm wide and {h} dm high. It holds {u} litres of water. "
            "How many litres still fit in?",
            "{u} litres are poured into an empty tank of {l} by {w} by {h} dm. "
            "How many litres more can it take?",
        ),
        (
            "The bottom has [x = l * w] square dm.",
            "The tank takes [y = x * h] litres.",
            "There is room for [y - u] litres.",
        ),
    ),
    Template(
        "triangle",
        "a 20..110; b 20..110",
        (
            "Two angles of a triangle have {a} and {b} degrees. How many degrees has the third?",
            "A triangle has angles of {a} and {b} degrees. What is its third angle?",
        ),
        ("The two have [x = a + b] degrees.", "The third has [180 - x] degrees."),
    ),
    Template(
        "square",
        "s 3..60; around = 4 * s",
        (
            "The sides of a square add up to {around} cm. What is its area in square cm?",
            "{name} walks once around a square field: {around} m. How many square metres has it?",
        ),
        ("A side is [x = around / 4] long.", "The area is [x * x]."),
    ),
    Template(
        "film_minutes",
        "h 1..4; m 5..55; n 2..9; ads 3..30",
        (
            "A film lasts {h} hours and {m} minutes, and the ads before it {ads} minutes. "
            "How many minutes do {n} showings take?",
            "A course lesson takes {h} hours and {m} minutes, with {ads} minutes of break. "
            "How many minutes are {n} lessons with their breaks?",
        ),
        (
            "The hours are [x = h * 60] minutes.",
            "One takes [y = x + m + ads] minutes.",
            "All take [y * n] minutes.",
        ),
    ),
    Template(
        "laps",
        "k 2..30; lap in 100 200 250 400 500; n 1..9",
        (
            "{name} wants to run {k} km on a track of {lap} m and has run {n} laps. "
            "How many laps are left?",
            "A pool lane of {lap} m is swum for {k} km in all. After {n} lanes, how many remain?",
        ),
        (
            "The way is [x = k * 1000] m long.",
            "That makes [y = x / lap] laps.",
            "There are [y - n] left.",
        ),
    ),
    Template(
        "weights",
        "k 2..40; g in 100 125 200 250 500; n 2..30",
        (
            "{name} fills {k} kg of rice into bags of {g} g and sells {n} bags. "
            "How many bags are left?",
        ),
        (
            "The rice weighs [x = k * 1000] g.",
            "It fills [y = x / g] bags.",
            "After the sale [y - n] are left.",
        ),
    ),
    Template(
        "exchange",
        "n 20..300; r 2..15; s 10..900",
        (
            "{name} changes ${n} into crowns at {r} crowns a dollar and spends {s} crowns. "
            "How many crowns are left?",
            "A dollar is worth {r} pesos. {name} changes ${n} and pays {s} pesos for {things}. "
            "How many pesos remain?",
        ),
        ("{name} gets [x = n * r].", "What is left is [x - s]."),
    ),
    Template(
        "sequence_term",
        "a 2..40; d 2..12; n 5..40",
        (
            "A sequence starts with {a} and grows by {d} each time. What is term number {n}?",
            "{name} does {a} push-ups on day 1 and {d} more each day. How many on day {n}?",
        ),
        (
            "It grows [x = n - 1] times.",
            "That adds [y = x * d].",
            "The result is [a + y].",
        ),
    ),
    Template(
        "sequence_sum",
        "a 2..40; d 2..9; n 4..15",
        (
            "A row starts with {a} and each next number is {d} larger. "
            "What is the sum of its first {n} numbers?",
            "The first row of a hall has {a} seats and each next one {d} more. "
            "How many seats do {n} rows have?",
        ),
        (
            "The last number is [z = a + (n - 1) * d].",
            "The first and the last add up to [x = a + z].",
            "The sum is [n * x / 2].",
        ),
    ),
    Template(
        "doubling",
        "a 3..60; c 2..50",
        (
            "{name} has {a} coins and doubles them three times. Then {c} are lost. "
            "How many coins remain?",
            "{a} bacteria double every hour. After three hours {c} are removed. "
            "How many are there then?",
        ),
        (
            "After the first time there are [x = a * 2].",
            "After the second there are [y = x * 2].",
            "After the third there are [z = y * 2].",
            "In the end there are [z - c].",
        ),
    ),
    Template(
        "mixture",
        "a 10..200; p in 10 20 30 40 50; b 10..200; q in 10 20 30 40 50; p != q",
        (
            "{a} litres of a drink with {p}% juice are mixed with {b} litres with {q}% juice. "
            "How many litres of juice are in the mix?",
            "{name} mixes {a} kg of nuts with {p}% almonds and {b} kg with {q}% almonds. "
            "How many kg of almonds is that?",
        ),
        (
            "The first part brings [x = a * p / 100].",
            "The second part brings [y = b * q / 100].",
            "Together that is [x + y].",
        ),
    ),
    Template(
        "ratio",
        "r 2..9; s 1..8; k 3..60; n = (r + s) * k; r > s",
        (
            "{name} and {other} share {n} {things} in the ratio {r} to {s}. "
            "How many more does {name} get than {other}?",
        ),
        (
            "There are [x = r + s] parts.",
            "A part has [y = n / x] {things}.",
            "{name} has [z = r - s] parts more.",
            "That is [y * z] {things} more.",
        ),
    ),
    Template(
        "average",
        "a 20..90; b 20..90; c 20..90; m 40..80",
        (
            "{name} scores {a}, {b} and {c} in three tests. What score in the fourth gives an "
            "average of {m}?",
            "Three of four {containers} weigh {a}, {b} and {c} kg. The average of all four is {m} "
            "kg. How many kg does the fourth weigh?",
        ),
        (
            "All four add up to [x = m * 4].",
            "The three add up to [y = a + b + c].",
            "The fourth is [x - y].",
        ),
    ),
    Template(
        "fuel",
        "k 2..30; f 4..12; p 2..4; d = k * 100",
        (
            "A car needs {f} litres for 100 km, and a litre costs ${p}. What does a trip of {d} km "
            "cost?",
            "{name} drives {d} km. The car takes {f} litres per 100 km at ${p} a litre. "
            "How much does {name} pay for fuel?",
        ),
        (
            "The trip is [x = d / 100] times 100 km.",
            "It takes [y = x * f] litres.",
            "They cost [y * p] dollars.",
        ),
    ),
    Template(
        "growth",
        "n 100..1200; percent in 5 10 20 25 50; m 10..150",
        (
            "A village of {n} people grows by {percent}%, and then {m} people move away. "
            "How many people live there?",
            "The {place} has {n} visitors in May and {percent}% more in June. In July there are "
            "{m} fewer than in June. How many come in July?",
        ),
        (
            "The growth is [x = n * percent / 100].",
            "Then there are [y = n + x].",
            "In the end there are [y - m].",
        ),
    ),
    Template(
        "tank_leak",
        "r 10..60; s 2..30; t 4..30; v = (r - s) * t; r > s",
        (
            "A tank of {v} litres is filled with {r} litres a minute and loses {s} litres a "
            "minute. After how many minutes is it full?",
        ),
        ("Each minute it gains [x = r - s] litres.", "It is full after [v / x] minutes."),
    ),
    Template(
        "battery",
        "a 5..50; g 1..5; b 60..100",
        (
            "A battery is at {a}% and gains {g}% a minute. After how many minutes is it at {b}%?",
            "A phone shows {a}% and charges {g}% per minute. How long until it shows {b}%, in "
            "minutes?",
        ),
        ("It has to gain [x = b - a] percent.", "That takes [x / g] minutes."),
    ),
    Template(
        "interest",
        "p 100..3000; r 2..9; y 2..10",
        (
            "{name} lends ${p} at {r}% simple interest a year. How much is owed after {y} years?",
            "A bank pays {r}% simple interest a year. What do ${p} become in {y} years?",
        ),
        (
            "A year brings [x = p * r / 100] dollars.",
            "{y} years bring [z = x * y] dollars.",
            "Then it is [p + z] dollars.",
        ),
    ),
    Template(
        "consecutive",
        "m 5..200; total = 3 * m",
        (
            "Three numbers in a row add up to {total}. What is the largest?",
            "{name}, {other} and a friend have numbers that follow each other, with the sum "
            "{total}. What is the largest of them?",
        ),
        ("The middle one is [x = total / 3].", "The largest is [x + 1]."),
    ),
    Template(
        "steps_walked",
        "s 60..130; m 10..60; d 3..14",
        (
            "{name} walks {m} minutes a day at {s} steps a minute. How many steps is that in {d} "
            "days?",
            "A walker makes {s} steps a minute for {m} minutes each day. "
            "How many steps are made in {d} days?",
        ),
        ("A day has [x = s * m] steps.", "{d} days have [x * d] steps."),
    ),
    Template(
        "coins",
        "a 4..60; b 4..60; c 50..900",
        (
            "{name} has {a} coins of 25 cents and {b} of 10 cents and spends {c} cents. "
            "How many cents are left?",
        ),
        (
            "The larger coins are [x = a * 25] cents.",
            "The smaller ones are [y = b * 10] cents.",
            "Together that is [z = x + y].",
            "What is left is [z - c] cents.",
        ),
    ),
    Template(
        "packs",
        "n 3..60; k in 4 6 8 10 12; p 2..9; total = n * k",
        (
            "{things} come in packs of {k} at ${p} a pack. What do {total} {things} cost?",
            "{name} needs {total} {things}. A pack of {k} costs ${p}. How much does {name} pay?",
        ),
        ("That takes [x = total / k] packs.", "They cost [x * p] dollars."),
    ),
    Template(
        "compare",
        "a 5..90; k 2..5; d 3..30",
        (
            "{name} has {a} {things}. {other} has {k} times as many, less {d}. "
            "How many do they have together?",
            "There are {a} {things}, and {k} times as many {items} less {d}. "
            "How many {things} and {items} are there?",
        ),
        (
            "{k} times as many is [x = a * k].",
            "Less {d} that is [y = x - d].",
            "Together that makes [a + y].",
        ),
    ),
)
