"""Data set `tfds`: rows of a data set of tensorflow-datasets, read without TensorFlow.

    data:
      mixture: {tfds: 1.0}
      tfds: {name: my_chats, messages: turns}

Rows are read through tfds's `data_source`, so the data set must be stored as array_record.
"""

import functools
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from dflash import errors, version
from dflash.data import files
from dflash.data.dataset import Dataset
from dflash.data.example import Example, Split, split_of


class Tfds(Dataset):
    """Rows of a data set of tensorflow-datasets as conversations; see `TfdsConfig`."""

    name = "tfds"
    version = "2.0.0"
    takes_long = True

    @functools.cached_property
    def variant(self) -> str:
        info = self._rows("train").dataset_info
        facts = info.full_name, info.dataset_size, self._config.tfds, self._config.held_out_percent
        return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]

    def examples(self, split: Split) -> Iterator[Example]:
        rows = self._rows(split)
        name = f"{rows.dataset_info.full_name}/{self._splits.get(split, self._splits['train'])}"
        entries = (
            (f"{name}[{index}]", functools.partial(self._fields, rows, index))
            for index in range(len(rows))
        )
        for example in files.read_examples(name, entries, self.name):
            if self._split_of(example, split) == split:
                yield example

    def _split_of(self, example: Example, split: Split) -> Split:
        """Returns the split of a row that tfds has in `split`, or in train if it has none such."""
        if split != "train" and split in self._splits:
            return split
        held_out = split_of(example.source, self._config.held_out_percent)
        return "train" if held_out in self._splits else held_out

    @property
    def _splits(self) -> Mapping[str, str]:
        return {"train": "train", **self._config.tfds.splits}

    def _rows(self, split: Split) -> Any:
        """Opens the rows of a split, with random access."""
        config = self._config.tfds
        if config.name is None:
            raise errors.ConfigError("data.tfds.name: required by the data set tfds")
        try:
            import tensorflow_datasets as tfds
        except ImportError as error:
            command = version.install_command("tfds")
            raise errors.InputError(f"data.tfds: needs tensorflow-datasets; {command}") from error
        name = self._splits.get(split, self._splits["train"])
        try:
            rows = tfds.data_source(config.name, split=name, data_dir=config.data_dir)
        except Exception as error:  # tfds and its data sets may raise any exception
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            raise errors.InputError(f"data.tfds.name={config.name}: {reason}") from error
        fields = list(rows.dataset_info.features)
        for key in ("messages", "prompt", "response"):
            field = getattr(config, key)
            if field is not None and field not in fields:
                known = ", ".join(sorted(fields))
                raise errors.ConfigError(
                    f"data.tfds.{key}: {config.name} has no field {field!r}, only {known}"
                )
        return rows

    def _fields(self, rows: Any, index: int) -> Mapping[str, Any]:
        config, row = self._config.tfds, rows[index]
        if config.messages is None:
            return {key: _plain(row[getattr(config, key)]) for key in ("prompt", "response")}
        messages = _plain(row[config.messages])
        if isinstance(messages, dict):  # tfds transposes sequences of objects
            items = zip(*messages.values(), strict=True)
            messages = [dict(zip(messages, values, strict=True)) for values in items]
        return {"messages": messages}


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, str):
        return value
    if isinstance(value, bytes):
        try:
            return value.decode("utf-8")
        except UnicodeDecodeError as error:
            raise errors.InputError("a text is not UTF-8") from error
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, Iterable) else value
