"""Where a decode run leaves its results: outputs.jsonl, results.json and config.yml in a directory.

outputs.jsonl (and baseline.jsonl beside it) grows by one line as each prompt finishes, so that a
killed run loses only the prompts that it was working on; the next run on the directory takes up
where that one ended.
"""

import dataclasses
import json
import os
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

from dflash import errors
from dflash.runs import directories, outputs
from dflash.text import prompts as prompts_lib

OUTPUTS = "outputs.jsonl"
BASELINE = "baseline.jsonl"  # the same, decoded without drafting (decode.baseline)
RESULTS = "results.json"


class Records:
    """Finished prompts, in memory only: for runs without a work directory.

    All processes of a run but the first use this too, since only the first one writes.
    """

    def __init__(self, records: Iterable[outputs.Record] = ()):
        """Starts with the `records` of earlier runs."""
        self._records = {record.index: record for record in records}
        self._clock_s = max((r.decode_clock_s for r in self._records.values()), default=0.0)

    def completed(self) -> dict[int, outputs.Record]:
        """Returns every finished prompt by index, in that order, earlier runs' included."""
        return {index: self._records[index] for index in sorted(self._records)}

    def pending(self, prompts: Sequence[prompts_lib.Prompt]) -> list[prompts_lib.Prompt]:
        """Returns the prompts that are still to do, in part at least if they have several turns.

        Raises:
          WorkdirError: earlier records belong to other prompts.
        """
        turns = {index for prompt in prompts for index in prompt.indices}
        first_turns = {prompt.index: prompt for prompt in prompts}
        for index, record in self.completed().items():
            if index not in turns:
                raise errors.WorkdirError(
                    f"{self._name()} holds prompt {index}, but now there are only "
                    f"{len(turns)} prompts: use the same prompts, or another --workdir"
                )
            # What a later turn is made from has been compared when its first turn was.
            prompt = first_turns.get(index)
            if prompt is not None and record.prompt_ids != tuple(prompt.ids):
                raise errors.WorkdirError(
                    f"{self._name()} holds another prompt {index} than {prompt.source} "
                    "is now: use the same prompts, or another --workdir"
                )
        return [prompt for prompt in prompts if not self._records.keys() >= {*prompt.indices}]

    def append(self, record: outputs.Record) -> outputs.Record:
        """Adds a finished prompt, its clock moved on by what earlier runs took; returns that.

        Raises:
          WorkdirError: it cannot be written.
        """
        record = dataclasses.replace(record, decode_clock_s=self._clock_s + record.decode_clock_s)
        self._write(record)
        self._records[record.index] = record
        return record

    def write_results(self, summary: outputs.Summary, **facts: Any) -> None:
        """Writes the summary and further `facts` (devices, versions) as results.json, all at once.

        Raises:
          WorkdirError: it cannot be written.
        """

    def close(self) -> None:
        """Lets the next run have the work directory."""

    def __enter__(self):
        return self

    def __exit__(self, *unused):
        self.close()

    def _name(self) -> str:
        return "the run"

    def _write(self, record: outputs.Record) -> None:
        pass


class Workdir(Records):
    """Finished prompts in a directory, where the next run finds them."""

    def __init__(
        self,
        path: pathlib.Path,
        descriptor: int,
        config_hash: str,
        records: Iterable[outputs.Record],
    ):
        """Use `Workdir.open`."""
        super().__init__(records)
        self._path = path
        self._descriptor = descriptor
        self._config_hash = config_hash

    @classmethod
    def open(
        cls,
        directory: str | os.PathLike,
        config_yaml: str,
        config_hash: str,
        name: str = OUTPUTS,
    ) -> "Workdir":
        """Takes a work directory for this run, and creates it where it is missing.

        Another run's directory is refused, except when that run wrote no output yet. A line that a
        kill cut short is dropped.

        Args:
          directory: where; `~` is the home directory.
          config_yaml: the resolved config, kept as config.yml.
          config_hash: goes into results.json.
          name: of the file of records.

        Raises:
          WorkdirError: it cannot be written, is in use by another run, belongs to another config,
            or holds damaged records.
        """
        directory = pathlib.Path(directory).expanduser()
        path = directory / name
        with directories.explained(directory):
            directory.mkdir(parents=True, exist_ok=True)
            if not path.exists():
                # Nobody decoded here yet: a config.yml of other content is not ours to replace.
                _check_config(directory, config_yaml, required=False)
            descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            with directories.explained(directory):
                directories.lock(directory, descriptor)
                records, complete_bytes = _read_records(path, descriptor)
                if os.fstat(descriptor).st_size:
                    _check_config(directory, config_yaml, required=True)
                os.ftruncate(descriptor, complete_bytes)
                directories.write_whole(directory / directories.CONFIG, config_yaml)
        except BaseException:
            os.close(descriptor)
            raise
        return cls(path, descriptor, config_hash, records)

    def write_results(self, summary: outputs.Summary, **facts: Any) -> None:
        values = {**dataclasses.asdict(summary), "config_hash": self._config_hash, **facts}
        text = json.dumps(values, indent=2, ensure_ascii=False, allow_nan=False)
        path = self._path.parent / RESULTS
        with directories.explained(path):
            directories.write_whole(path, text + "\n")

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)  # and with it goes the lock
            self._descriptor = -1

    def _name(self) -> str:
        return str(self._path)

    def _write(self, record: outputs.Record) -> None:
        with directories.explained(self._path):
            line = outputs.encode(record)
            written = os.write(self._descriptor, line)
            if written < len(line):  # a full disk; the torn line goes when the next run opens
                raise OSError(f"only {written} of {len(line)} bytes fitted")
            os.fsync(self._descriptor)


def _read_records(path: pathlib.Path, descriptor: int) -> tuple[list[outputs.Record], int]:
    """Reads every complete line; returns the records, and how many bytes they take.

    Raises:
      WorkdirError: a complete line is damaged, or a prompt stands there twice.
    """
    records: dict[int, outputs.Record] = {}
    complete_bytes = 0
    with open(descriptor, "rb", closefd=False) as lines:
        for number, line in enumerate(lines, start=1):
            if not line.endswith(b"\n"):
                break  # cut short by a kill
            try:
                record = outputs.decode(line)
            except ValueError as error:
                raise errors.WorkdirError(
                    f"{path}:{number}: damaged line ({error}): delete it to decode its prompt "
                    "again, or use another --workdir"
                ) from error
            if record.index in records:
                raise errors.WorkdirError(
                    f"{path}:{number}: prompt {record.index} for the second time: delete one of "
                    "the two lines, or use another --workdir"
                )
            records[record.index] = record
            complete_bytes += len(line)
    return list(records.values()), complete_bytes


def _check_config(directory: pathlib.Path, config_yaml: str, *, required: bool) -> None:
    """Compares config.yml with this run's config, by content.

    Raises:
      WorkdirError: they differ, in keys that the message names; or it is missing and `required`.
    """
    if not directories.check_config(directory, config_yaml) and required:
        raise errors.WorkdirError(
            f"{directory / directories.CONFIG}: missing, so nobody knows what the outputs here are "
            "of: use another --workdir"
        )
