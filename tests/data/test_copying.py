"""What is asked for stands in the prompt, and nowhere else."""

import pytest

from dflash.config.data_schema import DataConfig
from dflash.data import copying, datasets, generated
from dflash.data.example import SPLITS


@pytest.mark.parametrize("split", SPLITS)
def test_the_answer_stands_in_the_prompt(split):
    for index in {*range(300)} - {*range(3, 300, 4)}:
        one = example(split, index)
        assert one == example(split, index)
        question, text = one.prompt[0]["content"].split("\n\n")
        times = 4 if question == "Repeat this text 4 times." else 1
        assert times == 4 or question == "Repeat this text."
        assert one.response == "\n".join([text] * times)


@pytest.mark.parametrize("split", SPLITS)
def test_entries_are_those_that_are_asked_for(split):
    for index in range(3, 400, 4):
        one = example(split, index)
        assert one == example(split, index)
        listed, asked = one.prompt[0]["content"].split("\n\nWhat stands beside these? ")
        entries = dict(line.removeprefix("- ").split(": ") for line in listed.splitlines())
        given = [line.split(": ") for line in one.response.splitlines()]
        assert [key for key, _ in given] == asked.split(", ")
        assert all(entries[key] == value for key, value in given)
        assert len(set(asked.split(", "))) == len(given) > 1


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
