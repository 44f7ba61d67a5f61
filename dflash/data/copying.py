"""The data set `copying`: words and lines to repeat, and entries of made-up lists to find.

Nothing in an answer can be known but from its prompt, so this is where a small model learns to
look there, which most answers of `code` and `chat` consist of. Half of the examples ask for a few
words several times over, which is learned first: nearly every token of theirs is a repetition.
"""

import random

TASK = "copying"
_TIMES, _FEW = 4, (3, 12)  # repetitions of so few words
_LINES, _WORDS = (2, 6), (2, 6)  # of a text to repeat
_ENTRIES, _ASKED = (4, 10), 6  # of a list, and of these at most
_BETWEEN = (" ", " ", ", ", ".", " = ", "_")  # words of a line
_KNOWN = (
    "apple bag blue book box card coin day egg eight five four gold gray green item key line list "
    "name nine one page pen red seven shell six stamp ten text three time tree two value week word"
).split()
_SIGNS = "abcdefghijklmnopqrstuvwxyz0123456789"
_CONSONANTS, _VOWELS = "bcdfghjklmnprstvwxz", "aeiou"


def draw(rng: random.Random, index: int) -> tuple[str, str]:
    """Draws a question, of a kind by its number, and its answer."""
    ask = (_repeat_words, _repeat_text, _repeat_words, _find)[index % 4]
    return ask(rng)


def _repeat_words(rng: random.Random) -> tuple[str, str]:
    count = rng.randint(*_FEW)
    kinds = (
        rng.sample(_KNOWN, count),
        [rng.choice(_SIGNS) for _ in range(count)],
        [_word(rng) for _ in range(max(count // 2, 2))],
    )
    text = " ".join(rng.choice(kinds))
    return f"Repeat this text {_TIMES} times.\n\n{text}", "\n".join([text] * _TIMES)


def _repeat_text(rng: random.Random) -> tuple[str, str]:
    lines = []
    for _ in range(rng.randint(*_LINES)):
        words = [_word(rng) for _ in range(rng.randint(*_WORDS))]
        lines.append(" " * rng.choice((0, 0, 4)) + rng.choice(_BETWEEN).join(words))
    text = "\n".join(lines).strip()
    return f"Repeat this text.\n\n{text}", text


def _find(rng: random.Random) -> tuple[str, str]:
    keys = list(dict.fromkeys(_word(rng) for _ in range(rng.randint(*_ENTRIES))))
    entries = {key: " ".join(_word(rng) for _ in range(rng.randint(1, 3))) for key in keys}
    listed = "\n".join(f"- {key}: {value}" for key, value in entries.items())
    asked = rng.sample(keys, min(_ASKED, len(keys)))
    answer = "\n".join(f"{key}: {entries[key]}" for key in asked)
    return f"{listed}\n\nWhat stands beside these? {', '.join(asked)}", answer


def _word(rng: random.Random) -> str:
    """A word that hardly occurs anywhere else, or a number."""
    if rng.random() < 0.15:
        return str(rng.randint(0, 999))
    syllables = range(rng.randint(2, 4))
    word = "".join(rng.choice(_CONSONANTS) + rng.choice(_VOWELS) for _ in syllables)
    return word.capitalize() if rng.random() < 0.2 else word
