"""Parsing of outputs as they arrive, by generators that read them like a file.

    def read(reader):
        yield from reader.until("<tool_call>", kind="content")
        ...

    parser = Parser(read)
    for text in stream:
        parts = parser.push(text)

A generator yields `OutputPart`s, and None where it needs more text. Text that may be the beginning
of a marker is held back, so every part is final.
"""

import dataclasses
import itertools
import json
import re
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Literal, TypeVar

# Mark of the end of an output, found like any marker; a Unicode noncharacter, reserved for
# internal use.
END = "\ufdd1"

Kind = Literal["content", "reasoning", "call", "arguments"]
Result = TypeVar("Result")


@dataclasses.dataclass(frozen=True)
class OutputPart:
    """Part of an output.

    Attributes:
      kind: "call" begins a tool call; "arguments" continues the latest one.
      text: Text of the part; the name of the function for "call".
      id: Id of a call, if the format has one.
    """

    kind: Kind
    text: str
    id: str | None = None


Steps = Generator[OutputPart | None, None, Result]


class Reader:
    """Text of an output, which arrives in pieces.

    The methods are generators, to be called with `yield from`.
    """

    def __init__(self):
        self._text = ""

    def feed(self, text: str, *, final: bool) -> None:
        """Appends a piece; `final` marks the end of the output."""
        self._text += text.replace(END, "\ufffd") + END * final

    def until(
        self,
        *markers: str,
        kind: Kind | None = None,
        change: Callable[[str], str] = str,
    ) -> Steps[str]:
        """Yields the text before the first marker, and returns the marker, or END.

        Args:
          *markers: Strings to find; of two that begin at the same place, the first one counts.
          kind: Kind of the parts; None drops the text.
          change: Function of each piece of the text.
        """
        while True:
            text, marker = self._cut(markers)
            if text and kind is not None:
                yield OutputPart(kind, change(text))
            if marker:
                return marker
            yield None

    def take(self, *markers: str) -> Steps[tuple[str, str]]:
        """Returns the text before the first marker, and the marker, or END."""
        taken = ""
        while True:
            text, marker = self._cut(markers)
            taken += text
            if marker:
                return taken, marker
            yield None

    def json_object(self, *, kind: Kind) -> Steps[None]:
        """Yields the text of a JSON object, and ends after its last brace, or at END."""
        depth, in_string, is_escaped = 0, False, False
        while True:
            for place, character in enumerate(self._text):
                if character == END:
                    yield from self._yield_first(place, kind)
                    return
                if is_escaped:
                    is_escaped = False
                elif in_string:
                    in_string, is_escaped = character != '"', character == "\\"
                elif character == '"':
                    in_string = True
                elif character in "{[":
                    depth += 1
                elif character in "}]":
                    depth -= 1
                    if depth <= 0:
                        yield from self._yield_first(place + 1, kind)
                        return
            yield from self._yield_first(len(self._text), kind)
            yield None

    def _yield_first(self, size: int, kind: Kind) -> Steps[None]:
        """Removes the first characters of the text, and yields them."""
        text, self._text = self._text[:size], self._text[size:]
        if text:
            yield OutputPart(kind, text)

    def begins(self, *markers: str) -> Steps[bool]:
        """Returns whether the text begins with a marker, which is skipped."""
        while True:
            for marker in markers:
                if self._text.startswith(marker):
                    self._text = self._text[len(marker) :]
                    return True
            if not any(marker.startswith(self._text) for marker in markers):
                return False
            yield None

    def skip(self, characters: str) -> Steps[None]:
        """Skips all of these characters at the beginning of the text."""
        while not self._text.lstrip(characters):
            self._text = ""
            yield None
        self._text = self._text.lstrip(characters)

    def _cut(self, markers: tuple[str, ...]) -> tuple[str, str]:
        """Removes the final text before the first marker; returns it and the marker, or ""."""
        markers = (*markers, END)
        match = re.search("|".join(map(re.escape, markers)), self._text)
        if match is None:
            size = len(self._text) - unfinished(self._text, markers)
            text, self._text = self._text[:size], self._text[size:]
            return text, ""
        text, marker = self._text[: match.start()], match[0]
        # The end stays, so that it is found again.
        self._text = END if marker.endswith(END) else self._text[match.end() :]
        return text, marker


class Parser:
    """Parser of one output."""

    def __init__(self, read: Callable[[Reader], Steps[None]]):
        self._reader = Reader()
        self._steps = read(self._reader)

    def push(self, text: str, *, final: bool = False) -> tuple[OutputPart, ...]:
        """Appends a piece of text and returns the parts that are now final."""
        self._reader.feed(text, final=final)
        return merged(itertools.takewhile(lambda part: part is not None, self._steps))


def merged(parts: Iterator[OutputPart] | tuple[OutputPart, ...]) -> tuple[OutputPart, ...]:
    """Joins neighbors of the same kind."""
    joined: list[OutputPart] = []
    for part in parts:
        if joined and part.kind == joined[-1].kind != "call":
            part = OutputPart(part.kind, joined.pop().text + part.text)
        joined.append(part)
    return tuple(joined)


def escaped(text: str) -> str:
    """Returns a text as it is within a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def unfinished(text: str, markers: Sequence[str]) -> int:
    """Returns the length of the longest end of a text that begins a marker, without being one."""
    longest = max(map(len, markers), default=1) - 1
    ends = (text[at:] for at in range(max(0, len(text) - longest), len(text)))
    begins = (end for end in ends if any(mark.startswith(end) and mark != end for mark in markers))
    return len(next(begins, ""))
