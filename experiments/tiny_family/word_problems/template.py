"""Templates of word problems: a small notation for questions and solutions.

    Template(
        "change",
        "n 2..9; p 2..9; paid in 50 100 if n * p < paid; cost = n * p",
        (("{name} buys {n} {things} at ${p} each and pays with ${paid}.",), ("What is left?",)),
        ("The {things} cost [n * p] dollars.", "What is left is [paid - cost] dollars."),
    )

The second argument has the clauses that determine the numbers: `n 2..9` draws from a range, `p in 2
5` from a list, both subject to an optional condition after `if`; `d = v * t` computes a number from
others; `a > b` is a condition that must hold. The third argument has the sentences of the question,
each with its phrasings. The fourth has the steps of the solution, in which `[n * p]` is rendered as
"12 * 3 = 36". Numbers are drawn again until all results are positive integers. The last bracket is
the answer.
"""

import ast
import dataclasses
import functools
import operator
import random
import re
from collections.abc import Mapping

from experiments.tiny_family.word_problems import words

_MAX_DRAWS = 10_000
_MAX_TRIES = 40  # per number, to meet its condition
_STEP = re.compile(r"\[([^\]]+)\]")
_NAMED = re.compile(r"\b[a-z]\w*\b")
_RANGE = re.compile(r"(\w+) (\d+)\.\.(\d+)")
_LIST = re.compile(r"(\w+) in ([\d ]+)")
_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Gt: operator.gt,
    ast.Lt: operator.lt,
    ast.NotEq: operator.ne,
}


class _Unfit(Exception):
    """The drawn numbers violate a condition, or a result is not a positive integer."""


@dataclasses.dataclass(frozen=True)
class Template:
    """Template of problems; the module docstring describes the notation.

    Attributes:
      name: Unique name of the template.
      numbers: Clauses that draw the numbers.
      sentences: Sentences of the question, each as a tuple of alternative phrasings.
      steps: Lines of the solution.
    """

    name: str
    numbers: str
    sentences: tuple[tuple[str, ...], ...]
    steps: tuple[str, ...]

    def draw(self, rng: random.Random) -> dict[str, int]:
        """Draws numbers by name that meet all conditions; all randomness comes from `rng`."""
        for _ in range(_MAX_DRAWS):
            try:
                values = self._draw(rng)
                self._solve(values)
            except _Unfit:
                continue
            return values
        raise ValueError(f"template {self.name}: no numbers fit in {_MAX_DRAWS} draws")

    def problem(self, values: Mapping[str, int], rng: random.Random) -> tuple[str, str]:
        """Renders a problem.

        Args:
          values: Numbers of the problem, from `draw`.
          rng: Random generator that chooses words and phrasings.
        Returns:
          The question, and the solution that ends in "#### answer".
        """
        fill = {**words.draw(rng), **values}
        question = " ".join(map(rng.choice, self.sentences))
        return question.format_map(fill), self._solve(values).format_map(fill)

    def _draw(self, rng: random.Random) -> dict[str, int]:
        values: dict[str, int] = {}
        for clause in self.numbers.split("; "):
            drawn, _, condition = clause.partition(" if ")
            name, choices = _choices(drawn)
            if choices:
                values[name] = _draw_fitting(rng, name, choices, condition, values)
            elif " = " in clause:
                name, _, expression = clause.partition(" = ")
                values[name] = _positive(expression, values)
            elif not _evaluate(_parse(clause), values):
                raise _Unfit
        return values

    def _solve(self, values: Mapping[str, int]) -> str:
        answer = 0

        def show(match: re.Match) -> str:
            nonlocal answer
            answer = _positive(match[1], values)
            return f"{_NAMED.sub(lambda m: str(values[m.group()]), match[1])} = {answer}"

        lines = [_STEP.sub(show, step) for step in self.steps]
        return "\n".join([*lines, f"#### {answer}"])


def _draw_fitting(
    rng: random.Random,
    name: str,
    choices: tuple[int, ...],
    condition: str,
    values: Mapping[str, int],
) -> int:
    for _ in range(_MAX_TRIES):
        value = rng.choice(choices)
        try:
            if not condition or _evaluate(_parse(condition), {**values, name: value}):
                return value
        except _Unfit:
            continue
    raise _Unfit


@functools.cache
def _choices(clause: str) -> tuple[str, tuple[int, ...]]:
    """Parses a clause as (name, choices); the choices are empty if it draws no number."""
    if match := _RANGE.fullmatch(clause):
        return match[1], tuple(range(int(match[2]), int(match[3]) + 1))
    if match := _LIST.fullmatch(clause):
        return match[1], tuple(map(int, match[2].split()))
    return clause, ()


@functools.cache
def _parse(expression: str) -> ast.expr:
    return ast.parse(expression, mode="eval").body


def _positive(expression: str, values: Mapping[str, int]) -> int:
    value = _evaluate(_parse(expression), values)
    if value <= 0:
        raise _Unfit
    return value


def _evaluate(node: ast.expr, values: Mapping[str, int]) -> int:
    """Evaluates an expression in integers; raises _Unfit if a division leaves a remainder."""
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
