"""Formats beside the published templates of their families: outputs become history unchanged."""

import datetime
import json
import pathlib

import numpy as np
import pytest
from support import llama_cpp, random_calls

from dflash.text import chat_template, jsonl
from dflash.text.chat_formats.reader import merged
from dflash.text.chat_formats.rules import AnswerRules, TargetTokens, Tool
from dflash.text.chat_formats.table import FORMATS, ChatFormat, format_of
from dflash.text.grammar import Grammar

TEMPLATES = {
    "moonshotai-Kimi-K2": "kimi_k2", "Mistral-Small-3.2-24B-Instruct-2506": "mistral_v11",
    "Qwen-Qwen3-0.6B": "hermes", "Qwen3-Coder": "qwen3_coder", "Qwen3.5-4B": "qwen3_coder",
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": "deepseek_v3",
    "deepseek-ai-DeepSeek-V3.1": "deepseek_v31",
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": "deepseek_v3", "google-gemma-4-31B-it": "gemma4",
    "google-gemma-4-31B-it-interleaved": "gemma4",
    "meta-llama-Llama-3.1-8B-Instruct": "llama3_json",
    "mistralai-Ministral-3-14B-Reasoning-2512": "mistral_v13",
    "mistralai-Mistral-Nemo-Instruct-2407": "mistral_v3",
    "unsloth-mistral-Devstral-Small-2507": "mistral_v13",
}  # fmt: skip
ONE_CALL = ("llama3_json",)
# Templates that leave out the reasoning of calls, and those that leave out the text before them.
NO_THOUGHTS = ("Mistral-", "mistralai-Mistral-", "unsloth-", "deepseek-", "meta-")
NO_TEXT = ("mistralai-Mistral-", "Mistral-", "deepseek-ai-DeepSeek-R1", "meta-", "google-")
ENDS = (
    *("</s>", "<|im_end|>", "<|im_end|>\n", "<|eot_id|>", "<｜end▁of▁sentence｜>", "<turn|>\n"),
    "<|tool_response>",
)
JULY = (
    "{%- if add_generation_prompt and ns.prev_message_type == 'tool_response' and enable_thinking"
    " -%}{{- '<|channel>thought\n' -}}{%- endif -%}"
)
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "array"}},
    "required": ["city"],
}
FUNCTION = {"name": "get_weather", "description": "Tells it.", "parameters": SCHEMA}
TOOLS = [{"type": "function", "function": FUNCTION}]
ARGUMENTS = {"city": 'Old "Oslo"', "days": [1, {"x": True}]}


def call(number: int) -> dict:
    function = {"name": "get_weather", "arguments": json.dumps(ARGUMENTS)}
    return {"id": f"call_0123456789{number}", "type": "function", "function": function}


def allowed(source: str, name: str, output: str) -> bool:
    """Returns whether a grammar allows an output and its end."""
    vocabulary, spellings = random_calls.tokens_of(name, True)
    ids = {spelling: token for token, spelling in spellings.items()}
    matcher = Grammar("lark", source, vocabulary).matcher(timed=False)
    masks = np.zeros((1, vocabulary.end // 32 + 1), np.int32)
    while output:
        marker = next((text for text in ids if output.startswith(text)), None)
        tokens = [ids[marker]] if marker else list(output[0].encode())
        output = output[len(marker or output[0]) :]
        for token in tokens:
            matcher.fill(masks, ends=(vocabulary.end - 1,))
            if not masks.view(np.uint32)[0, token // 32] >> (token % 32) & 1:
                return False
            matcher.advance([token])
    return matcher.may_end


@pytest.fixture(scope="module")
def template_of(tmp_path_factory):
    files = llama_cpp.files("models/templates", ".jinja")
    directory = tmp_path_factory.mktemp("template")

    def load(name: str, addition: str = "") -> chat_template.ChatTemplate:
        source = files[f"{name}.jinja"].decode() + addition
        (directory / "chat_template.jinja").write_text(source)
        names = {"bos_token": "<s>", "eos_token": "</s>"}
        return chat_template.ChatTemplate(directory, names, datetime.date(2026, 11, 30))

    return load


@pytest.mark.parametrize("name", TEMPLATES)
def test_calls_in_history_are_what_the_model_may_write(template_of, name):
    """The grammar allows the rendered answer, and the parser returns the message."""
    template = template_of(name)
    chat_format = format_of(template.source)
    assert chat_format.name == TEMPLATES[name]
    question = {"role": "user", "content": "Do I need a coat?"}
    text = "" if name.startswith(NO_TEXT) else "Let me see."
    numbers = range(1 if chat_format.name in ONE_CALL else 2)
    answer = {"role": "assistant", "content": text, "tool_calls": [*map(call, numbers)]}
    if chat_format.thinks and not name.startswith(NO_THOUGHTS):
        answer["reasoning_content"] = "A coat?"
    before, after = (
        template.render(template.formed(jsonl.check_messages(messages), tools=True),
                        tools=TOOLS, add_generation_prompt=messages[-1] is question)
        for messages in ([question], [question, answer])
    )  # fmt: skip
    thinking = chat_format.thinking(before)
    if not after.startswith(before):  # The prompt ends with a beginning of the answer.
        before, thinking = before.rpartition(chat_format.marks.start)[0], "optional"
    assert after.startswith(before)
    output = after[len(before) :]
    for end in ENDS:
        output = output.removesuffix(end)
    rules = AnswerRules((Tool("get_weather", SCHEMA),), thinking=thinking)
    vocabulary, spellings = random_calls.tokens_of(chat_format.name, True)
    source = chat_format.grammar(rules, TargetTokens(spellings, vocabulary))
    assert allowed(source, chat_format.name, output), output
    parts = merged(chat_format.parser(rules).push(output, final=True))
    calls = random_calls.calls_of(parts)
    assert [json.loads(arguments) for _, arguments in calls] == [ARGUMENTS] * len(numbers)
    assert "".join(part.text for part in parts if part.kind == "content") == text
    reasoning = "".join(part.text for part in parts if part.kind == "reasoning")
    assert reasoning == answer.get("reasoning_content", "")


@pytest.mark.parametrize(
    ("state", "thinks", "expected"),
    [
        # Who begins the reasoning of an answer to a question, and to the result of a call.
        ("april", {}, [None, None]),
        ("april", {"enable_thinking": True}, ["optional", "optional"]),
        ("may", {}, [None, "optional"]),
        ("may", {"enable_thinking": True}, ["optional", "optional"]),
        ("july", {"enable_thinking": False}, [None, "optional"]),
        ("july", {"enable_thinking": True}, ["optional", "opened"]),
    ],
)
def test_who_begins_the_thoughts_of_gemma(template_of, state, thinks, expected):
    template = template_of(f"google-gemma-4-31B-it{'-interleaved' if state == 'april' else ''}")
    if state == "july":  # The third state opens the thoughts after a result.
        template = template_of("google-gemma-4-31B-it", JULY)
    chat_format = format_of(template.source)
    question = {"role": "user", "content": "Do I need a coat?"}
    answer = {"role": "assistant", "content": None, "tool_calls": [call(1)]}
    result = {"role": "tool", "tool_call_id": call(1)["id"], "content": "3 °C"}
    conversations = ([question], [question, answer, result])
    prompts = [
        template.render(template.formed(jsonl.check_messages(messages), tools=True),
                        tools=TOOLS, **thinks)
        for messages in conversations
    ]  # fmt: skip
    assert [chat_format.thinking(prompt) for prompt in prompts] == expected
    turn = prompts[1].rpartition("<|turn>model\n")[2]
    assert turn.startswith(
        '<|tool_call>call:get_weather{city:<|"|>Old "Oslo"<|"|>,days:[1,{x:true}]}<tool_call|>'
        '<|tool_response>response:get_weather{value:<|"|>3 °C<|"|>}<tool_response|>'
    )


def test_gemma_sees_joined_schemas_of_tools(template_of):
    """Its template drops references, unions and constants, which are therefore resolved before."""
    named = {"properties": {"name": {"const": "a"}}, "required": ["name"], "type": "object"}
    properties = {
        "place": {"$ref": "#/$defs/Named", "description": "Where"},
        "size": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "either": {"anyOf": [{"type": "integer"}, {"type": "string"}], "description": "Any"},
    }
    schema = {"type": "object", "properties": properties, "$defs": {"Named": named}}
    tools = [{"type": "function", "function": FUNCTION | {"parameters": schema}}]
    template = template_of("google-gemma-4-31B-it")
    text = template.render([{"role": "user", "content": "a"}], tools=tools)
    place = 'place:{description:<|"|>Where<|"|>,properties:{name:{enum:[<|"|>a<|"|>],'
    assert place + 'type:<|"|>STRING<|"|>}},required:[<|"|>name<|"|>],' in text
    assert 'size:{nullable:true,type:<|"|>INTEGER<|"|>}' in text
    assert 'either:{description:<|"|>Any {"anyOf": ' in text


VERSIONS = {
    "v3": "mistral_v3", "v7": "mistral_v7", "v11": "mistral_v11", "v13": "mistral_v13",
    "v15": "mistral_v13",
}  # fmt: skip


def mistral_tokenizer(version: str, directory):
    """Returns mistral-common's tokenizer of a version; "spm" is that of Mistral 7B v0.3."""
    common = pytest.importorskip(
        "mistral_common", reason="pip install 'mistral-common[sentencepiece]'"
    )
    from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

    if version == "spm":
        return MistralTokenizer.v3()
    file = pathlib.Path(common.__file__).parent / "data" / "tekken_240911.json"
    content = json.loads(file.read_text())
    content["config"]["version"] = version
    markers = "INST /INST AVAILABLE_TOOLS /AVAILABLE_TOOLS TOOL_RESULTS /TOOL_RESULTS TOOL_CALLS"
    markers += " SYSTEM_PROMPT /SYSTEM_PROMPT TOOL_CONTENT MODEL_SETTINGS /MODEL_SETTINGS ARGS"
    markers += " CALL_ID THINK /THINK PREFIX MIDDLE SUFFIX IMG IMG_BREAK IMG_END"
    names = ["<unk>", "<s>", "</s>", "<pad>", *(f"[{marker}]" for marker in markers.split())]
    count = content["config"]["default_num_special_tokens"]
    names += [f"<SPECIAL_{number}>" for number in range(len(names), count)]
    tokens = enumerate(names)
    content["special_tokens"] = [
        {"rank": rank, "token_str": name, "is_control": True} for rank, name in tokens
    ]
    if version == "v15":
        settings = {"type": "enum", "values": ["none", "high"], "default": "none"}
        content["model_settings_builder"] = {"reasoning_effort": settings | {"accepts_none": True}}
    (directory / "tekken.json").write_text(json.dumps(content))
    return MistralTokenizer.from_file(str(directory / "tekken.json"))


@pytest.mark.parametrize("version", ["spm", *VERSIONS])
def test_calls_are_those_that_mistral_common_writes(version, tmp_path):
    tokenizer = mistral_tokenizer(version, tmp_path)
    from mistral_common.protocol.instruct.request import ChatCompletionRequest
    from mistral_common.tokens.tokenizers.base import SpecialTokenPolicy

    calls = [call(number) | {"id": f"a1B2c3D4{number}"} for number in range(2)]
    answer = {"role": "assistant", "tool_calls": calls}
    results = [{"role": "tool", "tool_call_id": one["id"], "content": "3"} for one in calls]
    messages = [{"role": "user", "content": "q"}, answer, *results]
    request = ChatCompletionRequest(messages=messages, tools=TOOLS, model="m")
    ids = tokenizer.encode_chat_completion(request).tokens
    text = tokenizer.decode(ids, special_token_policy=SpecialTokenPolicy.KEEP).replace("▁", " ")
    output = text.rpartition("[/INST]")[2].partition("</s>")[0]
    name = VERSIONS.get(version, "mistral_v3")
    chat_format, rules = ChatFormat(FORMATS[name]), AnswerRules((Tool("get_weather", SCHEMA),))
    vocabulary, spellings = random_calls.tokens_of(name, True)
    source = chat_format.grammar(rules, TargetTokens(spellings, vocabulary))
    assert allowed(source, name, output), output
    parts = merged(chat_format.parser(rules).push(output, final=True))
    written = [json.loads(arguments) for _, arguments in random_calls.calls_of(parts)]
    assert written == [ARGUMENTS] * 2
