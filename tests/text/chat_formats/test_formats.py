"""Parsers of outputs, and grammars under which random outputs are valid calls."""

import dataclasses
import itertools
import json

import pytest
from support import random_calls
from support.published_templates import CHATML, LLAMA3, QWEN3

from dflash import errors
from dflash.text.chat_formats.reader import OutputPart, Parser, merged
from dflash.text.chat_formats.rules import AnswerRules, Tool
from dflash.text.chat_formats.table import FORMATS, PLAIN, ChatFormat, format_of

PROPERTIES = {
    "city": {"type": "string"},
    "days": {"type": "integer"},
    "unit": {"enum": ["c", "f"]},
}
WEATHER = Tool("get_weather", {"type": "object", "properties": PROPERTIES, "required": ["city"]})
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
    "gemma4": 'Let me see.<|tool_call>call:get_weather{city:<|"|>The "old" town\n<|"|>,days:3,'
    'unit:<|"|>c<|"|>}<tool_call|><|tool_call>call:get_weather{}<tool_call|>',
    "deepseek_v3": "Let me see.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>"
    "get_weather\n```json\nWRITTEN\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function"
    "<｜tool▁sep｜>get_weather\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v31": "Let me see.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather"
    "<｜tool▁sep｜>WRITTEN<｜tool▁call▁end｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
    "<｜tool▁calls▁end｜>",
    "mistral_v3": '[TOOL_CALLS] [{"name": "get_weather", "arguments": WRITTEN}, '
    '{"name": "get_weather", "arguments": {}, "id": "a1B2c3D4e"}]',
    "mistral_v7": 'Let me see.[TOOL_CALLS][{"name": "get_weather", "arguments": WRITTEN, '
    '"id": "a1B2c3D4e"}, {"name": "get_weather", "arguments": {}}]',
    "mistral_v11": "Let me see.[TOOL_CALLS]get_weather[CALL_ID]a1B2c3D4e[ARGS]WRITTEN[TOOL_CALLS]"
    "get_weather[CALL_ID]000000001[ARGS]{}",
    "mistral_v13": "Let me see.[TOOL_CALLS]get_weather[ARGS]WRITTEN[TOOL_CALLS]get_weather[ARGS]{}",
}
SHOWN = "{{ tools }}"
ONLY_CALLS = ("llama3_json", "mistral_v3")  # Formats without a text before calls.
IDS = {
    "kimi_k2": ["functions.get_weather:0", "functions.get_weather:1"],
    **{key: ["call00000", "call00001"] for key in ("mistral_v3", "mistral_v7", "mistral_v13")},
    "mistral_v11": ["a1B2c3D4e", "000000001"],
}

SHORT_OUTPUTS = {name: text.replace("WRITTEN", '{"city": "Ø"}') for name, text in OUTPUTS.items()}
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


def cut_in_three(parser: Parser, text: str, cuts: tuple[int, int]) -> list[OutputPart]:
    """Returns the parts of a text that arrives in three pieces."""
    pieces = [text[start:end] for start, end in itertools.pairwise((0, *cuts, None))]
    parts = [part for piece in pieces for part in parser.push(piece)]
    return [*parts, *parser.push("", final=True)]


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
    assert content(parts, "content") == ("" if name in ONLY_CALLS else "Let me see.")
    assert content(parts, "reasoning") == ("A city?" if name == "harmony" else "")
    assert [part.id for part in calls] == IDS.get(name, [None] * len(calls))


@pytest.mark.parametrize("name", FORMATS)
def test_every_way_to_cut_an_output_in_three_gives_the_same_parts(name):
    chat_format, output = ChatFormat(FORMATS[name]), SHORT_OUTPUTS[name]
    expected = parse(chat_format.parser(RULES), output, len(output))
    for cuts in itertools.combinations_with_replacement(range(len(output) + 1), 2):
        parts = cut_in_three(chat_format.parser(RULES), output, cuts)
        assert merged(parts) == tuple(expected)


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


@pytest.mark.parametrize(
    ("output", "reasoning", "answer"),
    [
        ("Paris.", "", "Paris."),
        ("<|channel|>final Paris.", "", "Paris."),
        ("<|channel|>Paris.<|message|>Yes.", "", "Paris.Yes."),
        ("<|channel|>final<|message|>Paris.<|mess", "", "Paris.<|mess"),
        ("<|channel|>finally<|message|>Yes.", "", "finallyYes."),
        ("<|channel|>analysis<|channel|>final<|message|>Paris.", "", "Paris."),
        ("The analysis: <|channel|>final<|message|>Paris.", "", "The analysis: Paris."),
        ("<|channel|>analysis<|message|>A<|message|>B<|return|>C", "AB", "C"),
        ("<|channel|>analysis A<|end|>B", "A", "B"),
        ("<|channel|>analysis<|message|>A<|channel|>final<|message|>B", "A", "B"),
        ("<|channel|>analysis<|message|>A<|end|>B <|start|>assistant<|channel|>final<|message|>C",
         "A", "B C"),
        ("<|channel|>final<|message|>A<|end|><|start|>user<|message|>B", "", "AuserB"),
        ("<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{}", "", "{}"),
        ("<|channel|>commentary to=functions.get", "", ""),
        ("<|channel|>comm", "", ""),
    ],
)  # fmt: skip
def test_no_text_of_a_malformed_harmony_answer_is_lost(output, reasoning, answer):
    """Without tools there is no call; the parts do not depend on how the output is cut."""
    harmony = ChatFormat(FORMATS["harmony"])
    for cuts in itertools.combinations_with_replacement(range(0, len(output) + 1, 3), 2):
        parts = cut_in_three(harmony.parser(AnswerRules()), output, cuts)
        assert (content(parts, "reasoning"), content(parts, "content")) == (reasoning, answer)
        assert {part.kind for part in parts} <= {"reasoning", "content"}


def test_a_harmony_call_of_the_role_and_text_after_it():
    output = (
        '<|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|>{"a": 1}'
    )
    parts = ChatFormat(FORMATS["harmony"]).parser(RULES).push(output + "<|call|>Wait.", final=True)
    assert [part.text for part in parts] == ["get_weather", '{"a": 1}', "Wait."]
    assert [part.kind for part in parts] == ["call", "arguments", "content"]
    output = "<|channel|>commentary to=functions.get_weather<|channel|>final<|message|>Hi."
    parts = ChatFormat(FORMATS["harmony"]).parser(RULES).push(output, final=True)
    assert parts == (OutputPart("content", "Hi."),), "the last channel counts"


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


@pytest.mark.parametrize("size", [1, 4, 100])
@pytest.mark.parametrize(
    ("opening", "end"),
    [("<|channel>thought\n", "<channel|>"), ("[THINK]", "[/THINK]"),
     ("<seed:think>", "</seed:think>")],
)  # fmt: skip
def test_reasoning_of_other_families(opening, end, size):
    template = f"{{{{ '' if enable_thinking else {opening + end!r} }}}}"
    chat_format = format_of(template)
    assert chat_format.thinking("user\n") == "optional"
    assert chat_format.thinking(f"user\n{opening}") == "opened"
    assert chat_format.thinking(f"user\n{opening}{end}") is None
    assert {end, opening.removesuffix("thought\n")} <= chat_format.markers
    for rules, start in ((AnswerRules(thinking="optional"), opening), (AnswerRules(), "")):
        output = f"{start}Hm.\n{end}\nYes." if start else "Yes."
        parts = parse(chat_format.parser(rules), output, size)
        assert content(parts, "content") == "Yes."
        assert content(parts, "reasoning") == ("Hm." if start else "")
    assert not chat_format.has_unknown_reasoning
    assert format_of(template, thinking="none") == PLAIN


def test_the_format_is_found_by_the_template():
    assert format_of(SHOWN + QWEN3) == ChatFormat(FORMATS["hermes"], True)
    assert format_of(QWEN3) == ChatFormat(FORMATS["hermes"], True, shows_tools=False)
    coder = SHOWN + QWEN3.replace('{"name": "', "<function=")
    assert format_of(coder) == ChatFormat(FORMATS["qwen3_coder"], True)
    assert format_of(CHATML) == format_of("") == PLAIN
    assert format_of(LLAMA3) == PLAIN
    llama31 = SHOWN + LLAMA3 + """{{ '"parameters": ' }}"""
    assert format_of(llama31) == ChatFormat(FORMATS["llama3_json"])
    assert format_of(f"{SHOWN}<|tool_calls_section_begin|>") == ChatFormat(FORMATS["kimi_k2"])
    mistral = {
        "mistral_v3": "[TOOL_CALLS] [",
        "mistral_v7": "[TOOL_CALLS][ [TOOL_CONTENT]",
        "mistral_v11": "[TOOL_CALLS][CALL_ID][ARGS] [TOOL_CONTENT]",
        "mistral_v13": "[TOOL_CALLS][ARGS][THINK][/THINK]",
    }
    assert [format_of(f"{SHOWN}{text}").name for text in mistral.values()] == list(mistral)
    sections = [f"{SHOWN}<｜tool▁calls▁begin｜>{text}" for text in ("", "```json")]
    assert [format_of(text).name for text in sections] == ["deepseek_v31", "deepseek_v3"]
    harmony = f"{SHOWN}<|channel|>analysis<|message|></think>"
    assert format_of(harmony) == ChatFormat(FORMATS["harmony"])
    assert format_of(QWEN3, tools="none", thinking="none") == PLAIN
    assert format_of("{{ thinking }}") == ChatFormat(has_unknown_reasoning=True)
    assert format_of("{{ thinking }}", thinking="none") == PLAIN
    assert format_of("", tools="kimi_k2", thinking="think") == ChatFormat(FORMATS["kimi_k2"], True)


def test_gemma_ends_its_calls_with_the_token_of_a_result():
    spellings = {1: "<eos>", 50: "<|tool_response>", 106: "<turn|>"}
    assert ChatFormat(FORMATS["gemma4"]).end_ids(spellings) == (50,)
    assert PLAIN.end_ids(spellings) == ()


def test_who_begins_the_reasoning():
    thinks = ChatFormat(None, True)
    assert thinks.thinking("<|im_start|>assistant\n<think>\n") == "opened"
    assert thinks.thinking("<|im_start|>assistant\n<think>\n\n</think>\n\n") is None
    assert thinks.thinking("user: <think>\nassistant: ") == "optional"
    assert PLAIN.thinking("<think>\n") is None


@pytest.mark.parametrize("seeds", [range(4), range(4, 200)], ids=["few", "many"])
@pytest.mark.parametrize("special", [True, False], ids=["special", "plain"])
@pytest.mark.parametrize("name", FORMATS)
def test_random_calls_are_valid(name, special, seeds):
    """The allowed tokens lead to nothing but calls that parse and match their schemas."""
    if name == "gemma4" and not special:
        with pytest.raises(errors.InputError, match="no special token"):
            random_calls.check(name, 0, special=False)
        return
    calls = sum(random_calls.check(name, seed, special=special) for seed in seeds)
    assert calls >= len(seeds) / 2


BASE = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
NAMED = {"type": "object", "properties": {"y": {"enum": ["a", "b"]}}, "required": ["y"]}
KINDS = [
    {"properties": {"kind": {"const": kind}, "size": schema}, "required": ["kind", "size"]}
    for kind, schema in {"cat": {"type": "integer"}, "dog": {"type": "string"}}.items()
]
LINKED = {"allOf": [{"$ref": "#/$defs/Base"}, {"properties": {"next": {"$ref": "#/$defs/Linked"}}}]}
DEFINITIONS = {"Base": BASE, "Named": NAMED, "Cat": KINDS[0], "Dog": KINDS[1], "Linked": LINKED}


def reference(name: str) -> dict[str, str]:
    return {"$ref": f"#/$defs/{name}"}


PETS = [reference("Cat"), reference("Dog")]
JOINED = {
    "reference": reference("Base"),
    "reference and properties": reference("Base") | NAMED,
    "all": {"allOf": [reference("Base"), NAMED]},
    "all and properties": {"allOf": [reference("Base")]} | NAMED,
    "all of unions": {"allOf": [{"anyOf": [BASE, NAMED]}, reference("Base")]},
    "any": {"anyOf": [reference("Base"), reference("Named")]},
    "any and properties": {"anyOf": [{"required": ["x"]}, {"required": ["z"]}]} | BASE,
    "one": {"oneOf": PETS, "discriminator": {"propertyName": "kind"}},
    "one and properties": {"oneOf": PETS} | BASE,
    "closed": {"allOf": [reference("Base"), NAMED], "unevaluatedProperties": False},
    "recursive": reference("Linked"),
    "refined": {"allOf": [reference("Base"), {"properties": {"x": {"minimum": 5}}}]},
    "nullable": {"properties": {"a": {"anyOf": [LINKED, {"type": "null"}]}}, "required": ["a"]},
    "required only": {"properties": {"a": {"const": 1}}, "required": ["a", "b"]},
    "others": {"properties": {"a": {"const": 1}}, "additionalProperties": {"type": "integer"}},
    "at least one": {"additionalProperties": {"type": "integer"}, "minProperties": 1},
    "one of two": {"properties": {"a": {"const": 1}, "b": {"const": 2}}, "minProperties": 1},
    "undefined": {"properties": {"a": {"anyOf": [{"not": {}}, {"const": 1}]}, "b": {"not": {}}}},
    "excluded": {"anyOf": [{"properties": {"x": False}}, {"properties": {"x": True}}]} | BASE,
    "patterns": {"patternProperties": {"^a": {"const": 1}}, "additionalProperties": False},
    "names": NAMED | {"propertyNames": {"type": "string"}, "x-order": 1},
}


# Arguments of all other formats are JSON, by the grammar of the first.
ARGUMENT_GRAMMARS = ("hermes", "qwen3_coder", "gemma4")


@pytest.mark.parametrize("label", JOINED)
@pytest.mark.parametrize("name", ARGUMENT_GRAMMARS)
def test_calls_of_joined_schemas(name, label):
    schema = {"type": "object", "$defs": DEFINITIONS} | JOINED[label]
    if name in ("qwen3_coder", "gemma4") and label in ("at least one", "patterns"):
        with pytest.raises(errors.InputError, match="Properties' is not supported by"):
            random_calls.arguments(name, schema, 0)
        return
    values = random_calls.arguments(name, schema, seed=list(FORMATS).index(name))
    if "additionalProperties" not in schema:
        assert values.keys() <= {"x", "y", "z", "a", "b", "kind", "size", "next"}


@pytest.mark.parametrize(
    ("keyword", "value"),
    {
        "if": {"required": ["a"]},
        "not": {"required": ["a"]},
        "dependentRequired": {"a": ["b"]},
        "dependentSchemas": {"a": True},
        "minProperties": 2,
        "maxProperties": 1,
        "propertyNames": {"maxLength": 3},
        "unevaluatedProperties": {"type": "integer"},
        "oneOf": [BASE, NAMED],
        "allOf": [{"not": {"type": "null"}}],
        "$ref": "#/$defs/Missing",
        "required": "a",
    }.items(),
)
@pytest.mark.parametrize("place", ["top", "parameter"])
@pytest.mark.parametrize("name", ARGUMENT_GRAMMARS)
def test_other_keywords_are_refused_by_name(name, place, keyword, value):
    schema = {"type": "object", "properties": {"a": True, "b": True}, keyword: value}
    if place == "parameter":
        schema = {"type": "object", "properties": {"c": schema}}
    expected = {"allOf": "not", "$ref": "Missing"}.get(keyword, keyword)
    with pytest.raises(errors.InputError, match=expected):
        random_calls.arguments(name, schema, 0)


@pytest.mark.parametrize("limit", [0, 1, 40])
@pytest.mark.parametrize("name", ["hermes", "harmony"])
def test_reasoning_ends_at_its_limit(name, limit):
    lengths = {random_calls.thought(name, limit, seed) for seed in range(8)}
    assert max(lengths) == limit
