import random
import re
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.data import answers
from dflash.data.example import SPLITS
from experiments.tiny_family.word_problems import problems, scenes, template, words

NUMBER = re.compile(r"\d+")
EQUATION = re.compile(r"([-+*/() \d]+) = (\d+)")
NAMES = {
    split: {
        scenes.name_of(scene, pieces): (scene, pieces)
        for by_scene in problems.sequences(split).values()
        for scene, some in by_scene
        for pieces in some
    }
    for split in SPLITS
}


def check_independently(question: str, solution: str, equations: int) -> None:
    """Evaluates the steps independently of the generator."""
    assert problems.check(solution) is None
    assert not set("{}[]") & set(question + solution)
    found = EQUATION.findall(solution)
    assert len(found) == equations
    for left, right in found:
        value = eval(re.sub(r"\d+", r"Fraction(\g<0>)", left.strip()), {"Fraction": Fraction})
        assert value == int(right) > 0
    assert solution.splitlines()[-1] == f"#### {found[-1][1]}"


def test_there_are_enough_templates():
    assert len(NAMES["train"]) > 2000
    assert all(len(NAMES[split]) > 100 for split in ("validation", "test"))
    assert len({scene.name for scene in problems.SCENES}) == len(problems.SCENES)
    every = [name for split in SPLITS for name in NAMES[split]]
    assert len(set(every)) == len(every)


@pytest.mark.parametrize("scene", problems.SCENES, ids=lambda scene: scene.name)
def test_every_piece_of_a_scene_holds(scene):
    """Some template uses each opening, event and ending."""
    left = {piece.kind for piece in (*scene.openings, *scene.events, *scene.endings)}
    sequences = sorted(scene.sequences(), key=lambda pieces: scenes.name_of(scene, pieces))
    random.Random(0).shuffle(sequences)
    for pieces in sequences[:60]:
        left -= {piece.kind for piece in pieces}
        one = scenes.compose(scene, pieces)
        equations = sum(piece.num_equations for piece in pieces)
        assert scenes.MIN_STEPS <= equations <= scenes.MAX_STEPS
        for seed in range(3):
            rng = random.Random(seed)
            check_independently(*one.problem(one.draw(rng), rng), equations)
    assert not left


@pytest.mark.parametrize("scene", problems.SCENES, ids=lambda scene: scene.name)
def test_every_phrasing_names_its_numbers(scene):
    """A solution only uses numbers of its question or of earlier steps."""
    for pieces in list(scene.sequences())[::7]:
        one = scenes.compose(scene, pieces)
        rng = random.Random(one.name)
        question, solution = one.problem(one.draw(rng), rng)
        known = {*NUMBER.findall(question), "2", "3"}  # half, twice, three times
        for left, right in EQUATION.findall(solution):
            assert {*NUMBER.findall(left)} <= known, (question, solution)
            known.add(right)


def test_nearly_all_that_is_calculated_is_small():
    found = [
        int(result)
        for one in problems.examples("train", 500)
        for _, result in EQUATION.findall(one.response)
    ]
    assert max(found) <= 200
    assert sum(result <= 100 for result in found) > 0.97 * len(found)


def test_sequences_never_cross_splits():
    sources = {split: [one.source for one in problems.examples(split, 600)] for split in SPLITS}
    assert all(source.removesuffix("@train") in NAMES["train"] for source in sources["train"])
    for split in ("validation", "test"):
        new, known = sources[split][::2], sources[split][1::2]
        assert all(source.removesuffix("@train") in NAMES[split] for source in new)
        assert all(source.removesuffix(f"@{split}") in NAMES["train"] for source in known)
    assert not {*sources["train"]} & {*sources["test"], *sources["validation"]}


def test_no_problem_of_training_is_held_out():
    """Problems with equal templates never have equal numbers, whatever their words."""

    def facts(one):
        name = one.source.partition("@")[0]
        return name, tuple(NUMBER.findall(one.response))

    found = {split: {facts(one) for one in problems.examples(split, 1500)} for split in SPLITS}
    assert not found["train"] & (found["test"] | found["validation"])
    assert len(found["train"]) > 1400


@given(st.sampled_from(SPLITS), st.integers(0, 10**9), st.integers(0, 100))
@settings(max_examples=50)
def test_an_example_follows_from_its_index(split, index, seed):
    one = problems.example(split, index, seed)
    assert one == problems.example(split, index, seed)
    assert one != problems.example(split, index + 1, seed)
    assert len(one.response) < 500
    assert answers.marked(one.response) == NUMBER.findall(one.response)[-1]


@pytest.mark.parametrize(
    ("solution", "problem"),
    [
        ("So 2 * 3 = 6.\n#### 6", None),
        ("So 2 * 3 = 7.\n#### 7", "2 * 3 is 6, not 7"),
        ("So 7 / 2 = 3.\n#### 3", "7 / 2 is 7/2, not 3"),
        ("So 2 * 3 = 6.\n#### 7", "the answer is 7, not that of the last step"),
        ("So 2 * 3 = 6.", "the answer is None, not that of the last step"),
        ("#### 6", "the answer is 6, not that of the last step"),
        ("So 2 / 0 = 6.\n#### 6", "not arithmetic: '2 / 0'"),
    ],
)
def test_wrong_solutions_are_found(solution, problem):
    assert problems.check(solution) == problem


def test_the_notation_of_numbers():
    one = template.Template(
        "odd",
        "a 2..9; k in 3 5 if a * k > 20; b = a * k; b < 30",
        (("{p0} has {a}.",), ("Then {k} times.", "And {k} times.")),
        ("That is [a * k].",),
    )
    rng = random.Random(1)
    for _ in range(30):
        values = one.draw(rng)
        assert 2 <= values["a"] <= 9
        assert values["k"] in (3, 5)
        assert 20 < values["b"] == values["a"] * values["k"] < 30
    question, solution = one.problem({"a": 7, "k": 3, "b": 21}, rng)
    name, rest = question.split(" ", 1)
    assert name in words.NAMES
    assert rest in ("has 7. Then 3 times.", "has 7. And 3 times.")
    assert solution == "That is 7 * 3 = 21.\n#### 21"


def test_pieces_keep_their_numbers_apart():
    opening = scenes.ScenePart("some", "x 5..9", ("{name} has {x}.",))
    event = scenes.ScenePart(
        "add", "a 1..3", ("{next} adds {a}.",), ("{who} and {next}: [x + a].",)
    )
    ending = scenes.ScenePart("now", "", ("How many?",), ("{name} has {x}.",))
    scene = scenes.Scene("made", (opening,), (event,), (ending,))
    one = scenes.compose(scene, (opening, event, event, ending))
    assert one.name == "made:some,add,add,now"
    assert one.numbers == "x0 5..9; a1 1..3; x1 = x0 + a1; a2 1..3; x2 = x1 + a2"
    assert one.sentences[1:] == (("{p1} adds {a1}.",), ("{p2} adds {a2}.",), ("How many?",))
    assert one.steps == ("{p0} and {p1}: [x0 + a1].", "{p1} and {p2}: [x1 + a2].", "{p0} has {x2}.")


def test_a_template_without_numbers_says_so():
    one = template.Template("odd", "a 1..30; b = a - 40", (("{a}",),), ("[a + b]",))
    with pytest.raises(ValueError, match="template odd: no numbers fit"):
        one.draw(random.Random(0))
