"""Finished prompts of a decode run, in memory or in a file of its work directory.

outputs.jsonl (and baseline.jsonl beside it) grows by one line with each finished prompt. A killed
run loses only its unfinished prompts, and in a bucket the prompts of the last seconds; the next run
on the directory decodes them.
"""

import contextlib
import dataclasses
import json
import operator
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

from dflash import errors
from dflash.runs import outputs, shards
from dflash.runs.directory import RunDirectory
from dflash.storage import files, growing
from dflash.text import prompts as prompts_lib

OUTPUTS = "outputs.jsonl"
BASELINE = "baseline.jsonl"  # The same prompts decoded without drafting (decode.baseline).
RESULTS = "results.json"


def has_outputs(directory: pathlib.Path) -> bool:
    """Returns whether a directory holds finished prompts, or files of shards."""
    paths = (directory / name for name in (OUTPUTS, BASELINE))
    has_records = any(path.exists() and path.stat().st_size for path in paths)
    return has_records or bool(shards.shards_in(directory, OUTPUTS))


def check_division(path: pathlib.Path, shard: shards.Shard) -> None:
    """Raises if the prompts in a directory are divided differently, or not at all."""
    shards.check_count(path, OUTPUTS, shard)
    undivided = path / OUTPUTS
    if undivided.exists() and undivided.stat().st_size:
        raise errors.WorkdirError(
            f"{undivided}: belongs to a run without --shard: continue without --shard, or use "
            "another --workdir"
        )


class Records(contextlib.AbstractContextManager):
    """Finished prompts of a run, in memory, and in files if the run has a work directory.

    Only the first process of a run writes files.
    """

    def __init__(
        self,
        records: Iterable[outputs.Record] = (),
        *,
        place: pathlib.Path | None = None,
        file: growing.GrowingFile | None = None,
        results: pathlib.Path | None = None,
        config_hash: str = "",
    ):
        """Starts with the `records` of earlier runs.

        Args:
          place: File or directory that holds the records; None for memory.
          file: File to which finished prompts are appended; None keeps them in memory.
          results: File of the summary; None writes none.
        """
        self._records = {record.index: record for record in records}
        self._clock_s = max((r.decode_clock_s for r in self._records.values()), default=0.0)
        self._place, self._file = place, file
        self._results, self._config_hash = results, config_hash

    def completed(self) -> dict[int, outputs.Record]:
        """Returns all finished prompts by index, in order, including those of earlier runs."""
        return {index: self._records[index] for index in sorted(self._records)}

    def pending(self, prompts: Sequence[prompts_lib.Prompt]) -> list[prompts_lib.Prompt]:
        """Returns the prompts with at least one unfinished turn.

        Raises:
          WorkdirError: Earlier records belong to other prompts.
        """
        turns = {index for prompt in prompts for index in prompt.indices}
        first_turns = {prompt.index: prompt for prompt in prompts}
        for index, record in self.completed().items():
            if index not in turns:
                raise errors.WorkdirError(
                    f"{self._name} holds prompt {index}, but now there are only "
                    f"{len(turns)} prompts: use the same prompts, or another --workdir"
                )
            # Comparing first turns is enough, since later turns follow from them.
            prompt = first_turns.get(index)
            if prompt is not None and record.prompt_ids != tuple(prompt.ids):
                raise errors.WorkdirError(
                    f"{self._name}: its prompt {index} differs from {prompt.source}: use the "
                    "same prompts, or another --workdir"
                )
        return [prompt for prompt in prompts if not self._records.keys() >= {*prompt.indices}]

    def append(self, record: outputs.Record) -> outputs.Record:
        """Adds a finished prompt, with the time of earlier runs added to its clock.

        Returns:
          The record as stored.
        Raises:
          WorkdirError: The record cannot be written.
        """
        record = dataclasses.replace(record, decode_clock_s=self._clock_s + record.decode_clock_s)
        if self._file is not None:
            with files.explained(self._place):
                self._file.append(outputs.encode(record))
                self._file.sync()
        self._records[record.index] = record
        return record

    def write_results(self, summary: outputs.Summary, **facts: Any) -> None:
        """Writes the summary and `facts` (devices, versions) as results.json, atomically."""
        if self._results is not None:
            values = {**dataclasses.asdict(summary), "config_hash": self._config_hash, **facts}
            with files.explained(self._results):
                files.write_whole(self._results, files.to_json(values))

    def results(self) -> dict[str, Any]:
        """Returns the content of results.json; empty if there is none."""
        try:
            return json.loads(self._results.read_text(encoding="utf-8")) if self._results else {}
        except (FileNotFoundError, ValueError):  # The run was killed before it wrote them.
            return {}

    def close(self) -> None:
        """Closes the file of records."""
        if self._file is not None:
            with files.explained(self._place):
                self._file.close()

    def __exit__(self, *unused):
        self.close()

    @property
    def _name(self) -> str:
        return "the run" if self._place is None else str(self._place)


def open_in(directory: RunDirectory, name: str = OUTPUTS, results: str = RESULTS) -> Records:
    """Opens the records of a run's directory, including those of earlier runs.

    A process that does not write the directory has its records in memory only. An incomplete last
    line of a killed run is dropped.

    Raises:
      WorkdirError: The file cannot be written, or holds damaged records.
    """
    if not directory.writes:
        return Records()
    path = directory.path / name
    with files.explained(path):
        file = growing.open_file(path)
        try:
            records, complete_bytes = _read_records(path, file.lines())
            file.cut(complete_bytes)
        except BaseException:
            file.close()
            raise
    return Records(
        records,
        place=path,
        file=file,
        results=directory.path / results,
        config_hash=directory.config_hash,
    )


def join(directory: pathlib.Path, config_hash: str, name: str, count: int) -> Records:
    """Joins the records of all shards of a run, with their clocks added up.

    Args:
      name: Name that the file of records has in a run without shards.
    Raises:
      WorkdirError: A file cannot be read, or holds damaged records.
    """
    joined, before_s = [], 0.0
    for shard in shards.Shard(0, count).all():
        path = directory / shard.file(name)
        if not path.exists():
            continue
        with files.explained(path), path.open("rb") as lines:
            shard_records, _ = _read_records(path, lines)
        clocks = [record.decode_clock_s for record in shard_records]
        joined += [
            dataclasses.replace(record, decode_clock_s=before_s + record.decode_clock_s)
            for record in shard_records
        ]
        before_s += max(clocks, default=0.0)
    return Records(joined, place=directory, results=directory / RESULTS, config_hash=config_hash)


def read(path: pathlib.Path) -> list[outputs.Record]:
    """Returns the finished prompts in a file, by index; the file is in order of completion.

    Raises:
      FileNotFoundError: There is no such file.
      WorkdirError: The file is damaged.
    """
    with path.open("rb") as lines:
        unordered, _ = _read_records(path, lines)
    return sorted(unordered, key=operator.attrgetter("index"))


def _read_records(path: pathlib.Path, lines: Iterable[bytes]) -> tuple[list[outputs.Record], int]:
    """Returns all complete records, and their size in bytes; raises WorkdirError if damaged."""
    records: dict[int, outputs.Record] = {}
    complete_bytes = 0
    for number, line in enumerate(lines, start=1):
        if not line.endswith(b"\n"):
            break  # A killed run left an incomplete last line.
        try:
            record = outputs.decode(line)
        except ValueError as error:
            raise errors.WorkdirError(
                f"{path}:{number}: damaged line ({error}): delete it to decode its prompt again, "
                "or use another --workdir"
            ) from error
        if record.index in records:
            raise errors.WorkdirError(
                f"{path}:{number}: prompt {record.index} occurs twice: delete one of the two "
                "lines, or use another --workdir"
            )
        records[record.index] = record
        complete_bytes += len(line)
    return list(records.values()), complete_bytes
