"""Data set `copying`: a few words to repeat several times.

Many answers of `code` and `chat` repeat parts of the prompt. Here nearly every token of an answer
can only be predicted by copying an earlier one, so a small model learns to copy.
"""

import keyword
import random
import sys

TASK = "copying"
_TIMES, _FEW = 4, (4, 20)  # repetitions, and the range of the number of words
_KNOWN = (
    "apple bag blue book box card coin day egg eight five four gold gray green item key line list "
    "name nine one page pen red seven shell six stamp ten text three time tree two value week word"
).split()
_NAMES = sorted({*keyword.kwlist, *sys.stdlib_module_names})
_SIGNS = "abcdefghijklmnopqrstuvwxyz0123456789"
_CONSONANTS, _VOWELS = "bcdfghjklmnprstvwxz", "aeiou"


def draw(rng: random.Random) -> tuple[str, str]:
    """Draws a question and its answer."""
    count = rng.randint(*_FEW)
    kinds = (
        rng.sample(_KNOWN, count),
        [rng.choice(_SIGNS) for _ in range(count)],
        rng.sample(_NAMES, count),
        rng.sample(_NAMES, count),
        [_word(rng) for _ in range(count // 2)],
    )
    text = " ".join(rng.choice(kinds))
    return f"Repeat this text {_TIMES} times.\n\n{text}", "\n".join([text] * _TIMES)


def _word(rng: random.Random) -> str:
    """Draws a random word that hardly occurs elsewhere, or a number."""
    if rng.random() < 0.15:
        return str(rng.randint(0, 999))
    syllables = range(rng.randint(2, 4))
    word = "".join(rng.choice(_CONSONANTS) + rng.choice(_VOWELS) for _ in syllables)
    return word.capitalize() if rng.random() < 0.2 else word
