"""Prompts of a run's own data sets that training does not see."""

import pathlib
from collections.abc import Mapping

from dflash.data import store
from dflash.data.datasets import Dataset
from dflash.data.example import Example, Split, shuffled
from dflash.text.tokenizer import Tokenizer


def mixed_prompts(
    sets: Mapping[str, Dataset],
    tokenizer: Tokenizer,
    directory: pathlib.Path,
    split: Split = "validation",
    limit: int = 12,
) -> dict[str, list[tuple[int, ...]]]:
    """Prompts of data sets as token ids, about `limit` in all, by data set.

    Messages are encoded in the tokenizer's chat template; prompts that are token ids already, such
    as those of decode's outputs.jsonl, are taken as they are.

    Args:
      sets: data sets by name.
      tokenizer: tokenizer of the model that is asked.
      directory: directory of all data sets.
      split: split of every data set.
      limit: number of prompts.
    Raises:
      InputError: a data set has nothing in this split, or the chat template refuses its messages.
    """
    found = {}
    for place, (name, dataset) in enumerate(sets.items()):
        share = limit // len(sets) + (place < limit % len(sets))
        sample = _sample(dataset, split, share, directory) if share else []
        if share and not sample:
            raise dataset.empty(split)
        found[name] = [
            example.prompt_ids or tuple(tokenizer.encode_chat(example.prompt)) for example in sample
        ]
    return found


def _sample(dataset: Dataset, split: Split, count: int, directory: pathlib.Path) -> list[Example]:
    """Up to `count` examples from all over a split, always the same ones."""
    if not dataset.takes_long:
        return dataset.sample(split, count)
    stored = store.open_split(dataset, split, directory)
    return [stored[index] for index in shuffled(range(len(stored)))[:count]]
