"""Scenes: word problems that consist of an opening, events and a question.

Each piece of a scene is independent of the others. It uses the notation of `template`, with single
letters for its own numbers: `x` is the amount before the piece, and the last bracket of its steps
is the amount after it. `{name}` is the main person, `{next}` a person who first appears in this
piece, and `{who}` the person who first appeared in the previous piece. `compose` joins pieces to a
template.
"""

import dataclasses
import functools
import itertools
import re
from collections.abc import Iterator

from experiments.tiny_family.word_problems.template import Template

# Clauses that draw numbers such that nearly all results stay below 100.
GAIN = "a 2..30 if x + a < 101"
LOSE = "a 2..30 if a + 1 < x"
DOUBLE, TRIPLE = "x < 51", "x < 34"
HALF = "x / 2 > 1"
SHARE = "k 2..9 if x / k > 1"
GROUPS = "k 2..9; m 2..9"
GROUPS_GAINED = "k 2..9; m 2..9 if x + k * m < 101"
GROUPS_LOST = "k 2..9; m 2..9 if k * m + 1 < x"
MORE = "a 2..20 if x + x + a < 121"
FEWER = "x < 61; a 2..20 if a + 1 < x"
PRICE = "p 2..9 if x * p < 101"

MIN_STEPS, MAX_STEPS = 2, 4  # equations in a solution
MAX_EVENTS = 3
_LETTER = re.compile(r"\b[a-z]\b")
_BRACED_LETTER = re.compile(r"\{([a-z])\}")
_BRACKET = re.compile(r"\[(?:([a-z]) = )?([^\]]+)\]")


@dataclasses.dataclass(frozen=True)
class ScenePart:
    """Part of a scene.

    Attributes:
      kind: Name within the scene.
      numbers: Clauses that draw the numbers of the piece; may be empty.
      phrasings: Alternative sentences of the question.
      steps: Lines of the solution; an opening without steps names its own amount `x`.
    """

    kind: str
    numbers: str
    phrasings: tuple[str, ...]
    steps: tuple[str, ...] = ()

    @property
    def num_equations(self) -> int:
        """Number of equations in the steps of the piece."""
        return sum(len(_BRACKET.findall(step)) for step in self.steps)


@dataclasses.dataclass(frozen=True)
class Scene:
    """Pieces that problems of one kind consist of.

    Attributes:
      name: Unique name of the scene.
      openings: Pieces of which one begins a problem.
      events: Pieces of which some follow, each at most once.
      endings: Pieces of which one asks the question.
    """

    name: str
    openings: tuple[ScenePart, ...]
    events: tuple[ScenePart, ...]
    endings: tuple[ScenePart, ...]

    def sequences(self) -> Iterator[tuple[ScenePart, ...]]:
        """Yields every sequence of pieces whose solution has MIN_STEPS to MAX_STEPS equations."""
        for count in range(1, MAX_EVENTS + 1):
            for middle in itertools.permutations(self.events, count):
                for opening, ending in itertools.product(self.openings, self.endings):
                    pieces = (opening, *middle, ending)
                    steps = sum(piece.num_equations for piece in pieces)
                    if MIN_STEPS <= steps <= MAX_STEPS:
                        yield pieces


def name_of(scene: Scene, pieces: tuple[ScenePart, ...]) -> str:
    """Returns the name of the template of a sequence, such as "bus:stop,gain,lose,now"."""
    return f"{scene.name}:{','.join(piece.kind for piece in pieces)}"


@functools.lru_cache(maxsize=2**16)
def compose(scene: Scene, pieces: tuple[ScenePart, ...]) -> Template:
    """Joins pieces to a template, with unique names for the numbers of each piece."""
    clauses: list[str] = []
    sentences: list[tuple[str, ...]] = []
    steps: list[str] = []
    for place, piece in enumerate(pieces):
        placed = _Placed(place, piece)
        clauses += placed.clauses()
        sentences.append(tuple(map(placed.worded, piece.phrasings)))
        steps += map(placed.step, piece.steps)
    return Template(name_of(scene, pieces), "; ".join(clauses), tuple(sentences), tuple(steps))


@dataclasses.dataclass(frozen=True)
class _Placed:
    """Part of a scene with its place, which the names of its numbers include (a2, x1)."""

    place: int
    piece: ScenePart

    def clauses(self) -> list[str]:
        """Returns the clauses of the numbers and of the results of the piece."""
        drawn = [self._renamed(clause) for clause in self.piece.numbers.split("; ") if clause]
        brackets = [bracket for step in self.piece.steps for bracket in _BRACKET.findall(step)]
        names = [name for name, _ in brackets[:-1]] + ["x"]  # without brackets, one name
        results = [
            f"{name}{self.place} = {self._renamed(expression)}"
            for name, (_, expression) in zip(names, brackets, strict=False)
        ]
        return [*drawn, *results]

    def worded(self, text: str) -> str:
        text = text.replace("{who}", f"{{p{max(self.place - 1, 0)}}}")
        text = text.replace("{next}", f"{{p{self.place}}}").replace("{name}", "{p0}")
        return _BRACED_LETTER.sub(lambda match: f"{{{self._letter(match[1])}}}", text)

    def step(self, text: str) -> str:
        return _BRACKET.sub(lambda match: f"[{self._renamed(match[2])}]", self.worded(text))

    def _renamed(self, text: str) -> str:
        return _LETTER.sub(lambda match: self._letter(match[0]), text)

    def _letter(self, letter: str) -> str:
        before = letter == "x" and self.place > 0
        return f"{letter}{self.place - before}"
