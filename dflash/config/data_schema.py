"""Config group of training data: data sets, their shares, and their layout in rows."""

import dataclasses
from collections.abc import Mapping

from dflash.config import schema
from dflash.config.schema import location, option


@dataclasses.dataclass(frozen=True)
class TfdsConfig:
    """Data set of tensorflow-datasets, and how its rows become conversations.

    Either `messages` names a field, or `prompt` and `response` do.
    """

    name: str | None = None  # As in tfds.data_source: "name", "name/config:1.0.0".
    data_dir: str | None = location("disk")  # None stands for ~/tensorflow_datasets.
    # Split of tfds for train, validation and test, such as {validation: "train[:1%]"}. Without one,
    # validation and test are held_out_percent of the questions of train.
    splits: Mapping[str, str] = option({})
    messages: str | None = None  # Field with a list of messages, each with role and content.
    prompt: str | None = None  # Field with a question.
    response: str | None = None  # Field with its answer.


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Data of a training run; dflash/config/registry.py lists the names of data sets."""

    mixture: Mapping[str, float] = option({}, minimum=0.0)  # Share of the rows, by data set.
    # Files of the data set jsonl, which is the only one if there is no mixture.
    files: tuple[str, ...] = location("file", ())
    tfds: TfdsConfig = dataclasses.field(default_factory=TfdsConfig)  # The data set tfds.
    # Percentage of jsonl and tfds for each of validation and test.
    held_out_percent: float = option(1.0, minimum=0.0, maximum=40.0)
    math_examples: int = option(100_000, minimum=1)  # Number of training examples of math.
    # Tokens per row; longer conversations are truncated.
    length: int = option(1024, minimum=2, maximum=schema.MAX_TOKENS)
    seed: int = option(0, minimum=0, maximum=2**31 - 1)  # Seed of the order of rows.
    thinking: bool = False  # The chat template asks for reasoning first, as prompts.thinking.
    data_dir: str | None = location("disk")  # None: ~/.cache/dflash/datasets.
    raw_dir: str | None = location("disk")  # Files of published sets; None: raw/ in data_dir.

    @property
    def shares(self) -> dict[str, float]:
        """Mixture without data sets of share 0; shares need not add up to 1."""
        if not self.mixture and self.files:
            return {"jsonl": 1.0}
        return {name: share for name, share in self.mixture.items() if share}
