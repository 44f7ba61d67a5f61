"""Tests that the answer is copied from the prompt."""

import pytest

from dflash.data.example import SPLITS
from experiments.tiny_family import copying, numbered


@pytest.mark.parametrize("split", SPLITS)
def test_the_answer_repeats_the_prompt(split):
    for index in range(300):
        one = numbered.example(copying.TASK, split, index, copying.draw)
        question, text = one.prompt[0]["content"].split("\n\n")
        assert question == "Repeat this text 4 times."
        assert one.response.split("\n") == [text] * 4
        assert 2 <= len(text.split()) <= 20
