"""Tests that evaluate the lists of calculations independently."""

import re
from fractions import Fraction

import pytest

from dflash.data.example import SPLITS
from experiments.tiny_family import arithmetic, numbered

LINE = re.compile(r"(\d+) ([-+*/]) (\d+) = (\d+)")


@pytest.mark.parametrize("split", SPLITS)
def test_every_calculation_holds(split):
    for index in range(200):
        one = example(split, index)
        asked = one.prompt[0]["content"].splitlines()[1:]
        given = one.response.splitlines()
        assert len(asked) == len(given) == arithmetic.CALCULATIONS
        for left, line in zip(asked, given, strict=True):
            first, sign, second, result = LINE.fullmatch(line).groups()
            assert left == f"{first} {sign} {second}"
            assert eval(f"Fraction({first}) {sign} {second}", {"Fraction": Fraction}) == int(result)
            assert 0 < int(result) <= arithmetic.LARGEST
            assert 0 < int(first) <= arithmetic.LARGEST


def test_every_kind_of_calculation_occurs():
    lines = [line for one in map(one_list, range(300)) for line in one]
    signs = [LINE.fullmatch(line)[2] for line in lines]
    assert all(signs.count(sign) > len(lines) / 10 for sign in "+-*/")


def one_list(index: int) -> list[str]:
    return example("train", index).response.splitlines()


def example(split, index):
    return numbered.example(arithmetic.TASK, split, index, arithmetic.draw)
