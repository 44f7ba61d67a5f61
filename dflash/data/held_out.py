"""Held-out prompts of the data sets of a run, which training does not see."""

import contextlib
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from dflash import errors
from dflash.data.dataset import Dataset
from dflash.data.example import Split
from dflash.storage import files
from dflash.text.tokenizer import Tokenizer

Prompt = Mapping[str, Any]  # "prompt_ids"; or "messages", "variables" and "place", as in `Example`


def mixed_prompts(
    sets: Mapping[str, Dataset],
    tokenizer: Tokenizer,
    directory: pathlib.Path,
    split: Split = "validation",
    limit: int = 12,
) -> dict[str, list[tuple[int, ...]]]:
    """Returns prompts of data sets as token ids by data set, at most `limit` in total.

    Messages are encoded with the chat template of the tokenizer. Prompts that already are token
    ids, such as those of a decode run's outputs.jsonl, stay unchanged.

    Args:
      directory: Directory of all data sets; caches the prompts of large ones.
      limit: Maximum number of prompts over all data sets.
    Raises:
      InputError: A data set has no examples in this split, or the chat template cannot render its
        messages.
    """
    prompts = {}
    for place, (name, dataset) in enumerate(sets.items()):
        share = limit // len(sets) + (place < limit % len(sets))
        sample = _sample(dataset, split, share, directory) if share else []
        if share and not sample:
            raise dataset.empty(split)
        prompts[name] = [_encode(prompt, tokenizer) for prompt in sample]
    return prompts


def _encode(prompt: Prompt, tokenizer: Tokenizer) -> tuple[int, ...]:
    if prompt.get("prompt_ids"):
        return tuple(prompt["prompt_ids"])
    try:
        return tuple(tokenizer.encode_chat(prompt["messages"], **prompt["variables"]))
    except errors.InputError as error:
        raise errors.InputError(f"{prompt['place']}: {error}") from error


def _sample(dataset: Dataset, split: Split, count: int, directory: pathlib.Path) -> list[Prompt]:
    """Returns up to `count` prompts from all over a split, always the same ones."""
    if not dataset.takes_long:
        return _find_sample(dataset, split, count)
    name = f"{dataset.name}-{dataset.variant}-{dataset.version}-{split}-{count}.json"
    path = directory / "prompts" / name
    with contextlib.suppress(OSError, ValueError):
        return json.loads(path.read_text(encoding="utf-8"))
    sample = _find_sample(dataset, split, count)
    with contextlib.suppress(OSError):  # the directory may be read-only
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_whole(path, json.dumps(sample))
    return sample


def _find_sample(dataset: Dataset, split: Split, count: int) -> list[Prompt]:
    return [
        {"prompt_ids": example.prompt_ids}
        if example.prompt_ids
        else {
            "messages": example.prompt,
            "variables": example.variables,
            "place": example.place or f"data set {example.task}",
        }
        for example in dataset.sample(split, count)
    ]
