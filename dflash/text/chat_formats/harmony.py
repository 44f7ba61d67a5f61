"""Harmony, the format of gpt-oss: messages in channels, which calls and reasoning are, too.

<|channel|>analysis<|message|>They ask about Oslo.<|end|><|start|>assistant
<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Oslo"}<|call|>
(in one line)
"""

import re
from collections.abc import Iterator

from dflash.text.chat_formats.reader import END, OutputPart, Reader, Steps
from dflash.text.chat_formats.rules import AnswerRules, TargetTokens, Tool, ToolFormat

_START, _CHANNEL, _MESSAGE, _END = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"
_CONSTRAIN = "<|constrain|>"
_RECIPIENT = re.compile(r"to=functions\.([\w-]+)")


class _Harmony(ToolFormat):
    """Format whose answers consist of messages."""

    reads_thinking = True

    def grammar(self, rules: AnswerRules, tokens: TargetTokens) -> str:
        lines = [r"TEXT: /(.|\n)*/", *_thinking(rules, tokens), *_calls(rules, tokens)]
        last = [] if rules.must_call else [f"final {rules.content or 'TEXT'}"]
        last += ["call"] if rules.tools else []
        final = tokens.expression(f"{_CHANNEL}final{_MESSAGE}")
        return "\n".join([*lines, f"final: {final}", f"last: {' | '.join(last)}"])


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
    del rules
    while True:
        head, marker = yield from reader.take(_MESSAGE)
        if marker == END:
            # The output ends within a head, or it is not in this format.
            if _CHANNEL not in head and not head.startswith(_START):
                yield OutputPart("content", head)
            return
        recipient = _RECIPIENT.search(head)
        if recipient:
            yield OutputPart("call", recipient[1])
            yield from reader.json_object(kind="arguments")
            return  # A call ends the turn.
        kind = "reasoning" if "analysis" in head else "content"
        if (yield from reader.until(_END, kind=kind)) == END:
            return


FORMAT = _Harmony(
    signs=(_CHANNEL, _MESSAGE),
    markers=(_START, _CHANNEL, _MESSAGE, _END, _CONSTRAIN),
    read=_read,
)
