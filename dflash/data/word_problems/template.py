"""Templates of word problems: a small notation, and how it becomes questions and solutions.

    Template(
        "change",
        "n 3..40; p 2..9; paid in 50 100 200",
        ("{name} buys {n} {things} at ${p} each and pays with ${paid}. How much is the change?",),
        ("The {things} cost [cost = n * p] dollars.", "The change is [paid - cost] dollars."),
    )

The second argument says how numbers are drawn, clause by clause: `n 3..40` from a range, `p in 2 5`
from a list, `d = v * t` from others, and `a > b` must hold. In the solution `[cost = n * p]` shows
as "12 * 3 = 36" and names the 36. Numbers are drawn again until everything is a positive integer.
The last bracket is the answer.
"""

import ast
import dataclasses
import functools
import operator
import random
import re
from collections.abc import Callable, Mapping

from dflash.data.word_problems import words

WIDE = 20  # values: ranges at least this wide have bands that are held out
BANDS: Mapping[str, tuple[float, float]] = {"validation": (0.30, 0.40), "test": (0.60, 0.70)}
_MAX_DRAWS = 10_000
_STEP = re.compile(r"\[(?:(\w+) = )?([^\]]+)\]")
_NAMED = re.compile(r"\b[a-z]\w*\b")
_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Gt: operator.gt,
    ast.Lt: operator.lt,
    ast.NotEq: operator.ne,
}

Choose = Callable[[random.Random], int]


class _Unfit(Exception):
    """The numbers drawn do not give positive integers."""


@dataclasses.dataclass(frozen=True)
class Template:
    """A kind of problem; the module describes the notation.

    Attributes:
      name: unique among all templates.
      numbers: how they are drawn.
      questions: phrasings of the same question.
      steps: lines of the solution.
    """

    name: str
    numbers: str
    questions: tuple[str, ...]
    steps: tuple[str, ...]

    def problem(self, rng: random.Random, band: str = "train") -> tuple[str, str]:
        """Makes a problem.

        Args:
          rng: all that is random comes from it.
          band: "train" draws wide ranges without the bands held out, "validation" and "test"
            from their band alone.
        Returns:
          The question, and the solution that ends in "#### answer".
        """
        for _ in range(_MAX_DRAWS):
            try:
                values = self._draw(rng, band)
                solution = self._solve(values)
            except _Unfit:
                continue
            fill = {**words.draw(rng), **values}
            return rng.choice(self.questions).format_map(fill), solution.format_map(fill)
        raise ValueError(f"template {self.name}: no numbers fit in {_MAX_DRAWS} draws")

    def _draw(self, rng: random.Random, band: str) -> dict[str, int]:
        values: dict[str, int] = {}
        for clause in self.numbers.split("; "):
            name, choices = _choices(clause, band)
            if choices is not None:
                values[name] = rng.choice(choices)
            elif " = " in clause:
                name, _, expression = clause.partition(" = ")
                values[name] = _positive(expression, values)
            elif not _evaluate(_parse(clause), values):
                raise _Unfit
        return values

    def _solve(self, values: dict[str, int]) -> str:
        values = dict(values)
        answer = 0

        def show(match: re.Match) -> str:
            nonlocal answer
            name, expression = match.groups()
            answer = _positive(expression, values)
            if name:
                values[name] = answer
            return f"{_NAMED.sub(lambda m: str(values[m.group()]), expression)} = {answer}"

        lines = [_STEP.sub(show, step) for step in self.steps]
        return "\n".join([*lines, f"#### {answer}"])


def in_band(values: range, band: str) -> range:
    """The part of a wide range that is held out for a band."""
    low, high = BANDS[band]
    return values[int(low * len(values)) : int(high * len(values))]


@functools.cache
def _choices(clause: str, band: str) -> tuple[str, tuple[int, ...] | None]:
    """(name, what may be drawn), the latter None for clauses that draw nothing."""
    name, _, rest = clause.partition(" in ")
    if rest:
        return name, tuple(map(int, rest.split()))
    name, values = _parse_range(clause)
    if values is None or len(values) < WIDE:
        return name, None if values is None else tuple(values)
    if band in BANDS:
        return name, tuple(in_band(values, band))
    held_out = {value for held in BANDS for value in in_band(values, held)}
    return name, tuple(value for value in values if value not in held_out)


def _parse_range(clause: str) -> tuple[str, range | None]:
    match = re.fullmatch(r"(\w+) (\d+)\.\.(\d+)", clause)
    if match is None:
        return clause, None
    return match[1], range(int(match[2]), int(match[3]) + 1)


@functools.cache
def _parse(expression: str) -> ast.expr:
    return ast.parse(expression, mode="eval").body


def _positive(expression: str, values: Mapping[str, int]) -> int:
    value = _evaluate(_parse(expression), values)
    if value <= 0:
        raise _Unfit
    return value


def _evaluate(node: ast.expr, values: Mapping[str, int]) -> int:
    """Exact integer arithmetic; raises _Unfit where a division leaves a remainder."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        return values[node.id]
    if isinstance(node, ast.Compare):
        compare = _OPERATORS[type(node.ops[0])]
        return compare(_evaluate(node.left, values), _evaluate(node.comparators[0], values))
    left, right = _evaluate(node.left, values), _evaluate(node.right, values)
    if isinstance(node.op, ast.Div):
        if not right or left % right:
            raise _Unfit
        return left // right
    return _OPERATORS[type(node.op)](left, right)
