"""Harmony, the format of gpt-oss: messages in channels, which calls and reasoning are, too.

<|channel|>analysis<|message|>They ask about Oslo.<|end|><|start|>assistant
<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Oslo"}<|call|>
(in one line)
"""

import re
from collections.abc import Iterator, Mapping

from dflash.text.chat_formats.reader import END, OutputPart, Reader, Steps
from dflash.text.chat_formats.rules import AnswerRules, TargetTokens, Tool, ToolFormat

_START, _CHANNEL, _MESSAGE, _END = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"
_CONSTRAIN = "<|constrain|>"
_MARKERS = (_START, _CHANNEL, _MESSAGE, _END, _CONSTRAIN, "<|return|>", "<|call|>")
# Parts of a head by the marker before them. Models err: anything else there is text.
_RECIPIENT = r"(\s+to=(functions\.)?(?P<recipient>[\w-]+))?"
_NAME = rf"\s*(?P<channel>analysis|commentary|final)\b{_RECIPIENT}(\s+(json|code)\s*$)?\s*"
_HEADS = {
    _START: re.compile(rf"assistant\b{_RECIPIENT}\s*"),
    _CHANNEL: re.compile(_NAME),
    _CONSTRAIN: re.compile(r"\s*\w*\s*$"),
}
_COMPLETE_HEADS = ("assistant to=functions.", "analysis", "commentary to=functions.", "final")


class _Harmony(ToolFormat):
    """Format whose answers consist of messages."""

    markers, reads_thinking = _MARKERS, True

    def grammar(self, rules: AnswerRules, tokens: TargetTokens) -> str:
        lines = [r"TEXT: /(.|\n)*/", *_thinking(rules, tokens), *_calls(rules, tokens)]
        last = [] if rules.must_call else [f"final {rules.content or 'TEXT'}"]
        last += ["call"] if rules.tools else []
        final = tokens.expression(f"{_CHANNEL}final{_MESSAGE}")
        return "\n".join([*lines, f"final: {final}", f"last: {' | '.join(last)}"])

    def read(self, reader: Reader, rules: AnswerRules) -> Steps[None]:
        return _read(reader, rules)


def _thinking(rules: AnswerRules, tokens: TargetTokens) -> Iterator[str]:
    message = f"{_CHANNEL}{{}}{_MESSAGE}"
    following = tokens.expression(f"{_START}assistant")
    yield f"analysis: {tokens.expression(message.format('analysis'))} thought {following}"
    yield f"preamble: {tokens.expression(message.format('commentary'))} remark {following}"
    yield tokens.until("remark", _END)
    if rules.max_thinking_tokens is None:
        yield "start: (analysis | preamble)* last"
        yield tokens.until("thought", _END)
    else:
        yield "start: analysis? preamble? last"
        yield tokens.limited("thought", _END, rules.max_thinking_tokens)


def _calls(rules: AnswerRules, tokens: TargetTokens) -> Iterator[str]:
    if rules.tools:
        yield f"call: {' | '.join(f'call_{i}' for i in range(len(rules.tools)))}"
    for i, tool in enumerate(rules.tools):
        yield f"call_{i}: {_head(tool, tokens)} {tool.arguments}"


def _head(tool: Tool, tokens: TargetTokens) -> str:
    recipient = f"commentary to=functions.{tool.name} {_CONSTRAIN}json"
    return tokens.expression(f"{_CHANNEL}{recipient}{_MESSAGE}")


def _read(reader: Reader, rules: AnswerRules) -> Steps[None]:
    tools, kind = {tool.name for tool in rules.tools}, "content"
    while True:
        marker, head = (yield from reader.until(*_MARKERS, kind=kind)), {}
        while marker in (_START, _CHANNEL) or (head and marker == _CONSTRAIN):
            head, marker = yield from _read_head(reader, marker, head)
        if marker == END:
            return
        if marker == _MESSAGE and head.get("recipient") in tools:
            yield OutputPart("call", head["recipient"])
            yield from reader.json_object(kind="arguments")
            yield from reader.skip(" \n")
            kind = "content"
        elif head or marker not in (_MESSAGE, _CONSTRAIN):
            is_reasoning = marker == _MESSAGE and head.get("channel") == "analysis"
            kind = "reasoning" if is_reasoning else "content"


def _read_head(
    reader: Reader, marker: str, head: Mapping[str, str]
) -> Steps[tuple[dict[str, str], str]]:
    """Yields what a part of a head has besides as text; returns all names and the next marker."""
    if marker == _START or (marker == _CHANNEL and "channel" in head):
        head = {}  # It begins again.
    text, following = yield from reader.take(*_MARKERS)
    match = _HEADS[marker].match(text)
    names = match.groupdict() if match else {}
    head = {**head, "marker": marker} | {key: name for key, name in names.items() if name}
    is_unfinished = following == END and any(form.startswith(text) for form in _COMPLETE_HEADS)
    if (remainder := text[match.end() if match else 0 :]) and not is_unfinished:
        kind = "reasoning" if head.get("channel") == "analysis" else "content"
        yield OutputPart(kind, remainder)
    return head, following


FORMAT = _Harmony(signs=(_CHANNEL, _MESSAGE))
