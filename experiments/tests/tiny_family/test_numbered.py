"""Tests that numbered examples are reproducible and no question is in two splits."""

import pytest

from dflash.config import registry
from dflash.config.train_schema import DataConfig
from dflash.data.example import SPLITS
from experiments.tiny_family import arithmetic, copying, datasets, numbered

KINDS = pytest.mark.parametrize("kind", [arithmetic, copying], ids=["arithmetic", "copying"])


@KINDS
def test_examples_belong_to_one_split_each(kind):
    examples = {
        split: [numbered.example(kind.TASK, split, index, kind.draw) for index in range(1000)]
        for split in SPLITS
    }
    for split, made in examples.items():
        again = (numbered.example(kind.TASK, split, index, kind.draw) for index in range(1000))
        assert made == list(again)
    asked = {split: {one.prompt[0]["content"] for one in made} for split, made in examples.items()}
    assert all(len(some) == 1000 for some in asked.values())
    assert not asked["train"] & (asked["validation"] | asked["test"])
    assert not asked["validation"] & asked["test"]


@KINDS
def test_an_answer_is_right_to_the_letter(kind):
    dataset = registry.load(datasets.DATASETS[kind.TASK])(DataConfig())
    (one,) = dataset.sample("test", 1)
    assert dataset.is_correct(one, one.response)
    assert not dataset.is_correct(one, one.response, finished=False)
    assert not dataset.is_correct(one, one.response[:-1])
