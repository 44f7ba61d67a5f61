"""Tests that letters contain the details of the question and no placeholders."""

import random
import re

from experiments.tiny_family import letters
from experiments.tiny_family.word_problems import words


def test_a_letter():
    rng = random.Random(0)
    question, letter = next(
        one for one in iter(lambda: letters.draw(rng), None) if one[0].startswith("Write an order")
    )
    asked = re.fullmatch(
        r"Write an order from (\w+) to (\w+)\. The order is (\d+) (\w+)\. "
        r"The price of each is (\$\d+)\. They go to the (\w+)\.",
        question,
    )
    writer, reader, count, things, price, place = asked.groups()
    assert letter == (
        f"Dear {reader},\n\nI would like to order {count} {things} at the price of {price} each. "
        f"Please send them to the {place}, and send me the bill as well. Please tell me when I can "
        f"expect them.\n\nKind regards,\n{writer}"
    )


def test_letters_say_what_was_asked():
    rng = random.Random(1)
    facts = {*words.NAMES, *words.PLACES, *words.THINGS, *letters.DAYS}
    seen = set()
    for _ in range(2000):
        question, letter = letters.draw(rng)
        assert "{" not in question + letter
        said, asked = ({word.strip(".,!?") for word in text.split()} for text in (letter, question))
        assert asked & facts == said & facts
        assert {word for word in asked if word[-1:].isdigit()} <= said
        lines = letter.split("\n")
        reader, writer = lines[0].removeprefix("Dear ").removesuffix(","), lines[-1]
        assert reader != writer
        assert {reader, writer} <= asked & {*words.NAMES}
        seen.add(lines[2].split(".")[0].split()[0])
    assert len(seen) > 8
