"""Data set `math`: word problems with worked solutions, any number of them from a seed.

Solutions end in a line "#### 42", as in GSM8K. A template is a scene with a sequence of events.
Some templates are held out as a whole. Of the templates of the train split, some problems are held
out: their split depends on a hash of the template and the numbers, and not on the words.
"""

import ast
import collections
import fractions
import functools
import operator
import random
import re
from collections.abc import Iterator, Mapping, Sequence

from dflash.data import answers
from dflash.data.example import Example, Split, pair, split_of
from experiments.tiny_family.word_problems import belongings, chains, efforts, places, scenes
from experiments.tiny_family.word_problems.scenes import Scene, ScenePart

TASK = "math"
SCENES: tuple[Scene, ...] = (
    *belongings.SCENES,
    *chains.SCENES,
    *places.SCENES,
    *efforts.SCENES,
)
STEP_WEIGHTS = {2: 0.35, 3: 0.4, 4: 0.25}  # share of the problems, by equations in the solution
HELD_OUT_EXAMPLES = 1000  # default number in validation and test
_EQUATION = re.compile(r"([\d(][\d+\-*/() ]*?) = (\d+)")
_EXACT = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}

Sequences = Mapping[int, Sequence[tuple[Scene, Sequence[tuple[ScenePart, ...]]]]]


@functools.cache
def sequences(split: Split) -> Sequences:
    """Returns the event sequences of a split, by number of equations and then by scene."""
    by_steps: dict[int, dict[Scene, list]] = collections.defaultdict(dict)
    for scene in SCENES:
        for pieces in scene.sequences():
            if split_of(scenes.name_of(scene, pieces)) == split:
                steps = sum(piece.num_equations for piece in pieces)
                by_steps[steps].setdefault(scene, []).append(pieces)
    return {steps: tuple(by_scene.items()) for steps, by_scene in sorted(by_steps.items())}


def examples(split: Split, count: int, seed: int = 0) -> Iterator[Example]:
    """Yields the first `count` problems of a split."""
    for index in range(count):
        yield example(split, index, seed)


def example(split: Split, index: int, seed: int = 0) -> Example:
    """Generates a problem, which depends on the arguments alone.

    Held-out problems with an even index use held-out templates. The others use templates of the
    train split with numbers that the train split does not contain.

    Raises:
      ValueError: The solution is wrong because of a mistake in the template.
    """
    rng = random.Random(f"{seed}/{split}/{index}")
    known = split != "train" and index % 2  # a template of the train split
    templates = sequences("train" if known else split)
    numbers = split if known else "train"
    while True:
        (steps,) = rng.choices(list(STEP_WEIGHTS), list(STEP_WEIGHTS.values()))
        scene, candidates = rng.choice(templates[steps])
        template = scenes.compose(scene, rng.choice(candidates))
        values = template.draw(rng)
        if split_of(f"{template.name} {sorted(values.items())}") == numbers:
            break
    question, solution = template.problem(values, rng)
    problem = check(solution)
    if problem:
        raise ValueError(f"template {template.name}: {problem}")
    return pair(TASK, f"{template.name}@{numbers}", question, solution)


def check(solution: str) -> str | None:
    """Evaluates every equation of a solution; returns a description of the first error, or None.

    The result of the last equation must be the final answer.
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
