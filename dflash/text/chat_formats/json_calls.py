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

DeepSeek-V3.1 writes sections, too, and DeepSeek-V3 and R1 a block of Markdown for each call:

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Oslo"}
    <｜tool▁call▁end｜><｜tool▁calls▁end｜>

Mistral's models write a list (tokenizers v3 and v7), or each call after its own marker, with an id
(v11) or without (v13 and v15):

    [TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Oslo"}, "id": "a1B2c3D4e"}]
    [TOOL_CALLS]get_weather[CALL_ID]a1B2c3D4e[ARGS]{"city": "Oslo"}
    [TOOL_CALLS]get_weather[ARGS]{"city": "Oslo"}

Source: the families' chat templates; mistral-common, `tests/data/chat_templates`.
"""

import dataclasses
import re
from collections.abc import Iterator

from dflash.text.chat_formats.reader import END, OutputPart, Reader, Steps
from dflash.text.chat_formats.rules import AnswerRules, TargetTokens, Tool, ToolFormat

_MARKER = re.compile(r"<[^<>\s]+>|\[[A-Z_]+\]")
# Texts and, in every second place, regular expressions.
_Pieces = tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class JsonCalls(ToolFormat):
    """Format of calls that consist of a name, arguments, and texts around them.

    Attributes:
      before: Text before the name.
      after: Text after the name, which may have an id as its second piece.
      end: Text after the arguments.
      id: Id of a call, of its `name`, its `number` in the conversation, and the id as `written`;
        "" for any.
      takes_line: Whether a text before the calls has a line break at its end.
    """

    before: str
    after: _Pieces
    end: _Pieces
    id: str = ""
    takes_line: bool = False

    @property
    def markers(self) -> tuple[str, ...]:
        texts = (self.opening, self.before, *self.after, *self.end, self.closing)
        return tuple(dict.fromkeys(_MARKER.findall(" ".join(texts))))

    def call(self, tool: Tool, index: int, tokens: TargetTokens) -> Iterator[str]:
        head, *after = (self.before + tool.name + self.after[0], *self.after[1:])
        texts = (_expression((head, *after), tokens), _expression(self.end, tokens))
        yield f"call_{index}: {texts[0]} arguments_{index} {texts[1]}"
        yield f"arguments_{index}: {tool.arguments}"

    def read(self, reader: Reader, rules: AnswerRules) -> Steps[None]:
        if not self.begins_output:
            lines = (f"\n{self.opening}",) if self.takes_line else ()
            yield from reader.until(*lines, self.opening, kind="content")
        elif not rules.tools or not (yield from reader.begins(self.opening)):
            yield from super().read(reader, rules)
        if self.before:
            yield from reader.until(self.before)
        number, marker = rules.earlier_calls, ""
        while marker != END and (yield from self._read_call(reader, number)):
            if self.separator is None:
                return
            number += 1
            marker = yield from reader.until(self.before or self.separator)

    def _read_call(self, reader: Reader, number: int) -> Steps[bool]:
        name, marker = yield from reader.take(self.after[0])
        written = ""
        if len(self.after) > 1 and marker != END:
            written, marker = yield from reader.take(self.after[-1])
        if marker == END:
            return False
        id = self.id.format(name=name, number=number, written=written)
        yield OutputPart("call", name, id or None)
        yield from reader.json_object(kind="arguments")
        return True


def _expression(pieces: _Pieces, tokens: TargetTokens) -> str:
    """Returns the Lark expression of texts and regular expressions."""
    return " ".join(
        f"/{piece}/" if place % 2 else tokens.expression(piece)
        for place, piece in enumerate(pieces)
    )


HERMES = JsonCalls(
    signs=("<tool_call>",),
    opening="<tool_call>",
    before='\n{"name": "',
    after=('", "arguments": ',),
    end=("}\n</tool_call>",),
    separator="\n<tool_call>",
    takes_line=True,
)
LLAMA3 = JsonCalls(
    signs=("<|start_header_id|>", '"parameters": '),
    opening='{"name": ',
    before='"',
    after=('", "parameters": ',),
    end=("}",),
    begins_output=True,
)
KIMI_K2 = JsonCalls(
    signs=("<|tool_calls_section_begin|>",),
    opening="<|tool_calls_section_begin|>",
    before="<|tool_call_begin|>functions.",
    after=(":", "[0-9]{1,3}", "<|tool_call_argument_begin|>"),
    end=("<|tool_call_end|>",),
    separator="",
    closing="<|tool_calls_section_end|>",
    # The family numbers the calls of a conversation; a model may err, but ids must differ.
    id="functions.{name}:{number}",
)
DEEPSEEK_V31 = JsonCalls(
    signs=("<｜tool▁calls▁begin｜>",),
    opening="<｜tool▁calls▁begin｜>",
    before="<｜tool▁call▁begin｜>",
    after=("<｜tool▁sep｜>",),
    end=("<｜tool▁call▁end｜>",),
    separator="",
    closing="<｜tool▁calls▁end｜>",
)
DEEPSEEK_V3 = dataclasses.replace(
    DEEPSEEK_V31,
    signs=("<｜tool▁calls▁begin｜>", "```json"),
    before="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
    after=("\n```json\n",),
    end=("\n```<｜tool▁call▁end｜>",),
    separator="\n",
)
MISTRAL_V13 = JsonCalls(
    signs=("[TOOL_CALLS]", "[ARGS]"),
    opening="[TOOL_CALLS]",
    before="",
    after=("[ARGS]",),
    end=("",),
    separator="[TOOL_CALLS]",
    id="call{number:05d}",
)
MISTRAL_V11 = dataclasses.replace(
    MISTRAL_V13,
    signs=("[TOOL_CALLS]", "[CALL_ID]"),
    after=("[CALL_ID]", "[a-zA-Z0-9]{9}", "[ARGS]"),
    id="{written}",
)
MISTRAL_V7 = JsonCalls(
    signs=("[TOOL_CALLS]", "[TOOL_CONTENT]"),
    opening="[TOOL_CALLS]",
    start=r" ?\[",  # SentencePiece puts a space there.
    before='{"name": "',
    after=('", "arguments": ',),
    end=("", r'(, "id": "[a-zA-Z0-9]{9}")?', "}"),
    separator=", ",
    closing="]",
    id="call{number:05d}",
)
MISTRAL_V3 = dataclasses.replace(MISTRAL_V7, signs=("[TOOL_CALLS]",), begins_output=True)
