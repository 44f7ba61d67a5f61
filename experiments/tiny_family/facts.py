"""Short texts of facts about people and things, with questions that the texts answer.

A fact is a subject, a kind and a value: "Ben", "city", "Oslo". Pairs of subject and value are held
out: the texts of the train split contain no pair of another split, and each text of another split
has a question about a pair of that split.
"""

import dataclasses
import functools
import random
from collections.abc import Iterator, Mapping

from dflash.data.example import Example, Split, split_of
from experiments.tiny_family.word_problems import words

COUNT = {"train": 30_000, "validation": 600, "test": 600}
MAX_TURNS = 3
SEVERAL_TURNS = 0.25  # share of the texts with several questions
NUM_SUBJECTS, NUM_KINDS = (2, 3, 3, 4), (2, 3, 4)  # numbers per text, drawn with equal probability


@dataclasses.dataclass(frozen=True)
class FactKind:
    """Kind of fact.

    Attributes:
      says: Phrasings of a fact in a text; {s} is the subject, {v} the value.
      asks: Phrasings of the question for the value.
      answers: Answer to that question.
      who: Question for the subject with a given value.
      values: Possible values.
    """

    says: tuple[str, ...]
    asks: tuple[str, ...]
    answers: str
    who: str
    values: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class World:
    """Subjects and kinds of facts that texts combine.

    Attributes:
      subjects: Possible subjects.
      kinds: Kinds of facts by name; all subjects of a text have facts of the same kinds.
      intro: Introduction before the text.
      about: Phrasings of the question for all facts about a subject.
    """

    subjects: tuple[str, ...]
    kinds: Mapping[str, FactKind]
    intro: str
    about: tuple[str, ...]


_CITIES = (
    "Athens Berlin Bern Cairo Delhi Dublin Geneva Lagos Lima Lisbon London Madrid Oslo Paris "
    "Prague Quito Rome Seoul Sydney Tokyo Turin Vienna Warsaw Zurich"
).split()
_JOBS = (
    "a baker",
    "a carpenter",
    "a cook",
    "a dentist",
    "a doctor",
    "a driver",
    "a farmer",
    "a gardener",
    "a judge",
    "a lawyer",
    "a librarian",
    "a nurse",
    "a painter",
    "a pilot",
    "a plumber",
    "a singer",
    "a tailor",
    "a teacher",
    "a waiter",
    "a writer",
)
_PEOPLE = World(
    tuple(words.NAMES),
    {
        "city": FactKind(
            ("{s} lives in {v}.", "{s} has a flat in {v}.", "The home of {s} is in {v}."),
            ("Where does {s} live?", "In which city does {s} live?"),
            "{s} lives in {v}.",
            "Who lives in {v}?",
            tuple(_CITIES),
        ),
        "job": FactKind(
            ("{s} is {v}.", "{s} works as {v}.", "{s} earns a living as {v}."),
            ("What is the job of {s}?", "What does {s} work as?"),
            "{s} works as {v}.",
            "Who works as {v}?",
            _JOBS,
        ),
        "pet": FactKind(
            ("{s} has {v}.", "{s} keeps {v}.", "At home, {s} has {v}."),
            ("Which pet does {s} have?", "Which animal does {s} keep?"),
            "{s} has {v} as a pet.",
            "Who has {v}?",
            tuple(
                f"a {name}"
                for name in (
                    "cat dog fish frog goat goose hamster horse lizard mouse parrot pony rabbit "
                    "sheep snake tortoise turtle"
                ).split()
            ),
        ),
        "hobby": FactKind(
            ("{s} likes {v}.", "{s} spends the weekends {v}.", "The hobby of {s} is {v}."),
            ("What is the hobby of {s}?", "What does {s} like to do?"),
            "The hobby of {s} is {v}.",
            "Whose hobby is {v}?",
            tuple(
                "baking camping climbing cooking cycling dancing drawing fishing gardening hiking "
                "juggling knitting painting reading rowing running sailing singing skiing swimming"
                " writing".split()
            ),
        ),
        "instrument": FactKind(
            ("{s} plays {v}.", "{s} has learned to play {v}.", "{s} practises {v} every day."),
            ("Which instrument does {s} play?", "What does {s} play?"),
            "{s} plays {v}.",
            "Who plays {v}?",
            tuple(
                f"the {name}"
                for name in (
                    "accordion banjo bassoon cello clarinet drums flute guitar harp horn lute oboe "
                    "organ piano trombone trumpet tuba viola violin"
                ).split()
            ),
        ),
        "food": FactKind(
            ("{s} loves {v}.", "The favorite food of {s} is {v}.", "{s} eats {v} every week."),
            ("What is the favorite food of {s}?", "Which food does {s} love?"),
            "The favorite food of {s} is {v}.",
            "Who loves {v}?",
            tuple(
                "beans bread cheese cherries chocolate curry dumplings grapes lentils mushrooms "
                "noodles olives pancakes pasta pizza plums rice salad soup tomatoes".split()
            ),
        ),
        "birthday": FactKind(
            (
                "{s} was born in {v}.",
                "{s} has a birthday in {v}.",
                "The birthday of {s} is in {v}.",
            ),
            ("In which month was {s} born?", "When is the birthday of {s}?"),
            "The birthday of {s} is in {v}.",
            "Who was born in {v}?",
            tuple(
                "January February March April May June July August September October November "
                "December".split()
            ),
        ),
    },
    "Read this and answer.",
    ("What do we know about {s}?", "Tell me about {s}.", "What does the text say about {s}?"),
)
_THINGS = World(
    tuple(
        f"the {name}"
        for name in (
            "armchair basket bench bicycle blanket bookcase bottle bowl bucket candle carpet clock "
            "cupboard curtain drum hammer kettle ladder lamp mirror mug pan pillow radio scarf "
            "sofa stool suitcase table teapot tent umbrella vase wardrobe"
        ).split()
    ),
    {
        "color": FactKind(
            ("{S} is {v}.", "The color of {s} is {v}.", "{S} has been painted {v}."),
            ("Which color does {s} have?", "What is the color of {s}?"),
            "The color of {s} is {v}.",
            "What is {v}?",
            tuple(
                "beige black blue bronze brown crimson gold gray green indigo ivory orange pink "
                "purple red silver turquoise violet white yellow".split()
            ),
        ),
        "place": FactKind(
            ("{S} is in {v}.", "You find {s} in {v}.", "{S} has its place in {v}."),
            ("Where is {s}?", "In which room is {s}?"),
            "{S} is in {v}.",
            "What is in {v}?",
            tuple(
                f"the {name}"
                for name in (
                    "attic barn basement bathroom bedroom cabin cellar corridor garage garden hall "
                    "kitchen library lobby office pantry shed studio study workshop"
                ).split()
            ),
        ),
        "price": FactKind(
            ("{S} costs {v}.", "The price of {s} is {v}.", "{S} was bought for {v}."),
            ("How much does {s} cost?", "What is the price of {s}?"),
            "The price of {s} is {v}.",
            "What costs {v}?",
            tuple(f"${price}" for price in range(5, 100, 3)),
        ),
        "owner": FactKind(
            ("{S} belongs to {v}.", "The owner of {s} is {v}.", "{v} owns {s}."),
            ("Whom does {s} belong to?", "Who is the owner of {s}?"),
            "{S} belongs to {v}.",
            "What belongs to {v}?",
            tuple(words.NAMES),
        ),
        "material": FactKind(
            ("{S} is made of {v}.", "{S} consists of {v}.", "The material of {s} is {v}."),
            ("What is {s} made of?", "Which material is {s} made of?"),
            "{S} is made of {v}.",
            "What is made of {v}?",
            tuple(
                "aluminium bamboo canvas clay copper cork cotton felt glass iron leather linen "
                "marble paper plastic rubber silk steel stone wood wool".split()
            ),
        ),
    },
    "Here are some facts.",
    ("What do we know about {s}?", "Describe {s}.", "What does the text say about {s}?"),
)
WORLDS = (_PEOPLE, _THINGS)
Facts = Mapping[str, Mapping[str, str]]  # subject -> kind -> value
Pair = tuple[str, str]  # subject and kind


def examples(task: str, split: Split) -> Iterator[Example]:
    """Yields the texts of a split with their questions and answers, always the same ones."""
    for index in range(COUNT[split]):
        yield example(task, split, index)


def example(task: str, split: Split, index: int) -> Example:
    """Generates an example, which depends on the arguments alone."""
    rng = random.Random(f"{split}/{index}")
    world = rng.choice(WORLDS)
    facts, asked = _draw(world, split, rng)
    source = _pair_name(asked[0], facts[asked[0]][asked[1]])
    turns = rng.randint(2, MAX_TURNS) if rng.random() < SEVERAL_TURNS else 1
    messages = []
    for turn, ask in enumerate(rng.sample(_ASKS, k=turns)):
        question, answer = ask(world, facts, asked, rng)
        if not turn:
            question = f"{world.intro} {_tell(world, facts, rng)}\n\n{question}"
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": answer})
        subject = rng.choice(list(facts))
        asked = subject, rng.choice(list(facts[subject]))
    return Example(task, source, tuple(messages))


def _draw(world: World, split: Split, rng: random.Random) -> tuple[Facts, Pair]:
    """Draws facts of the train split and one of `split`, which the first question is about."""
    while True:
        subjects = rng.sample(world.subjects, rng.choice(NUM_SUBJECTS))
        kinds = rng.sample(list(world.kinds), rng.choice(NUM_KINDS))
        asked = rng.choice(subjects), rng.choice(kinds)
        facts: dict[str, dict[str, str]] = {subject: {} for subject in subjects}
        for kind in kinds:
            free = set(world.kinds[kind].values) - set(subjects)
            for subject in subjects:
                fact_split = split if (subject, kind) == asked else "train"
                fit = [value for value in sorted(free) if _split_of(subject, value) == fact_split]
                if fit:
                    facts[subject][kind] = rng.choice(fit)
                    free.discard(facts[subject][kind])
        if all(len(known) == len(kinds) for known in facts.values()):
            return facts, asked


@functools.cache
def _split_of(subject: str, value: str) -> Split:
    return split_of(_pair_name(subject, value))


def _pair_name(subject: str, value: str) -> str:
    return f"{subject}/{value}"


def fill(text: str, subject: str, value: str = "") -> str:
    """Fills subject and value into a phrasing, and capitalizes its first letter."""
    filled = text.format(s=subject, S=subject[0].upper() + subject[1:], v=value)
    return filled[0].upper() + filled[1:]


def _tell(world: World, facts: Facts, rng: random.Random) -> str:
    """Renders all facts as a text, grouped by subject."""
    sentences = []
    for subject, known in facts.items():
        for kind in rng.sample(list(known), len(known)):
            sentences.append(fill(rng.choice(world.kinds[kind].says), subject, known[kind]))
    return " ".join(sentences)


def _answer(world: World, facts: Facts, pair: Pair) -> str:
    subject, kind = pair
    return fill(world.kinds[kind].answers, subject, facts[subject][kind])


def _several(facts: Facts, asked: Pair, rng: random.Random) -> list[Pair]:
    """Draws one to three other pairs, and returns them with `asked` in random order."""
    others = [(subject, kind) for subject in facts for kind in facts[subject]]
    others.remove(asked)
    pairs = [asked, *rng.sample(others, rng.choice((1, 2, 3)))]
    return rng.sample(pairs, len(pairs))


def _ask_values(world: World, facts: Facts, asked: Pair, rng: random.Random) -> tuple[str, str]:
    questions, answers = [], []
    for subject, kind in _several(facts, asked, rng):
        known = world.kinds[kind]
        phrasing = rng.choice((*known.asks, known.who))
        questions.append(fill(phrasing, subject, facts[subject][kind]))
        answers.append(_answer(world, facts, (subject, kind)))
    return _numbered(questions), _numbered(answers)


def _ask_claims(world: World, facts: Facts, asked: Pair, rng: random.Random) -> tuple[str, str]:
    claims, verdicts = [], []
    for subject, kind in _several(facts, asked, rng):
        claimed = rng.choice([facts[subject][kind], facts[rng.choice(list(facts))][kind]])
        claims.append(fill(world.kinds[kind].answers, subject, claimed))
        verdict = "Right" if claimed == facts[subject][kind] else "Wrong"
        verdicts.append(f"{verdict}: {_answer(world, facts, (subject, kind))}")
    return f"{rng.choice(_CHECKS)}\n{_numbered(claims)}", _numbered(verdicts)


def _ask_subject(world: World, facts: Facts, asked: Pair, rng: random.Random) -> tuple[str, str]:
    subject, _ = asked
    told = " ".join(_answer(world, facts, (subject, kind)) for kind in sorted(facts[subject]))
    return fill(rng.choice(world.about), subject), told


def _ask_kind(world: World, facts: Facts, asked: Pair, rng: random.Random) -> tuple[str, str]:
    _, kind = asked
    lines = [f"- {_answer(world, facts, (subject, kind))}" for subject in facts]
    return rng.choice(_LISTS).format(kind=kind), "\n".join(lines)


def _ask_everything(world: World, facts: Facts, asked: Pair, rng: random.Random) -> tuple[str, str]:
    del asked  # the list contains it with all other facts
    lines = [
        f"- {_answer(world, facts, (subject, kind))}"
        for subject in facts
        for kind in sorted(facts[subject])
    ]
    return rng.choice(_REPORTS), "\n".join(lines)


def _numbered(lines: list[str]) -> str:
    return "\n".join(f"{number}. {line}" for number, line in enumerate(lines, start=1))


_CHECKS = ("Are these statements right or wrong?", "Check these statements.")
_LISTS = ("List the {kind} of each of them.", "What is the {kind} of each? Make a list.")
_REPORTS = ("Make a list of all of these facts.", "List everything that the text says.")
_ASKS = (_ask_values, _ask_claims, _ask_subject, _ask_kind, _ask_everything)
