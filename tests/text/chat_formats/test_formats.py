"""Parsers of outputs, and grammars under which random outputs are valid calls."""

import dataclasses
import json

import pytest
from support import random_calls
from support.published_templates import CHATML, LLAMA3, QWEN3

from dflash.text.chat_formats.reader import OutputPart, Parser
from dflash.text.chat_formats.rules import AnswerRules, Tool
from dflash.text.chat_formats.table import FORMATS, PLAIN, ChatFormat, format_of

WEATHER = Tool(
    "get_weather",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "unit": {"enum": ["c", "f"]},
        },
        "required": ["city"],
    },
)
ARGUMENTS = {"city": 'The "old" town\n', "days": 3, "unit": "c"}
WRITTEN = json.dumps(ARGUMENTS)
RULES = AnswerRules(tools=(WEATHER,))
OUTPUTS = {
    "hermes": 'Let me see.\n<tool_call>\n{"name": "get_weather", "arguments": WRITTEN}\n</tool_call'
    '>\n<tool_call>\n{"name": "get_weather", "arguments": {}}\n</tool_call>',
    "qwen3_coder": "Let me see.\n<tool_call>\n<function=get_weather>\n<parameter=city>\n"
    'The "old" town\n\n</parameter>\n<parameter=days>\n3\n</parameter>\n<parameter=unit>\nc\n'
    "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=get_weather>\n"
    "</function>\n</tool_call>",
    "kimi_k2": "Let me see.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
    "<|tool_call_argument_begin|>WRITTEN<|tool_call_end|><|tool_call_begin|>functions.get_weather:9"
    "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
    "llama3_json": '{"name": "get_weather", "parameters": WRITTEN}',
    "harmony": "<|channel|>analysis<|message|>A city?<|end|><|start|>assistant<|channel|>commentary"
    "<|message|>Let me see.<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather "
    "<|constrain|>json<|message|>WRITTEN",
}


OUTPUTS = {name: text.replace("WRITTEN", WRITTEN) for name, text in OUTPUTS.items()}


def parse(parser: Parser, text: str, size: int) -> list[OutputPart]:
    """Returns the parts of a text that arrives in pieces of a size, with neighbors joined."""
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    parts = [part for piece in pieces for part in parser.push(piece)]
    joined: list[OutputPart] = []
    for part in (*parts, *parser.push("", final=True)):
        if joined and part.kind == joined[-1].kind != "call":
            part = dataclasses.replace(part, text=joined.pop().text + part.text)
        joined.append(part)
    return joined


def content(parts, kind: str) -> str:
    return "".join(part.text for part in parts if part.kind == kind)


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("name", FORMATS)
def test_calls_of_each_format(name, size):
    parts = parse(ChatFormat(FORMATS[name]).parser(RULES), OUTPUTS[name], size)
    calls = [part for part in parts if part.kind == "call"]
    assert {part.text for part in calls} == {"get_weather"}
    several = name not in ("llama3_json", "harmony")
    arguments = [json.loads(part.text) for part in parts if part.kind == "arguments"]
    assert arguments == [ARGUMENTS, {}][: 1 + several]
    assert content(parts, "content") == ("" if name == "llama3_json" else "Let me see.")
    assert content(parts, "reasoning") == ("A city?" if name == "harmony" else "")
    if name == "kimi_k2":
        assert [part.id for part in calls] == ["functions.get_weather:0", "functions.get_weather:1"]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("text", ["", "Hello <tool", "{", '{"name": 5', "<|channel|>", "\ufdd1"])
def test_outputs_without_calls(name, text):
    parts = parse(ChatFormat(FORMATS[name]).parser(RULES), text, 1)
    assert {part.kind for part in parts} <= {"content"}
    if text == "Hello <tool":
        assert content(parts, "content") == text


@pytest.mark.parametrize("name", FORMATS)
def test_an_output_may_end_anywhere(name):
    for size in range(len(OUTPUTS[name])):
        parts = parse(ChatFormat(FORMATS[name]).parser(RULES), OUTPUTS[name][:size], 7)
        whole = parse(ChatFormat(FORMATS[name]).parser(RULES), OUTPUTS[name], 7)
        calls, complete = random_calls.calls_of(parts), random_calls.calls_of(whole)
        assert [name for name, _ in calls] == [name for name, _ in complete][: len(calls)]


@pytest.mark.parametrize("size", [1, 4, 100])
@pytest.mark.parametrize(
    ("thinking", "output", "reasoning", "answer"),
    [
        ("opened", "\nHm.\n</think>\n\nYes.", "Hm.", "Yes."),
        ("opened", "Hm.", "Hm.", ""),
        ("optional", "<think>\nHm.\n</think>\n\nYes.", "Hm.", "Yes."),
        ("optional", "<thin Yes.", "", "<thin Yes."),
        (None, "Yes.</think>", "", "Yes.</think>"),
    ],
)
def test_reasoning(thinking, output, reasoning, answer, size):
    parts = parse(ChatFormat(None, True).parser(AnswerRules(thinking=thinking)), output, size)
    assert (content(parts, "reasoning"), content(parts, "content")) == (reasoning, answer)


def test_the_format_is_found_by_the_template():
    assert format_of(QWEN3) == ChatFormat(FORMATS["hermes"], True)
    coder = QWEN3.replace('{"name": "', "<function=")
    assert format_of(coder) == ChatFormat(FORMATS["qwen3_coder"], True)
    assert format_of(CHATML) == format_of("") == PLAIN
    assert format_of(LLAMA3) == PLAIN
    llama31 = LLAMA3 + """{{ '"parameters": ' }}"""
    assert format_of(llama31) == ChatFormat(FORMATS["llama3_json"])
    assert format_of("<|tool_calls_section_begin|>") == ChatFormat(FORMATS["kimi_k2"])
    harmony = "<|channel|>analysis<|message|></think>"
    assert format_of(harmony) == ChatFormat(FORMATS["harmony"])
    assert format_of(QWEN3, tools="none", thinking="none") == PLAIN
    assert format_of("", tools="kimi_k2", thinking="think") == ChatFormat(FORMATS["kimi_k2"], True)


def test_who_begins_the_reasoning():
    thinks = ChatFormat(None, True)
    assert thinks.thinking("<|im_start|>assistant\n<think>\n") == "opened"
    assert thinks.thinking("<|im_start|>assistant\n<think>\n\n</think>\n\n") is None
    assert thinks.thinking("user: <think>\nassistant: ") == "optional"
    assert PLAIN.thinking("<think>\n") is None


@pytest.mark.parametrize("special", [True, False], ids=["special", "plain"])
@pytest.mark.parametrize("name", FORMATS)
def test_random_calls_are_valid(name, special):
    """The allowed tokens lead to nothing but calls that parse and match their schemas."""
    for seed in range(6):
        random_calls.check(name, seed, special=special)


@pytest.mark.parametrize("limit", [0, 1, 40])
@pytest.mark.parametrize("name", ["hermes", "harmony"])
def test_reasoning_ends_at_its_limit(name, limit):
    lengths = {random_calls.thought(name, limit, seed) for seed in range(8)}
    assert max(lengths) == limit
