"""Tool calls of Kimi K2: a section of calls, whose ids have the name of the function.

<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0
<|tool_call_argument_begin|>{"city": "Oslo"}<|tool_call_end|><|tool_calls_section_end|>
(in one line)
"""

from collections.abc import Iterator

from dflash.text.chat_formats.reader import END, OutputPart, Reader, Steps
from dflash.text.chat_formats.rules import AnswerRules, TargetTokens, Tool, ToolFormat

_SECTION, _SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_BEGIN, _ARGUMENTS, _END = (
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
)


def _call(tool: Tool, index: int, tokens: TargetTokens) -> Iterator[str]:
    head = tokens.expression(f"{_BEGIN}functions.{tool.name}:")
    arguments, end = tokens.expression(_ARGUMENTS), tokens.expression(_END)
    yield f"call_{index}: {head} /[0-9]{{1,3}}/ {arguments} arguments_{index} {end}"
    yield f"arguments_{index}: {tool.arguments}"


def _read(reader: Reader, rules: AnswerRules) -> Steps[None]:
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


FORMAT = ToolFormat(
    signs=(_SECTION,),
    markers=(_SECTION, _SECTION_END, _BEGIN, _ARGUMENTS, _END),
    opening=_SECTION,
    call=_call,
    separator="",
    closing=_SECTION_END,
    read=_read,
)
