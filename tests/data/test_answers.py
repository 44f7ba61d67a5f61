"""Final answers: found, and compared."""

import fractions

import pytest

from dflash.data import answers


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"So \boxed{5}, no: \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"It is \boxed {7} of 9.", "7"),
        (r"#### 3, says \fbox{4}", "4"),
        ("First 3.\n#### 1,234\nThat is 5 more.", "1,234"),
        ("It costs $1,234.50.", "1,234.50"),
        ("5 - 8 = -3", "-3"),
        ("from 5-8 to 5-9", "9"),
        ("12,3456", "3456"),
        (r"an open \boxed{5", "5"),
        ("nothing at all", None),
        ("#### ", None),
    ],
)
def test_the_answer_is_found(text, answer):
    assert answers.find(text) == answer


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("1,000", "1000.0"),
        ("$18", "18"),
        (r"\$18.00", "18"),
        (r"50\%", "50"),
        (r"90^\circ", "90"),
        (r"\dfrac{2}{4}", "0.5"),
        (r"\frac12", "1/2"),
        (r"-\frac{1}{2}", "-0.5"),
        ("x = 5", "5"),
        (r"5\text{ cm}^2", "5"),
        (r"\text{(C)}", "C"),
        (r"\left( 3, \frac{\pi}{2} \right)", r"(3,\frac{\pi}{2})"),
        (r"\text{Evelyn}", "Evelyn"),
        ("070", "70"),
        ("7.", "7"),
    ],
)
def test_the_same_answers(one, other):
    assert answers.same(one, other)
    assert answers.same(other, one)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("18", "-18"),
        ("1", "10"),
        (r"1\frac{1}{2}", "11/2"),  # one and a half
        (r"\frac{3}{4}\pi", "0.75"),
        ("(1,000)", "1000"),
        ("1,00", "100"),
        ("1/0", "0"),
        ("", "0"),
        ("2x", "x"),
        ("1e2", "1e3"),
    ],
)
def test_different_answers(one, other):
    assert not answers.same(one, other)


def test_numbers_are_exact_and_bounded():
    assert answers.number(r"\frac{1}{3}") == fractions.Fraction(1, 3)
    assert answers.number("0.1") == fractions.Fraction(1, 10)
    assert answers.number(r"\frac{1}{0}") is None
    assert answers.number("1e999999999") is None  # not a number that fits any memory
    assert answers.number("9" * 5000) is None


def test_agreement_needs_an_answer_to_agree_with():
    assert answers.agree(r"\boxed{4}", "#### 4") is True
    assert answers.agree("no idea", "#### 4") is False
    assert answers.agree(r"\boxed{4}", "a poem") is None
