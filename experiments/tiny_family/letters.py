"""Short letters to write, whose wording the question determines.

The question has all details of a letter ("Write an invitation from Dana to Peter. The occasion is a
birthday party. …"); the rest of the wording depends only on the kind of letter.
"""

import dataclasses
import random
from collections.abc import Mapping

from experiments.tiny_family.numbered import fill
from experiments.tiny_family.word_problems import words

COUNT = {"train": 40_000, "validation": 2000, "test": 2000}


@dataclasses.dataclass(frozen=True)
class LetterKind:
    """Kind of letter.

    Attributes:
      name: Name with its article.
      details: Sentences of the question; the fields in braces are keys of `_WORDS`, the days {day}
        and {later}, and the people {from}, {to} and {other}.
      text: Letter without salutation and closing.
      end: Closing, the line above the name of the writer.
    """

    name: str
    details: tuple[str, ...]
    text: str
    end: str


DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
_WORDS: Mapping[str, tuple[str, ...]] = {
    "hour": tuple(f"{hour} o'clock" for hour in range(1, 13)),
    "place": tuple(words.PLACES),
    "things": tuple(words.THINGS),
    "count": tuple(str(count) for count in range(2, 100)),
    "price": tuple(f"${price}" for price in range(3, 100)),
    "party": (
        "a barbecue",
        "a birthday party",
        "a concert",
        "a costume party",
        "a dance",
        "a farewell party",
        "a game night",
        "a picnic",
        "a reading",
        "a surprise party",
        "a wedding",
    ),
    "event": (
        "the appointment",
        "the class",
        "the dinner",
        "the exam",
        "the interview",
        "the lesson",
        "the lunch",
        "the meeting",
        "the rehearsal",
        "the training",
        "the trip",
    ),
    "lent": tuple(
        f"the {name}"
        for name in (
            "bicycle blanket camera drill guitar hammer ladder lamp map radio suitcase tent "
            "umbrella violin"
        ).split()
    ),
    "damage": ("broke", "damaged", "dropped", "forgot", "lost", "scratched"),
    "reason": (
        "had a cold",
        "had a flat tire",
        "had to work late",
        "lost the key",
        "missed the bus",
        "missed the train",
        "overslept",
        "took the wrong train",
    ),
    "success": (
        "the exam",
        "the new flat",
        "the new job",
        "the new school",
        "the prize",
        "the promotion",
        "the victory",
        "the wedding",
    ),
    "fault": (
        "are broken",
        "are dirty",
        "are the wrong color",
        "are the wrong size",
        "are too heavy",
        "are too large",
        "are too small",
    ),
    "work": (
        "a cook",
        "a driver",
        "a gardener",
        "a guide",
        "a librarian",
        "a painter",
        "a teacher",
        "a waiter",
    ),
}
_KINDS = (
    LetterKind(
        "an invitation",
        ("The occasion is {party}.", "It is on {day} at {hour}.", "The place is the {place}."),
        "I would like to invite you to {party}. It takes place on {day} at {hour}, and we meet at "
        "the {place}. Please let me know whether you can come. I would be very happy to see you "
        "there.",
        "Best wishes",
    ),
    LetterKind(
        "a thank-you note",
        ("It is about {count} {things}.", "They came on {day}."),
        "Thank you very much for the {count} {things}. They came on {day}, and I like them a lot. "
        "It was very kind of you to think of me. I hope that we will see each other again soon.",
        "Many thanks",
    ),
    LetterKind(
        "an apology",
        ("{from} {damage} {lent}.", "It happened on {day}."),
        "I am sorry to tell you that I {damage} {lent} on {day}. It was my fault, and I should "
        "have been more careful. Of course I will pay for everything. Please forgive me.",
        "Sorry again",
    ),
    LetterKind(
        "a reminder",
        ("It is about {event}.", "The day is {day}.", "The time is {hour}."),
        "This is a reminder of {event} on {day} at {hour}. Please be there on time, and bring "
        "everything that you need. If you cannot come, please tell me as soon as possible.",
        "See you then",
    ),
    LetterKind(
        "a cancellation",
        ("It is about {event} on {day}.", "The new day is {later}.", "The time is {hour}."),
        "I am sorry, but {event} on {day} cannot take place as planned. I would like to move it to "
        "{later} at {hour}. Please let me know whether this is possible for you.",
        "Kind regards",
    ),
    LetterKind(
        "an order",
        (
            "The order is {count} {things}.",
            "The price of each is {price}.",
            "They go to the {place}.",
        ),
        "I would like to order {count} {things} at the price of {price} each. Please send them to "
        "the {place}, and send me the bill as well. Please tell me when I can expect them.",
        "Kind regards",
    ),
    LetterKind(
        "a complaint",
        ("It is about {count} {things}.", "They {fault}.", "They came on {day}."),
        "On {day} I received {count} {things} from you. Unfortunately, they {fault}. Please send "
        "me new ones, or give me my money back. I hope to hear from you soon.",
        "Kind regards",
    ),
    LetterKind(
        "a letter of congratulation",
        ("It is about {success}.", "{other} told {from} about it."),
        "{other} told me about {success}. Congratulations! I am very happy for you, because I know "
        "how hard you have worked for it. We should celebrate together soon.",
        "All the best",
    ),
    LetterKind(
        "an excuse",
        ("{from} came late to {event}.", "The reason is that {from} {reason}.", "It was on {day}."),
        "Please excuse me for being late to {event} on {day}. The reason is that I {reason}. I "
        "will do my best to be on time from now on. Please tell me what I have missed.",
        "Sorry again",
    ),
    LetterKind(
        "a request",
        ("{from} needs {lent}.", "The day is {day}.", "{from} brings it back on {later}."),
        "Could you please lend me {lent} on {day}? Mine is broken, and I do not want to buy a new "
        "one. I would bring it back on {later}. I promise to take good care of it.",
        "Many thanks",
    ),
    LetterKind(
        "an application",
        ("The job is that of {work}.", "The place is the {place}.", "{from} can begin on {day}."),
        "I would like to apply for the job of {work} at the {place}. I have done this work for "
        "several years, and I enjoy it very much. I could begin on {day}. I would be happy to "
        "introduce myself to you.",
        "Kind regards",
    ),
    LetterKind(
        "a recommendation",
        ("It is for {other}.", "The job is that of {work}.", "The place is the {place}."),
        "I would like to recommend {other} to you as {work}. We worked together at the {place} for "
        "several years. {other} is always friendly, works hard and learns quickly. You can call me "
        "at any time if you have questions.",
        "Kind regards",
    ),
    LetterKind(
        "a lost and found note",
        ("{from} lost {lent}.", "It was on {day} at the {place}.", "The reward is {price}."),
        "I lost {lent} on {day}, probably at the {place}. If you have found it, please call me or "
        "leave a message. You will get a reward of {price}, and I would be very grateful.",
        "Many thanks",
    ),
    LetterKind(
        "a note about a visit",
        ("{from} comes on {day}.", "{other} comes too.", "They leave on {later}."),
        "{other} and I would like to visit you. We will arrive on {day} and leave on {later}. We "
        "will bring something to eat, so you need not prepare anything. Please tell us whether "
        "this suits you.",
        "See you soon",
    ),
)
_ASKS = ("Write {name} from {from} to {to}.", "{from} needs {name} for {to}. Please write it.")


def draw(rng: random.Random) -> tuple[str, str]:
    """Draws a question and the letter that answers it."""
    kind = rng.choice(_KINDS)
    details = {name: rng.choice(values) for name, values in _WORDS.items()}
    details["from"], details["to"], details["other"] = rng.sample(words.NAMES, 3)
    details["day"], details["later"] = rng.sample(DAYS, 2)
    details["name"] = kind.name
    question = " ".join((rng.choice(_ASKS), *kind.details))
    letter = f"Dear {{to}},\n\n{kind.text}\n\n{kind.end},\n{{from}}"
    return fill(question, details), fill(letter, details)
