"""Tool calls of Gemma 4, whose arguments have a notation of their own.

A call and the token after it, in one line:

<|tool_call>call:get_weather{city:<|"|>Oslo<|"|>,days:[1,2],place:{north:true}}<tool_call|>
<|tool_response>

Strings stand as they are between two special tokens, names without quotes in the order of the
alphabet, and the rest as in JSON. The model ends its calls with the token that begins a result.

Source: chat template of google/gemma-4-31B-it.
"""

import json
from collections.abc import Iterator

from dflash.text.chat_formats.reader import END, OutputPart, Reader, Steps, escaped
from dflash.text.chat_formats.rules import AnswerRules, TargetTokens, Tool, ToolFormat
from dflash.text.chat_formats.values import Values

_OPENING, _CLOSING, _QUOTE, _RESULT = "<|tool_call>", "<tool_call|>", '<|"|>', "<|tool_response>"
_DIVIDERS = ("{", "[", "}", "]", ",")


def _read_arguments(reader: Reader) -> Steps[None]:
    """Yields the JSON text of an object, whose first brace was read."""
    brackets, marker = ["{"], "{"
    yield OutputPart("arguments", "{")
    while brackets and marker != END:
        is_empty = False
        if brackets[-1] == "{" and marker in ("{", ","):
            is_empty = marker == "{" and (yield from reader.begins("}"))
            if not is_empty:
                name, marker = yield from reader.take(":")
                if marker == END:
                    return
                yield OutputPart("arguments", f"{json.dumps(name, ensure_ascii=False)}: ")
        if is_empty:
            marker = "}"
        elif (yield from reader.begins(_QUOTE)):
            yield OutputPart("arguments", '"')
            if (yield from reader.until(_QUOTE, kind="arguments", change=escaped)) == END:
                return
            yield OutputPart("arguments", '"')
            marker = yield from reader.until(*_DIVIDERS)
        else:
            marker = yield from reader.until(*_DIVIDERS, kind="arguments")
        if marker in ("{", "["):
            brackets.append(marker)
        elif marker in ("}", "]"):
            brackets.pop()
        if marker != END:
            yield OutputPart("arguments", ", " if marker == "," else marker)


class _Gemma4(ToolFormat):
    """Format whose arguments are in a notation of its own."""

    markers, ends = (_OPENING, _CLOSING, _QUOTE), (_RESULT,)

    def call(self, tool: Tool, index: int, tokens: TargetTokens) -> Iterator[str]:
        schema = tool.closed(tool.parameters)
        values = Values(f"arguments_{index}", _QUOTE, schema, tokens)
        head, end = tokens.expression(f"call:{tool.name}"), tokens.expression(_CLOSING)
        yield f"call_{index}: {head} {values.rule(schema)} {end}"
        yield from values.lines

    def read(self, reader: Reader, rules: AnswerRules) -> Steps[None]:
        del rules
        yield from reader.until(_OPENING, kind="content")
        while (yield from reader.until("call:")) != END:
            name, marker = yield from reader.take("{")
            if marker == END:
                return
            yield OutputPart("call", name)
            yield from _read_arguments(reader)


FORMAT = _Gemma4(signs=("<|tool_call>call:",), opening=_OPENING, separator=_OPENING)
