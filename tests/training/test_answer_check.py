"""Tests of the check of a training set's answers: empty ones, cut off ones, and loops."""

import numpy as np
import pytest
from support.corpora import join

from dflash.data.corpus import SUPERVISED
from dflash.training import answer_check

END = 2


def document(*turns) -> np.ndarray:
    """Returns a document of question and answer, in turn."""
    marks = [np.uint32(0), SUPERVISED]
    pieces = [np.array(turn, np.uint32) | marks[place % 2] for place, turn in enumerate(turns)]
    return np.concatenate(pieces)


def lines(*documents, ends=(END,)) -> list[str]:
    return list(answer_check.check(join("jsonl/train", documents), ends).lines("jsonl/train"))


def test_the_distribution_of_lengths():
    documents = [document([5], [*range(10, 10 + n), END], [6], [7, END]) for n in range(1, 21)]
    assert lines(*documents) == [
        "jsonl/train: tokens per answer, of 40 answers: 10 % up to 2, 50 % up to 2, 90 % up to 18, "
        "100 % up to 21"
    ]


@pytest.mark.parametrize(
    ("answer", "defects"),
    [
        ([END], ["are empty"]),
        ([], ["are empty"]),
        ([7, 8, 9], ["do not end with an end token"]),
        ([7] * 40 + [END], ["end in a loop"]),
        ([*range(10, 50)] * 3, ["do not end with an end token", "end in a loop"]),
        ([*range(10, 90), END], []),
        ([7] * 20 + [END], []),
    ],
)
def test_defects_of_many_answers_are_told(answer, defects):
    good = [document([5], [*range(10, 50), END])] * 9
    told = lines(*good, document([5], answer))[1:]
    expected = [f"jsonl/train: warning: 10 % of the answers {defect}: " for defect in defects]
    assert [line[: len(start)] for line, start in zip(told, expected, strict=True)] == expected
    assert lines(*good, *good, document([5], answer))[1:] == []


def test_a_model_without_end_tokens_cuts_nothing_off():
    assert len(lines(document([5], [7, 8, 9]), ends=())) == 1
