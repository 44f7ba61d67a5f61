"""The data set `math`: word problems with worked solutions, any number of them from a seed.

Solutions end in a line "#### 42", the form of GSM8K. What is held out is templates, and bands of
the ranges that numbers are drawn from: no training problem has a number of a held-out band in a
wide range.
"""

import ast
import fractions
import operator
import random
import re
from collections.abc import Iterator

from dflash.data import answers
from dflash.data.example import Example, Split, pair
from dflash.data.word_problems import everyday, quantities
from dflash.data.word_problems.template import Template

TASK = "math"
TEMPLATES: tuple[Template, ...] = everyday.TEMPLATES + quantities.TEMPLATES
HELD_OUT = {
    "validation": ("ages_past", "reading", "tickets", "weights", "tank_leak"),
    "test": ("catch_up", "workers_days", "bakery", "tiles", "ratio", "coins"),
}
HELD_OUT_EXAMPLES = 1000  # in validation and test; any number can be asked for, though
_EQUATION = re.compile(r"([\d(][\d+\-*/() ]*?) = (\d+)")
_EXACT = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def templates_of(split: Split) -> tuple[Template, ...]:
    """The templates that belong to a split alone."""
    held_out = {name for names in HELD_OUT.values() for name in names}
    if split == "train":
        return tuple(template for template in TEMPLATES if template.name not in held_out)
    return tuple(template for template in TEMPLATES if template.name in HELD_OUT[split])


def examples(split: Split, count: int, seed: int = 0) -> Iterator[Example]:
    """Yields the first `count` problems of a split."""
    for index in range(count):
        yield example(split, index, seed)


def example(split: Split, index: int, seed: int = 0) -> Example:
    """Makes one problem; equal arguments give equal problems.

    Of the held-out problems those of even index come from held-out templates, the others from
    training's templates with numbers of held-out bands.

    Raises:
      ValueError: its solution does not hold, which is a mistake in the template.
    """
    rng = random.Random(f"{seed}/{split}/{index}")
    held_out_band = split != "train" and index % 2
    template = rng.choice(templates_of("train" if held_out_band else split))
    band = split if held_out_band else "train"
    question, solution = template.problem(rng, band)
    problem = check(solution)
    if problem:
        raise ValueError(f"template {template.name}: {problem}")
    return pair(TASK, f"{template.name}@{band}", question, solution)


def check(solution: str) -> str | None:
    """What is wrong with a solution: evaluates every equation in it; None if nothing is.

    The last equation must have the final answer as its result.
    """
    equations = _EQUATION.findall(solution)
    for expression, result in equations:
        try:
            value = _exact(ast.parse(expression.strip(), mode="eval").body)
        except (SyntaxError, ZeroDivisionError):
            return f"not arithmetic: {expression!r}"
        if value != int(result):
            return f"{expression} is {value}, not {result}"
    answer = answers.marked(solution)
    if not equations or answer != equations[-1][1]:
        return f"the answer is {answer}, not that of the last step"
    return None


def _exact(node: ast.expr) -> fractions.Fraction:
    if isinstance(node, ast.Constant):
        return fractions.Fraction(node.value)
    return _EXACT[type(node.op)](_exact(node.left), _exact(node.right))
