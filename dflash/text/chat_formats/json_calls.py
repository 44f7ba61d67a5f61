"""Tool calls whose arguments are a JSON object.

Hermes, Qwen2.5 and Qwen3 write JSON objects between tags:

    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Oslo"}}
    </tool_call>

With Llama 3.1 and later, the output is one JSON object:

    {"name": "get_weather", "parameters": {"city": "Oslo"}}

Kimi K2 writes a section of calls in one line, whose ids have the name of the function:

    <|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0
    <|tool_call_argument_begin|>{"city": "Oslo"}<|tool_call_end|><|tool_calls_section_end|>
"""

import json
from collections.abc import Iterator

from dflash.text.chat_formats.reader import END, OutputPart, Reader, Steps
from dflash.text.chat_formats.rules import AnswerRules, TargetTokens, Tool, ToolFormat, read_text

_TAG, _TAG_END = "<tool_call>", "</tool_call>"
_OBJECT = '{"name": '
_SECTION, _SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_BEGIN, _ARGUMENTS, _END = (
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
)


def _hermes_call(tool: Tool, index: int, tokens: TargetTokens) -> Iterator[str]:
    head = tokens.expression(f'\n{{"name": {json.dumps(tool.name)}, "arguments": ')
    end = tokens.expression(f"}}\n{_TAG_END}")
    yield f"call_{index}: {head} arguments_{index} {end}"
    yield f"arguments_{index}: {tool.arguments}"


def _read_hermes(reader: Reader, rules: AnswerRules) -> Steps[None]:
    del rules
    yield from reader.until(f"\n{_TAG}", _TAG, kind="content")
    while True:
        yield from reader.until('"name": "')
        name, marker = yield from reader.take('", "arguments": ')
        if not marker.startswith('"'):
            return
        yield OutputPart("call", name)
        yield from reader.json_object(kind="arguments")


def _llama3_call(tool: Tool, index: int, tokens: TargetTokens) -> Iterator[str]:
    head = tokens.expression(f'{json.dumps(tool.name)}, "parameters": ')
    yield f'call_{index}: {head} arguments_{index} "}}"'
    yield f"arguments_{index}: {tool.arguments}"


def _read_llama3(reader: Reader, rules: AnswerRules) -> Steps[None]:
    if not rules.tools or not (yield from reader.begins(_OBJECT)):
        yield from read_text(reader, rules)
        return
    head, marker = yield from reader.take(', "parameters": ')
    if marker != END:
        yield OutputPart("call", head.strip('"'))
        yield from reader.json_object(kind="arguments")


def _kimi_call(tool: Tool, index: int, tokens: TargetTokens) -> Iterator[str]:
    head = tokens.expression(f"{_BEGIN}functions.{tool.name}:")
    arguments, end = tokens.expression(_ARGUMENTS), tokens.expression(_END)
    yield f"call_{index}: {head} /[0-9]{{1,3}}/ {arguments} arguments_{index} {end}"
    yield f"arguments_{index}: {tool.arguments}"


def _read_kimi(reader: Reader, rules: AnswerRules) -> Steps[None]:
    yield from reader.until(_SECTION, kind="content")
    number = rules.earlier_calls
    while (yield from reader.until(_BEGIN)) != END:
        head, marker = yield from reader.take(_ARGUMENTS)
        if marker == END:
            return
        name = head.strip().removeprefix("functions.").rpartition(":")[0]
        # The family numbers the calls of a conversation; a model may err, but ids must differ.
        yield OutputPart("call", name, f"functions.{name}:{number}")
        number += 1
        yield from reader.json_object(kind="arguments")


HERMES = ToolFormat(
    signs=(_TAG,),
    markers=(_TAG, _TAG_END),
    opening=_TAG,
    call=_hermes_call,
    separator=f"\n{_TAG}",
    read=_read_hermes,
)
LLAMA3 = ToolFormat(
    signs=("<|start_header_id|>", '"parameters": '),
    opening=_OBJECT,
    call=_llama3_call,
    begins_output=True,
    read=_read_llama3,
)
KIMI_K2 = ToolFormat(
    signs=(_SECTION,),
    markers=(_SECTION, _SECTION_END, _BEGIN, _ARGUMENTS, _END),
    opening=_SECTION,
    call=_kimi_call,
    separator="",
    closing=_SECTION_END,
    read=_read_kimi,
)
