"""Tool calls of Hermes, Qwen2.5 and Qwen3: JSON objects between tags.

<tool_call>
{"name": "get_weather", "arguments": {"city": "Oslo"}}
</tool_call>
"""

import json
from collections.abc import Iterator

from dflash.text.chat_formats.reader import OutputPart, Reader, Steps
from dflash.text.chat_formats.rules import AnswerRules, TargetTokens, Tool, ToolFormat

_OPENING, _CLOSING = "<tool_call>", "</tool_call>"


def _call(tool: Tool, index: int, tokens: TargetTokens) -> Iterator[str]:
    head = tokens.expression(f'\n{{"name": {json.dumps(tool.name)}, "arguments": ')
    end = tokens.expression(f"}}\n{_CLOSING}")
    yield f"call_{index}: {head} arguments_{index} {end}"
    yield f"arguments_{index}: {tool.arguments}"


def _read(reader: Reader, rules: AnswerRules) -> Steps[None]:
    del rules
    yield from reader.until(f"\n{_OPENING}", _OPENING, kind="content")
    while True:
        yield from reader.until('"name": "')
        name, marker = yield from reader.take('", "arguments": ')
        if not marker.startswith('"'):
            return
        yield OutputPart("call", name)
        yield from reader.json_object(kind="arguments")


FORMAT = ToolFormat(
    signs=(_OPENING,),
    markers=(_OPENING, _CLOSING),
    opening=_OPENING,
    call=_call,
    separator=f"\n{_OPENING}",
    read=_read,
)
