"""Data set `arithmetic`: lists of the small calculations that word problems consist of.

A calculation takes about forty tokens in a word problem and fifteen in a list, so lists show a
model more calculations per token.
"""

import random
from collections.abc import Callable

TASK = "arithmetic"
CALCULATIONS = 16  # per list
LARGEST = 100  # largest number


def draw(rng: random.Random) -> tuple[str, str]:
    """Draws a question and its answer."""
    lines = [rng.choice(_KINDS)(rng) for _ in range(CALCULATIONS)]
    question = "\n".join(["Calculate:", *(left for left, _ in lines)])
    return question, "\n".join(f"{left} = {result}" for left, result in lines)


def _sum(rng: random.Random) -> tuple[str, int]:
    result = rng.randint(2, LARGEST)
    first = rng.randint(1, result - 1)
    return f"{first} + {result - first}", result


def _difference(rng: random.Random) -> tuple[str, int]:
    first = rng.randint(2, LARGEST)
    second = rng.randint(1, first - 1)
    return f"{first} - {second}", first - second


def _factors(rng: random.Random) -> tuple[int, int]:
    """Draws factors up to 9, or a number to double or triple."""
    if rng.random() < 0.5:
        return rng.randint(2, 9), rng.randint(2, 9)
    small = rng.randint(2, 3)
    return rng.randint(1, LARGEST // small), small


def _product(rng: random.Random) -> tuple[str, int]:
    left, right = _factors(rng)
    return f"{left} * {right}", left * right


def _quotient(rng: random.Random) -> tuple[str, int]:
    result, divisor = _factors(rng)
    return f"{result * divisor} / {divisor}", result


_KINDS: tuple[Callable[[random.Random], tuple[str, int]], ...] = (
    _sum,
    _sum,
    _difference,
    _difference,
    _product,
    _quotient,
)
