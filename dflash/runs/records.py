"""The finished prompts of a decode run: in memory, or in a file of its directory.

outputs.jsonl (and baseline.jsonl beside it) grows by one line as each prompt finishes, so a killed
run loses only the prompts that it was working on, and in a bucket those of the last seconds; the
next run on the directory does the rest.
"""

import dataclasses
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
BASELINE = "baseline.jsonl"  # the same, decoded without drafting (decode.baseline)
RESULTS = "results.json"


def has_outputs(directory: pathlib.Path) -> bool:
    """Whether a decode run left finished prompts in a directory, or shards have begun there."""
    found = (directory / name for name in (OUTPUTS, BASELINE))
    whole = any(path.exists() and path.stat().st_size for path in found)
    return whole or bool(shards.shards_in(directory, OUTPUTS))


def check_division(path: pathlib.Path, shard: shards.Shard) -> None:
    """Refuses a directory whose prompts are divided in another way, or not at all.

    Raises:
      WorkdirError: It is such a directory.
    """
    shards.check_count(path, OUTPUTS, shard)
    whole = path / OUTPUTS
    if whole.exists() and whole.stat().st_size:
        raise errors.WorkdirError(
            f"{whole}: of a run without --shard: go on without, or use another --workdir"
        )


class Records:
    """Finished prompts, in memory only: for runs without a work directory.

    Of several processes only the first one writes, so the others use this too.
    """

    def __init__(self, records: Iterable[outputs.Record] = ()):
        """Starts with the `records` of earlier runs."""
        self._records = {record.index: record for record in records}
        self._clock_s = max((r.decode_clock_s for r in self._records.values()), default=0.0)

    def completed(self) -> dict[int, outputs.Record]:
        """Returns every finished prompt, those of earlier runs included, in order of index."""
        return {index: self._records[index] for index in sorted(self._records)}

    def pending(self, prompts: Sequence[prompts_lib.Prompt]) -> list[prompts_lib.Prompt]:
        """Returns the prompts of which at least one turn is still to do.

        Raises:
          WorkdirError: Earlier records belong to other prompts.
        """
        turns = {index for prompt in prompts for index in prompt.indices}
        first_turns = {prompt.index: prompt for prompt in prompts}
        for index, record in self.completed().items():
            if index not in turns:
                raise errors.WorkdirError(
                    f"{self._name()} holds prompt {index}, but now there are only "
                    f"{len(turns)} prompts: use the same prompts, or another --workdir"
                )
            # A later turn follows from its first turn, which is compared here.
            prompt = first_turns.get(index)
            if prompt is not None and record.prompt_ids != tuple(prompt.ids):
                raise errors.WorkdirError(
                    f"{self._name()} holds another prompt {index} than {prompt.source} "
                    "is now: use the same prompts, or another --workdir"
                )
        return [prompt for prompt in prompts if not self._records.keys() >= {*prompt.indices}]

    def append(self, record: outputs.Record) -> outputs.Record:
        """Adds a finished prompt, the time of earlier runs added to its clock; returns that.

        Raises:
          WorkdirError: It cannot be written.
        """
        record = dataclasses.replace(record, decode_clock_s=self._clock_s + record.decode_clock_s)
        self._write(record)
        self._records[record.index] = record
        return record

    def write_results(self, summary: outputs.Summary, **facts: Any) -> None:
        """Writes the summary and further `facts` (devices, versions) as results.json, whole.

        Raises:
          WorkdirError: It cannot be written.
        """

    def close(self) -> None:
        """Closes the file of records."""

    def __enter__(self):
        return self

    def __exit__(self, *unused):
        self.close()

    def _name(self) -> str:
        return "the run"

    def _write(self, record: outputs.Record) -> None:
        pass


def open_in(directory: RunDirectory, name: str = OUTPUTS, results: str = RESULTS) -> Records:
    """The records of a run's directory, those of earlier runs included; in memory without a path.

    A line that a kill cut short is dropped.

    Args:
      directory: Held by this run.
      name: Of the file of records.
      results: Of the file of their summary.
    Raises:
      WorkdirError: The file cannot be written, or holds damaged records.
    """
    return Records() if directory.path is None else _StoredRecords(directory, name, results)


def join(directory: pathlib.Path, config_hash: str, name: str, count: int) -> Records:
    """The records of all shards of a run as one: their clocks follow one another.

    Args:
      directory: The work directory of the shards.
      config_hash: For the summary.
      name: Of the file of records of a run without shards.
      count: Number of shards.
    Raises:
      WorkdirError: A file cannot be read, or holds damaged records.
    """
    found, before_s = [], 0.0
    for shard in shards.Shard(0, count).all():
        path = directory / shard.file(name)
        if not path.exists():
            continue
        with files.explained(path), path.open("rb") as lines:
            own, _ = _read_records(path, lines)
        clocks = [record.decode_clock_s for record in own]
        found += [
            dataclasses.replace(record, decode_clock_s=before_s + record.decode_clock_s)
            for record in own
        ]
        before_s += max(clocks, default=0.0)
    return _JoinedRecords(directory, config_hash, found)


class _StoredRecords(Records):
    """Finished prompts in a file, where the next run finds them."""

    def __init__(self, directory: RunDirectory, name: str, results: str):
        self._directory, self._results = directory, results
        self._path = directory.path / name
        with files.explained(self._path):
            self._file = growing.open_file(self._path)
            try:
                records, complete_bytes = _read_records(self._path, self._file.lines())
                self._file.cut(complete_bytes)
            except BaseException:
                self.close()
                raise
        super().__init__(records)

    def write_results(self, summary: outputs.Summary, **facts: Any) -> None:
        values = {**dataclasses.asdict(summary), "config_hash": self._directory.config_hash}
        self._directory.write_json(self._results, values | facts)

    def close(self) -> None:
        with files.explained(self._path):
            self._file.close()

    def _name(self) -> str:
        return str(self._path)

    def _write(self, record: outputs.Record) -> None:
        with files.explained(self._path):
            self._file.append(outputs.encode(record))
            self._file.sync()


class _JoinedRecords(Records):
    """Finished prompts of several shards, read from their files."""

    def __init__(
        self, directory: pathlib.Path, config_hash: str, records: Iterable[outputs.Record]
    ):
        super().__init__(records)
        self._directory, self._config_hash = directory, config_hash

    def write_results(self, summary: outputs.Summary, **facts: Any) -> None:
        values = {**dataclasses.asdict(summary), "config_hash": self._config_hash, **facts}
        with files.explained(self._directory / RESULTS):
            files.write_whole(self._directory / RESULTS, files.to_json(values))

    def _name(self) -> str:
        return str(self._directory)


def read(path: pathlib.Path) -> list[outputs.Record]:
    """The finished prompts in a file, in the order of the prompts.

    Prompts finish in another order, which depends on kills.

    Raises:
      FileNotFoundError: There is no such file.
      WorkdirError: It is damaged.
    """
    with path.open("rb") as lines:
        found, _ = _read_records(path, lines)
    return sorted(found, key=operator.attrgetter("index"))


def _read_records(path: pathlib.Path, lines: Iterable[bytes]) -> tuple[list[outputs.Record], int]:
    """Reads every complete line; returns the records, and how many bytes they take.

    Raises:
      WorkdirError: A complete line is damaged, or a prompt stands there twice.
    """
    records: dict[int, outputs.Record] = {}
    complete_bytes = 0
    for number, line in enumerate(lines, start=1):
        if not line.endswith(b"\n"):
            break  # cut short by a kill
        try:
            record = outputs.decode(line)
        except ValueError as error:
            raise errors.WorkdirError(
                f"{path}:{number}: damaged line ({error}): delete it to decode its prompt again, "
                "or use another --workdir"
            ) from error
        if record.index in records:
            raise errors.WorkdirError(
                f"{path}:{number}: prompt {record.index} for the second time: delete one of the "
                "two lines, or use another --workdir"
            )
        records[record.index] = record
        complete_bytes += len(line)
    return list(records.values()), complete_bytes
