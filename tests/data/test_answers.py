import pytest

from dflash.data import answers


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"So \boxed{5}, no: \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\}}", r"\}"),
        (r"\boxed{\\{3}}", r"\\{3}"),
        ("x - 5 and then x-5", "5"),
        ("It is −5.", "-5"),
        (r"It is \boxed {7} of 9.", "7"),
        (r"#### 3, says \fbox{4}", "4"),
        ("First 3.\n#### 1,234\nThat is 5 more.", "1,234"),
        ("It costs $1,234.50.", "1,234.50"),
        ("5 - 8 = -3", "-3"),
        ("from 5-8 to 5-9", "9"),
        ("12,3456", "3456"),
        (r"an open \boxed{5", "5"),
        ("#### 3\nNo:\n#### 4\n####", "4"),
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
        (r"\$18.00", "18"),
        (r"50\%", "50"),
        (r"90^\circ", "90"),
        (r"\dfrac{2}{4}", "0.5"),
        (r"\frac12", "1/2"),
        ("x = 5", "5"),
        (r"5\text{ cm}^2", "5"),
        (r"\text{(C)}", "C"),
        (r"\left( 3, \frac{\pi}{2} \right)", r"(3,\frac{\pi}{2})"),
        ("10{,}000", "10000"),
        (r"10,\!000", "10000"),
        (r"5\frac{1}{2}", "5.5"),
        (r"-5\tfrac12", "-11/2"),
        ("5 1/2", r"\frac{11}{2}"),
        (r"\frac{\sqrt3}{2}", r"\frac{\sqrt{3}}{2}"),
        (r"\frac{1}{\sqrt{2}}", r"\frac{\sqrt{2}}{2}"),
        (r"\sqrt[3]{8}", "2"),
        (r"1.5\times10^3", "1500"),
        ("10^{-2}", "0.01"),
        ("x + x", "2x"),
        ("(x+1)^2", "x^2+2x+1"),
        (r"2k\pi", r"2\pi k"),
        ("1, -2", "-2, 1"),
        (r"\{1, \frac12\}", r"\{0.5, 1\}"),
        (r"[0, \frac{1}{2})", "[0,.5)"),
        ("3:30", "3:30"),
    ],
)
def test_the_same_answers(one, other):
    assert answers.same(one, other)
    assert answers.same(other, one)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (r"1\frac{1}{2}", "11/2"),  # one and a half
        (r"\frac{3}{4}\pi", "0.75"),
        ("(1,000)", "1000"),
        ("1,00", "100"),
        ("1/0", "0"),
        ("", "0"),
        ("1e2", "1e3"),
        ("5 1/2", "51/2"),
        ("3 4", "34"),
        ("1, 234", "1234"),
        ("(1, 2)", "(2, 1)"),
        ("(1, 2)", "[1, 2]"),
        ("1/2x", r"\frac{1}{2x}"),
        ("1/2x", r"\frac{x}{2}"),
        (r"\sqrt12", r"\sqrt{12}"),
        (r"2\frac{3}{2}", "3"),
        ("2x", "2y"),
        ("x-y", "y-x"),
        ("night", "thing"),
        (r"\pi", "3.14"),
        ("2516", "2516_8"),
    ],
)
def test_different_answers(one, other):
    assert not answers.same(one, other)


@pytest.mark.parametrize(
    "answer",
    [
        "9^{9^{9^9}}", "1e999999999", "(" * 400 + "1" + ")" * 400, "9" * 900 + "^{999}",
        "*".join(["9^{999}"] * 100), r"\frac{1}{0}", "0^{-1}", r"\sqrt{-1}", "1-" * 500, "9" * 5000,
        r"\text{" * 1000,
    ],
)  # fmt: skip
def test_what_has_no_value_or_too_large_a_one_is_compared_as_written(answer):
    assert answers.same(answer, answer)
    assert not answers.same(answer, "1")


def test_numbers_are_exact():
    assert answers.same("0.1", r"\frac{1}{10}")
    assert not answers.same("0.3333333333333333", r"\frac{1}{3}")


@pytest.mark.parametrize(
    "text",
    [
        r"\boxed " + r"\boxed{" * 200_000,
        "#### 5" + " " * 200_000 + "x",
        "1." * 200_000,
        "1," * 200_000,
        "-" * 200_000,
        "1" * 200_000,
    ],
)
def test_finding_takes_time_in_proportion_to_the_text(text):
    """Each of these texts would take minutes in quadratic time."""
    answers.agree(text, "#### 1")


def test_agreement_needs_an_answer_to_agree_with():
    assert answers.agree(r"\boxed{4}", "#### 4") is True
    assert answers.agree("no idea", "#### 4") is False
    assert answers.agree(r"\boxed{4}", "a poem") is None
    assert answers.agree(r"\boxed{4}", r"\boxed{}") is None
    assert answers.agree(r"\boxed{}", "#### 4") is False


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("We compute 3*4 = 12 and then add 4", False),
        (r"So \boxed{4}. Let me check:", True),
        (r"So \boxed{4", False),
        ("Hence\n#### 4\nTo be sure", True),
        ("Hence\n#### 4", False),  # it might go on: 42
    ],
)
def test_a_text_that_was_cut_off_must_mark_its_answer(text, right):
    assert answers.agree(text, "#### 4", finished=False) is right
