"""Base class of data sets."""

import abc
from collections.abc import Iterator
from typing import ClassVar

from dflash import errors
from dflash.config.train_schema import DataConfig
from dflash.data.example import Example, Split, shuffled


class Dataset(abc.ABC):
    """Data set whose name, version, variant and split determine its examples.

    Attributes:
      version: Version of the examples; raise it when they change.
      variant: Everything else that the examples depend on, as part of a directory name.
      has_answers: True if some examples have a final answer to compare with.
      takes_long: True if the data set may be too large to be read at every start.
    """

    name: ClassVar[str]
    version: ClassVar[str] = "1.0.0"
    has_answers: ClassVar[bool] = False
    takes_long: ClassVar[bool] = False

    def __init__(self, config: DataConfig):
        self._config = config

    @property
    @abc.abstractmethod
    def variant(self) -> str: ...

    @abc.abstractmethod
    def examples(self, split: Split) -> Iterator[Example]:
        """Yields every example of a split, in a fixed order."""

    def count(self, split: Split) -> int | None:
        """Returns the number of examples of a split; None if telling it takes as long as encoding.

        Raises:
          InputError: Some examples are unusable.
        """
        return sum(1 for _ in self.examples(split)) if self.takes_long else None

    def sample(self, split: Split, limit: int | None = None) -> list[Example]:
        """Returns up to `limit` examples from all over a split, always the same ones."""
        return shuffled(list(self.examples(split)))[:limit]

    def is_correct(self, example: Example, text: str, *, finished: bool = True) -> bool | None:
        """Returns whether `text` has the final answer of the example; None if that has none.

        Args:
          finished: False if the text was cut off at a limit; see `answers.find`.
        """
        del example, text, finished
        return None

    def empty(self, split: Split) -> errors.InputError:
        """Returns the error for a split without examples."""
        return errors.InputError(f"data set {self.name}: no examples in its split {split}")
