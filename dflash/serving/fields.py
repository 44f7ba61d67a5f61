"""Reads the fields of a JSON object one by one; what is left over in the end is refused.

fields = Fields(body)
limit = fields.integer("max_tokens", Bounds(1))
fields.finish(harmless={"best_of": (1,)})
"""

import dataclasses
import difflib
from collections.abc import Collection, Mapping
from typing import Any

from dflash import errors
from dflash.config.schema import FLOAT32_MAX
from dflash.serving.refusal import Refusal, unsupported
from dflash.text import jsonl

ANYTHING = None  # of a harmless field: whatever its value


@dataclasses.dataclass(frozen=True)
class Bounds:
    """Inclusive bounds of a number; None: there is none."""

    minimum: float | None = None
    maximum: float | None = None

    def hold(self, value: float) -> bool:
        """Whether the value is within them."""
        above = self.minimum is None or value >= self.minimum
        return above and (self.maximum is None or value <= self.maximum)

    def words(self) -> str:
        """ "1 to 4", "1 or more", or nothing."""
        if self.minimum is None:
            return "" if self.maximum is None else f"at most {self.maximum:g}"
        if self.maximum is None:
            return f"{self.minimum:g} or more"
        return f"{self.minimum:g} to {self.maximum:.10g}"


ANY = Bounds()


class Fields:
    """The fields of an object; one that is null counts as left out, as in OpenAI's API."""

    def __init__(self, values: Mapping[str, Any], place: str = ""):
        """Takes a JSON object; `place` is its own name, such as "stream_options"."""
        self._left = {name: value for name, value in values.items() if value is not None}
        self._known: list[str] = []
        self._place = place

    def path(self, name: str) -> str:
        """The name of a field as errors give it."""
        return f"{self._place}.{name}" if self._place else name

    def take(self, name: str) -> Any:
        """The value as it is; None where it is left out."""
        self._known.append(name)
        return self._left.pop(name, None)

    def integer(self, name: str, bounds: Bounds = ANY) -> int | None:
        """An integer within bounds; None where it is left out."""
        value = self.take(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong(name, value, "an integer", bounds)
        if not bounds.hold(value):
            raise self._wrong(name, value, "an integer", bounds)
        return value

    def number(self, name: str, bounds: Bounds = ANY) -> float | None:
        """Returns a number within bounds that a float32 can hold; None if the field is absent."""
        value = self.take(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(name, value, "a number", bounds)
        if not (abs(value) <= FLOAT32_MAX and bounds.hold(value)):
            if bounds.maximum is None and value > 0:
                bounds = Bounds(bounds.minimum, FLOAT32_MAX)
            raise self._wrong(name, value, "a number", bounds)
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        """A truth value."""
        value = self.take(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self._wrong(name, value, "true or false")
        return value

    def text(self, name: str) -> str | None:
        """A string that is whole Unicode; None where it is left out."""
        value = self.take(name)
        return None if value is None else as_text(value, self.path(name))

    def group(self, name: str) -> "Fields":
        """An object's own fields; an empty one where it is left out."""
        value = self.take(name)
        path = self.path(name)
        return Fields({} if value is None else as_mapping(value, path), path)

    def rest(self) -> Mapping[str, Any]:
        """All fields that nobody has taken, whatever they are called."""
        left, self._left = self._left, {}
        return left

    def finish(self, harmless: Mapping[str, Collection[Any] | None] | None = None) -> None:
        """Refuses the fields that nobody has taken.

        Args:
          harmless: fields that change nothing at these values; ANYTHING: at any.
        Raises:
          Refusal: a field is unknown, or has a value that is not supported.
        """
        harmless = harmless or {}
        for name, value in self._left.items():
            path = self.path(name)
            if name not in harmless:
                raise unsupported(path, f"not supported{self._near(name, harmless)}")
            allowed = harmless[name]
            if allowed is not ANYTHING and not any(_same(value, one) for one in allowed):
                words = " or ".join(map(jsonl.quote, allowed))
                raise unsupported(path, f"only {words} is supported, not {jsonl.quote(value)}")

    def _near(self, name: str, harmless: Collection[str]) -> str:
        near = difflib.get_close_matches(name[:100], [*self._known, *harmless], n=1)
        return f"; did you mean {self.path(near[0])!r}?" if near else ""

    def _wrong(self, name: str, value: Any, kind: str, bounds: Bounds = ANY) -> Refusal:
        path, expected = self.path(name), ", ".join(filter(None, (kind, bounds.words())))
        return Refusal(f"{path}: expected {expected}; got {jsonl.quote(value)}", param=path)


def as_text(value: Any, param: str) -> str:
    """A value as a string that is whole Unicode.

    Raises:
      Refusal: it is something else.
    """
    if not isinstance(value, str):
        raise Refusal(f"{param}: expected a string; got {jsonl.quote(value)}", param=param)
    try:
        return jsonl.check_unicode(value, param)
    except errors.InputError as error:
        raise Refusal(str(error), param=param) from error


def as_mapping(value: Any, param: str) -> Mapping[str, Any]:
    """A value as a JSON object.

    Raises:
      Refusal: it is something else.
    """
    if not isinstance(value, dict):
        raise Refusal(f"{param}: expected an object; got {jsonl.quote(value)}", param=param)
    return value


def as_ids(value: Any, param: str, vocab_size: int) -> tuple[int, ...]:
    """A value as token ids of the vocabulary, maybe none.

    Raises:
      Refusal: it is something else.
    """
    if not isinstance(value, list):
        raise Refusal(f"{param}: expected a list of token ids", param=param)
    for place, token in enumerate(value):
        if isinstance(token, bool) or not isinstance(token, int):
            where = f"{param}[{place}]"
            raise Refusal(f"{where}: expected a token id; got {jsonl.quote(token)}", param=param)
        if not 0 <= token < vocab_size:
            raise Refusal(
                f"{param}[{place}]: {jsonl.quote(token)} is outside the vocabulary of {vocab_size}",
                param=param,
            )
    return tuple(value)


def _same(value: Any, other: Any) -> bool:
    """Equality that tells true from 1."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)
