"""Tests that functions do what their descriptions say."""

import ast
import random
import re

import pytest

from experiments.tiny_family import functions

NUMBERS = [[], [0], [-3, 5, 40, 5, 12], [100, 7, -6, 0, 24, 24, 99]]
TEXTS = [
    [],
    [""],
    ["tea", "Oslo", "", "12", "tea"],
    ["APPLE", "a" * 60, "bread and butter", "kiosk"],
]
CONDITIONS = {
    r"greater than (\w+)": lambda x, n: x > n,
    r"less than (\w+)": lambda x, n: x < n,
    r"at least (\w+)": lambda x, n: x >= n,
    r"at most (\w+)": lambda x, n: x <= n,
    r"are equal to (\w+)": lambda x, n: x == n,
    r"not equal to (\w+)": lambda x, n: x != n,
    r"between 0 and (\w+)": lambda x, n: x in range(n + 1),
    r"even": lambda x, _: x in range(-100, 102, 2),
    r"odd": lambda x, _: x in range(-99, 102, 2),
    r"divisible by (\w+)": lambda x, n: x in range(-100 * n, 102 * n, n),
    r"positive": lambda x, _: x >= 1,
    r"negative": lambda x, _: x <= -1,
    r"not zero": lambda x, _: bool(x),
    r"longer than (\w+) char": lambda x, n: len(x) > n,
    r"shorter than (\w+) char": lambda x, n: len(x) < n,
    r"exactly (\w+) char": lambda x, n: len(x) == n,
    r"begin with the letter (\w)": lambda x, c: x[:1] == c,
    r"end with the letter (\w)": lambda x, c: x[-1:] == c,
    r"do not contain the letter (\w)": lambda x, c: x.count(c) == 0,
    r"that contain the letter (\w)": lambda x, c: x.count(c) > 0,
    r"upper case": lambda x, _: x != x.lower() and x == x.upper(),
    r"lower case": lambda x, _: x != x.upper() and x == x.lower(),
    r"digits": lambda x, _: bool(re.fullmatch("[0-9]+", x)),
    r"not empty": lambda x, _: len(x) > 0,
    r"empty": lambda x, _: len(x) == 0,
}
OPERATIONS = {
    "counts the": lambda xs, fit: len(fit),
    "the sum of": lambda xs, fit: sum(fit),
    "a list of": lambda xs, fit: fit,
    "the first of": lambda xs, fit: fit[0] if fit else None,
    "the positions of": lambda xs, fit: [i for i in range(len(xs)) if xs[i] in fit],
    "the largest of": lambda xs, fit: sorted(fit)[-1] if fit else None,
    "the average of": lambda xs, fit: sum(fit) / len(fit) if fit else None,
    "the longest of": lambda xs, fit: (
        [x for x in fit if all(len(x) >= len(y) for y in fit)] or [""]
    )[0],
    "how often each": lambda xs, fit: {x: fit.count(x) for x in fit},
    "whether there are": lambda xs, fit: bool(fit),
    "removes the": lambda xs, fit: [x for x in xs if x not in fit],
    "prints the": lambda xs, fit: None,
}


@pytest.fixture(scope="module")
def drawn():
    rng = random.Random(0)
    return [functions.draw(rng) for _ in range(3000)]


def test_functions_do_what_their_description_says(drawn, capsys):
    used = set()
    for question, answer in drawn:
        words = question.replace("`", "")
        pattern = next(one for one in CONDITIONS if re.search(one, words))
        limit = "".join(re.search(pattern, words).groups())
        number = 30 if limit == "limit" else int(limit) if limit.isdigit() else limit
        name = next(one for one in OPERATIONS if one in words)
        used |= {pattern, name}
        scope = {}
        exec(answer, scope)
        function = scope[ast.parse(answer).body[0].name]
        of_texts = re.search(r"char|letter|case|digits|empty", pattern)
        for things in TEXTS if of_texts else NUMBERS:
            fit = [x for x in things if CONDITIONS[pattern](x, number)]
            given = [things, 30] if limit == "limit" else [things]
            assert function(*given) == OPERATIONS[name](things, fit), (question, things)
            printed = capsys.readouterr().out
            assert printed == ("".join(f"{x}\n" for x in fit) if name == "prints the" else "")
    assert used == {*CONDITIONS, *OPERATIONS}


def test_wishes_are_met(drawn):
    for question, answer in drawn:
        (function,) = ast.parse(answer).body
        hinted = function.returns is not None and all(one.annotation for one in function.args.args)
        assert hinted == ("type hints" in question)
        assert (len(function.body) == 2) == ("single statement" in question or "print(" in answer)
        if "a function `" in question:
            assert f"a function `{function.name}` that" in question
        assert ast.get_docstring(function).lower().rstrip(".") in question.lower()
    assert sum("type hints and a single statement" in question for question, _ in drawn) > 50
