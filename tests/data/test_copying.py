"""What is asked for stands in the prompt, and nowhere else."""

import pytest

from dflash.config.data_schema import DataConfig
from dflash.data import copying, datasets, generated
from dflash.data.example import SPLITS


@pytest.mark.parametrize("split", SPLITS)
def test_the_answer_repeats_the_prompt(split):
    for index in range(300):
        one = example(split, index)
        assert one == example(split, index)
        question, text = one.prompt[0]["content"].split("\n\n")
        assert question == "Repeat this text 4 times."
        assert one.response.split("\n") == [text] * 4
        assert 2 <= len(text.split()) <= 20


def test_examples_belong_to_one_split_each():
    asked = {
        split: {example(split, index).prompt[0]["content"] for index in range(1000)}
        for split in SPLITS
    }
    assert all(len(some) == 1000 for some in asked.values())
    assert not asked["train"] & (asked["validation"] | asked["test"])
    assert not asked["validation"] & asked["test"]


def test_an_answer_is_right_to_the_letter():
    dataset = datasets.find("copying", DataConfig())
    (one,) = dataset.sample("test", 1)
    assert dataset.is_correct(one, one.response)
    assert not dataset.is_correct(one, one.response, finished=False)
    assert not dataset.is_correct(one, one.response[:-1])


def example(split, index):
    return generated.example(copying.TASK, split, index, copying.draw)
