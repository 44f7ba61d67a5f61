"""Data sets on disk, through tensorflow-datasets, in array_record files, without TensorFlow.

DATA_DIR/math/n100000/1.0.0/math-train.array_record-00000-of-00001
DATA_DIR/encoded/…                                         token ids; see `encoding`
"""

import contextlib
import io
import json
import os
import pathlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from dflash import errors
from dflash.data.datasets import Dataset
from dflash.data.example import SPLITS, Example, Split
from dflash.storage import files

# Records that an iteration reads at once: one at a time takes as long as encoding them.
_READ_AT_ONCE = 256


def data_directory(data_dir: str | None) -> pathlib.Path:
    """The directory of data sets: as given, or in the user's cache directory."""
    if data_dir is not None:
        return pathlib.Path(data_dir).expanduser().absolute()
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return pathlib.Path(cache).expanduser() / "dflash" / "datasets"


@contextlib.contextmanager
def locked(directory: pathlib.Path) -> Iterator[None]:
    """Locks a directory for this process; others wait.

    Raises:
      InputError: the directory cannot be written.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with files.waiting_lock(directory / ".lock"):
            yield
    except OSError as error:
        raise _unwritable(directory, error) from error


def make_builder(dataset: Dataset, directory: pathlib.Path) -> Any:
    """A tfds builder of a data set.

    Its features: "task", "source" and "messages", which is JSON; "prompt_ids" and "output_ids".
    """
    import numpy as np
    import tensorflow_datasets as tfds

    # Not registered with tfds: its registry is global, and we look names up ourselves.
    class Builder(tfds.core.GeneratorBasedBuilder, skip_registration=True):
        VERSION = tfds.core.Version(dataset.version)
        BUILDER_CONFIGS = [tfds.core.BuilderConfig(name=dataset.variant)]  # noqa: RUF012
        name = dataset.name.replace("-", "_")  # tfds finds files by it, and does not allow hyphens
        code_path = None  # beside which tfds would look for a list of downloads

        def _info(self):
            text, ids = tfds.features.Text(), tfds.features.Tensor(shape=(None,), dtype=np.int32)
            features = dict.fromkeys(("task", "source", "messages"), text)
            features |= dict.fromkeys(("prompt_ids", "output_ids"), ids)
            return tfds.core.DatasetInfo(
                builder=self, features=tfds.features.FeaturesDict(features)
            )

        def _split_generators(self, dl_manager):
            # tfds refuses a split without examples.
            present = [split for split in SPLITS if next(dataset.examples(split), None)]
            return {split: self._generate_examples(split) for split in present}

        def _generate_examples(self, split):
            for index, example in enumerate(dataset.examples(split)):
                yield index, _to_record(example)

    return Builder(data_dir=directory, config=dataset.variant, file_format="array_record")


def open_split(dataset: Dataset, split: Split, directory: pathlib.Path) -> Sequence[Example]:
    """The examples of a split with random access; makes the files where they are not there yet.

    Raises:
      InputError: the data are unusable, the split is empty, or the files cannot be written.
    """
    with locked(directory):
        builder = make_builder(dataset, directory)
        if not pathlib.Path(builder.data_path).exists():
            print(f"data: making {dataset.name}, once, in {directory}", file=sys.stderr)
            _prepare(builder)
            builder = make_builder(dataset, directory)
            size = f"{builder.info.dataset_size / 1e6:.1f} MB on disk"
            print(f"data: made {dataset.name}, {size}", file=sys.stderr)
    if split not in builder.info.splits:
        raise dataset.empty(split)
    return _Examples(builder.as_data_source(split))


def _prepare(builder: Any) -> None:
    from tensorflow_datasets.core.utils import tqdm_utils

    # tfds prints how it goes about it, and draws a bar for every shard.
    with contextlib.redirect_stdout(io.StringIO()), _quiet(tqdm_utils):
        builder.download_and_prepare()


@contextlib.contextmanager
def _quiet(tqdm_utils: Any) -> Iterator[None]:
    tqdm_utils.disable_progress_bar()
    try:
        yield
    finally:
        tqdm_utils.enable_progress_bar()


class _Examples(Sequence):
    """A tfds data source as examples."""

    def __init__(self, source: Any):
        self._source = source

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> Example:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return _from_record(self._source[index])

    def __iter__(self) -> Iterator[Example]:
        for start in range(0, len(self), _READ_AT_ONCE):
            indices = range(start, min(start + _READ_AT_ONCE, len(self)))
            yield from map(_from_record, self._source.__getitems__(indices))


def _to_record(example: Example) -> dict[str, Any]:
    import numpy as np

    return {
        "task": example.task,
        "source": example.source,
        "messages": json.dumps(example.messages, ensure_ascii=False),
        "prompt_ids": np.array(example.prompt_ids, np.int32),
        "output_ids": np.array(example.output_ids, np.int32),
    }


def _from_record(record: dict[str, Any]) -> Example:
    return Example(
        task=record["task"].decode(),
        source=record["source"].decode(),
        messages=tuple(json.loads(record["messages"])),
        prompt_ids=tuple(map(int, record["prompt_ids"])),
        output_ids=tuple(map(int, record["output_ids"])),
    )


def _unwritable(directory: pathlib.Path, error: OSError) -> errors.InputError:
    return errors.InputError(f"{directory}: cannot be written: {error.strerror or error}")
