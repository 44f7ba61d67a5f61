"""Merging of a benchmark whose prompts were divided among several runs.

Shard i of n measures prompts i, i + n, … of every task, and finally writes its measurements to
rounds.i-of-n.json.
"""

import dataclasses
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from dflash import errors
from dflash.inference.request import RequestOutput
from dflash.measure.parts import Parts
from dflash.measure.samples import Sample, TaskRound
from dflash.runs import shards
from dflash.runs.directory import RunDirectory
from dflash.runs.shards import Shard
from dflash.storage import files

ROUNDS = "rounds.json"


def save(directory: RunDirectory, shard: Shard, done: Sequence[TaskRound]) -> None:
    """Writes a shard's measurements.

    Raises:
      WorkdirError: The file cannot be written.
    """
    rounds = [dataclasses.asdict(round_) for round_ in done]
    directory.write(shard.file(ROUNDS), json.dumps({"rounds": rounds}))


def read(directory: pathlib.Path) -> list[TaskRound]:
    """Reads the measurements of all shards, sorted by round.

    Raises:
      WorkdirError: Some shards have not finished, or a file is damaged.
    """
    count = shards.shards_in(directory, ROUNDS)[0].count
    shards.check_count(directory, ROUNDS, Shard(0, count))
    shards.check_finished(directory, shards.missing(directory, ROUNDS, count))
    rounds = []
    for shard in Shard(0, count).all():
        path = directory / shard.file(ROUNDS)
        with files.explained(path):
            text = path.read_text(encoding="utf-8")
        try:
            rounds += [_round(values) for values in json.loads(text)["rounds"]]
        except (ValueError, KeyError, TypeError) as error:
            raise errors.WorkdirError(
                f"{path}: damaged: delete it and run --shard={shard} again"
            ) from error
    return sorted(rounds, key=lambda round_: round_.round)


def _round(values: Mapping[str, Any]) -> TaskRound:
    samples = tuple(
        Sample(
            **{
                **sample,
                "completions": tuple(
                    RequestOutput(**_tuples(completion)) for completion in sample["completions"]
                ),
                "conversations": tuple(sample["conversations"]),
                "marks": tuple(sample["marks"]),
            }
        )
        for sample in values["samples"]
    )
    parts = {name: Parts(**times) for name, times in values["parts"].items()}
    return TaskRound(values["task"], values["round"], samples, parts)


def _tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: tuple(value) if isinstance(value, list) else value for key, value in values.items()
    }
