"""Tool calls of Llama 3.1 and later: the output is one JSON object.

{"name": "get_weather", "parameters": {"city": "Oslo"}}
"""

import json
from collections.abc import Iterator

from dflash.text.chat_formats.reader import END, OutputPart, Reader, Steps
from dflash.text.chat_formats.rules import AnswerRules, TargetTokens, Tool, ToolFormat, read_text

_OPENING = '{"name": '


def _call(tool: Tool, index: int, tokens: TargetTokens) -> Iterator[str]:
    head = tokens.expression(f'{json.dumps(tool.name)}, "parameters": ')
    yield f'call_{index}: {head} arguments_{index} "}}"'
    yield f"arguments_{index}: {tool.arguments}"


def _read(reader: Reader, rules: AnswerRules) -> Steps[None]:
    if not rules.tools or not (yield from reader.begins(_OPENING)):
        yield from read_text(reader, rules)
        return
    head, marker = yield from reader.take(', "parameters": ')
    if marker != END:
        yield OutputPart("call", head.strip('"'))
        yield from reader.json_object(kind="arguments")


FORMAT = ToolFormat(
    signs=("<|start_header_id|>", '"parameters": '),
    opening=_OPENING,
    call=_call,
    begins_output=True,
    read=_read,
)
