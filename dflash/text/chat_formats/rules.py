"""Rules of an answer, and its grammar in llguidance's dialect of Lark."""

import dataclasses
import functools
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

from dflash import errors
from dflash.text.chat_formats import arguments
from dflash.text.chat_formats.arguments import Flat
from dflash.text.chat_formats.reader import Reader, Steps
from dflash.text.grammar import Vocabulary
from dflash.text.grammar_compiler import inline_schema

# Reasoning at the beginning of an output, begun by the prompt or by the model.
Thinking = Literal["opened", "optional"]


class Marks(NamedTuple):
    """Texts around the reasoning of a family; `label` follows the start."""

    start: str
    end: str
    label: str = ""

    @property
    def opening(self) -> str:
        """Text that begins the reasoning."""
        return self.start + self.label


THINK = Marks("<think>", "</think>")


@dataclasses.dataclass(frozen=True)
class Tool:
    """Function that the model may call."""

    name: str
    parameters: Mapping[str, Any]

    @property
    def arguments(self) -> str:
        """Lark expression of the arguments."""
        return self.expression(self.parameters)

    @functools.cached_property
    def alternatives(self) -> list[Flat]:
        """Schemas of an object, of which the arguments match one."""
        return arguments.alternatives(self.parameters, self.parameters)

    def closed(self, schema: Any) -> Any:
        """Returns a part of the schema; objects have no other properties than those it names."""
        return arguments.closed(schema, self.parameters)

    def expression(self, schema: Any) -> str:
        """Returns the Lark expression of a part of the arguments."""
        return inline_schema(self.closed(schema))


@dataclasses.dataclass(frozen=True)
class AnswerRules:
    """Contents that an answer may have.

    Attributes:
      thinking: Reasoning at its beginning; None for none.
      marks: Texts around it.
      max_thinking_tokens: Maximum number of tokens of the reasoning; None for no limit.
      content: Lark expression of the text; None for any text.
      earlier_calls: Number of calls in the conversation before it.
    """

    tools: tuple[Tool, ...] = ()
    must_call: bool = False
    parallel: bool = True
    thinking: Thinking | None = None
    marks: Marks = THINK
    max_thinking_tokens: int | None = None
    content: str | None = None
    earlier_calls: int = 0

    @property
    def constrain(self) -> bool:
        """True if an output needs a grammar to follow these rules, apart from `content`."""
        return bool(self.tools) or self.max_thinking_tokens is not None


class TargetTokens:
    """Tokens of a target as grammars name them."""

    def __init__(self, special: Mapping[int, str], vocabulary: Vocabulary):
        """Stores the spellings of special tokens by id, which text never matches."""
        self._special = {spelling: token for token, spelling in special.items()}
        self._texts = vocabulary.tokens.tokens

    def is_special(self, marker: str) -> bool:
        """Returns whether a marker is a special token."""
        return marker in self._special

    def expression(self, text: str) -> str:
        """Returns the Lark expression of a text with special tokens in it."""
        pattern = "|".join(map(re.escape, self._special)) or "(?!)"
        parts = re.split(f"({pattern})", text)
        ids = {spelling: f"<[{token}]>" for spelling, token in self._special.items()}
        return " ".join(ids.get(part) or json.dumps(part) for part in parts if part)

    def until(self, rule: str, marker: str, text: str = "TEXT") -> str:
        """Returns the Lark rule of a text up to the end of its first marker."""
        if self.is_special(marker):
            return f"{rule}: {text} {self.expression(marker)}"
        return f"{rule}[lazy]: {text} {self.expression(marker)}"

    def limited(self, rule: str, marker: str, limit: int) -> str:
        """Returns the Lark rule of a text of at most `limit` tokens, and the marker after it."""
        end = self._special.get(marker)
        if end is None and marker.encode() in self._texts:
            end = self._texts.index(marker.encode())
        if end is None:
            raise errors.InputError(f"the target has no token {marker!r}, with which to end it")
        texts = (i for i, text in enumerate(self._texts) if text and i != end)
        ranges = ",".join(f"{first}-{last}" for first, last in _ranges(texts))
        repeated = f"<[{ranges}]>{{0,{limit}}}" if limit else ""
        return f"{rule}: {repeated} <[{end}]>"


@dataclasses.dataclass(frozen=True)
class ToolFormat:
    """Format in which a family of models writes tool calls; this one has none.

    Attributes:
      signs: Texts that a chat template of the family contains, all of them.
      opening: Text that begins the calls.
      start: Regular expression of the text between the opening and the first call.
      separator: Text between two calls; None if there can be only one.
      closing: Text after the calls.
      begins_output: Whether a call must begin the output; otherwise it may follow a text.
    """

    signs: tuple[str, ...] = ()
    opening: str = ""
    start: str = ""
    separator: str | None = None
    closing: str = ""
    begins_output: bool = False

    markers: ClassVar[tuple[str, ...]] = ()  # Markers that may be special tokens.
    ends: ClassVar[tuple[str, ...]] = ()  # Special tokens with which a model ends its calls.
    reads_thinking: ClassVar[bool] = False  # Whether `read` parses the reasoning, too.

    def call(self, tool: Tool, index: int, tokens: TargetTokens) -> Iterator[str]:
        """Yields the Lark rules of a call, of which the first is named `call_{index}`."""
        raise NotImplementedError

    def read(self, reader: Reader, rules: AnswerRules) -> Steps[None]:
        """Parses an output, without its reasoning."""
        del rules
        yield from reader.until(kind="content")

    def grammar(self, rules: AnswerRules, tokens: TargetTokens) -> str:
        """Returns the grammar of answers."""
        marks, is_optional = rules.marks, rules.thinking == "optional"
        texts = [marks.opening] * (is_optional and not tokens.is_special(marks.start))
        texts += ["\n"] if rules.thinking is not None else []
        texts += [self.opening] if self.begins_output and rules.tools else []
        lines = [*thinking_lines(rules, tokens), f"FIRST: /{_not_beginning(texts)}/", _TEXT]
        choices = [] if rules.must_call else [rules.content or "FIRST"]
        if rules.tools:
            lines += self._calls(rules, tokens)
            choices.append("opening calls")
        return "\n".join([*lines, f"answer: {' | '.join(choices)}"])

    def _calls(self, rules: AnswerRules, tokens: TargetTokens) -> Iterator[str]:
        direct = rules.must_call or self.begins_output or rules.content
        if direct:
            yield f"opening: {tokens.expression(self.opening)}"
        else:
            yield tokens.until("opening", self.opening, "FIRST")
        more = ""
        if rules.parallel and self.separator is not None:
            more = f" ({self.separator and tokens.expression(self.separator)} call)*"
        closing = self.closing and tokens.expression(self.closing)
        start = f"/{self.start}/" if self.start else ""
        yield f"calls: {start} call{more} {closing}"
        yield f"call: {' | '.join(f'call_{i}' for i in range(len(rules.tools)))}"
        for i, tool in enumerate(rules.tools):
            yield from self.call(tool, i, tokens)


_TEXT = r"TEXT: /(.|\n)*/"


def thinking_lines(rules: AnswerRules, tokens: TargetTokens) -> Iterator[str]:
    """Yields the Lark rules `start`, and `thinking` if the output may begin with reasoning."""
    if rules.thinking is None:
        yield "start: answer"
        return
    optional = rules.thinking == "optional"
    yield "start: thinking answer" + " | answer" * optional
    # Models write an empty line between their reasoning and the answer.
    opening = tokens.expression(rules.marks.opening) if optional else ""
    yield f"thinking: {opening} thought /\\n{{0,2}}/"
    if rules.max_thinking_tokens is None:
        yield tokens.until("thought", rules.marks.end)
    else:
        yield tokens.limited("thought", rules.marks.end, rules.max_thinking_tokens)


def read_thinking(reader: Reader, rules: AnswerRules) -> Steps[None]:
    """Parses the reasoning at the beginning of an output, without the line breaks around it."""
    if rules.thinking is None:
        return
    end = rules.marks.end
    if rules.thinking == "opened" or (yield from reader.begins(rules.marks.opening)):
        yield from reader.skip("\n")
        yield from reader.until(f"\n{end}", end, kind="reasoning")
        yield from reader.skip("\n")


def _ranges(numbers: Iterator[int]) -> Iterator[tuple[int, int]]:
    for _, run in itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        members = [number for _, number in run]
        yield members[0], members[-1]


def _not_beginning(texts: Sequence[str]) -> str:
    """Returns the regular expression of all texts that begin with none of these texts."""
    following: dict[str, set[str]] = {}
    for text in texts:
        for size, character in enumerate(text):
            following.setdefault(text[:size], set()).add(character)
    if not following:
        return r"(.|\n)*"
    branches = (
        f"{_escaped(start)}([^{''.join(map(_escaped, sorted(characters)))}](.|\\n)*)?"
        for start, characters in following.items()
    )
    return "|".join(branches)


def _escaped(text: str) -> str:
    return re.escape(text).replace("/", r"\/").replace("\n", r"\n")
