"""Anthropic's /v1/messages as Claude Code's client uses it: the chats, the bytes, the errors."""

import json
import re
import types

import pytest
from support import spoiled
from support.served_model import make_model
from support.trained_tokenizers import train_byte_level

from dflash.serving import dialects, messages_api, validation
from dflash.serving.messages_api import MessagesBody
from dflash.serving.validation import RequestError
from dflash.text import tokenizer_loading
from dflash.text.chat_formats.table import FORMATS, ChatFormat, format_of

PATH = "/v1/messages"
TOOLS = [
    {"name": tool["function"]["name"], "input_schema": tool["function"]["parameters"]}
    for tool in spoiled.TOOLS
]
BODY = {
    "model": "tiny",
    "max_tokens": 100,
    "messages": [{"role": "user", "content": "a"}],
    "stop_token_ids": [0],
    "logit_bias": {str(ord(one)): -100 for one in " \t\n"},  # JSON may have any number of them
    "temperature": 1.0,
    "seed": 3,
}
CALL = BODY | {"tools": TOOLS, "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
HEADERS = {"anthropic-version": "2023-06-01", "x-api-key": "EMPTY"}
USE = {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"x": 1}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "3"}


def text(value, **fields):
    return {"type": "text", "text": value, **fields}


def events(server, body):
    """Returns the events of a stream, each after its own name, without [DONE]."""
    status, content = server.post(f"{PATH}?beta=true", body | {"stream": True}, **HEADERS)
    assert status == 200, content
    *pieces, last = content.decode().split("\n\n")
    assert last == ""
    pairs = [piece.split("\n") for piece in pieces]
    values = [json.loads(data.removeprefix("data: ")) for _, data in pairs]
    assert [name for name, _ in pairs] == [f"event: {value['type']}" for value in values]
    return values


def test_a_message_is_that_of_a_chat(server):
    status, answer = server.post(PATH, BODY, **HEADERS)
    same = {name: BODY[name] for name in BODY.keys() - {"model"}}
    _, chat = server.post("/v1/chat/completions", same)
    assert status == 200
    assert answer["content"] == [text(chat["choices"][0]["message"]["content"])]
    assert (answer["type"], answer["role"], answer["model"]) == ("message", "assistant", "tiny")
    assert answer["id"].startswith("msg_")
    usage, counts = answer["usage"], chat["usage"]
    assert usage["output_tokens"] == counts["completion_tokens"]
    inputs = usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert inputs == counts["prompt_tokens"]
    ends = {"stop": "end_turn", "length": "max_tokens"}
    assert answer["stop_reason"] == ends[chat["choices"][0]["finish_reason"]]
    assert answer["stop_sequence"] is None
    count = {name: BODY[name] for name in ("model", "messages")}
    assert server.post(f"{PATH}/count_tokens", count)[1] == {"input_tokens": inputs}


def test_a_streamed_message(server):
    _, answer = server.post(PATH, BODY, **HEADERS)
    start, *middle, delta, stop = events(server, BODY)
    assert start["message"]["content"] == []
    assert start["message"]["usage"]["output_tokens"] == 0
    opened, *deltas, closed = middle
    assert opened == {"type": "content_block_start", "index": 0, "content_block": text("")}
    assert closed == {"type": "content_block_stop", "index": 0}
    assert {event["delta"]["type"] for event in deltas} == {"text_delta"}
    written = "".join(event["delta"]["text"] for event in deltas)
    assert [text(written)] == answer["content"]
    assert delta["delta"]["stop_reason"] == answer["stop_reason"]
    assert delta["usage"]["output_tokens"] == answer["usage"]["output_tokens"]
    assert stop == {"type": "message_stop"}


def test_a_call_and_its_stream(server):
    _, answer = server.post(PATH, CALL, **HEADERS)
    (block,) = answer["content"]
    assert (block["type"], answer["stop_reason"]) == ("tool_use", "tool_use")
    assert block["name"] in ("f", "g")
    assert block["input"]["x"] in (1, 2)
    _, opened, *deltas, closed, delta, _ = events(server, CALL)
    assert opened["content_block"]["input"] == {}
    assert opened["content_block"]["name"] == block["name"]
    assert {event["delta"]["type"] for event in deltas} == {"input_json_delta"}
    assert json.loads("".join(event["delta"]["partial_json"] for event in deltas)) == block["input"]
    assert (closed["type"], delta["delta"]["stop_reason"]) == ("content_block_stop", "tool_use")


def test_a_stop_sequence_is_named(server):
    _, answer = server.post(PATH, BODY, **HEADERS)
    written = answer["content"][0]["text"]
    stop = written[2:4]
    _, stopped = server.post(PATH, BODY | {"stop_sequences": [stop]}, **HEADERS)
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", stop)
    assert stopped["content"][0]["text"] == written[: written.index(stop)]


def test_errors_have_the_form_of_the_api(server):
    wrong = {
        "messages": BODY | {"messages": []},
        "max_tokens": {name: BODY[name] for name in ("messages", "model")},
        "prompt is too long": BODY | {"messages": [{"role": "user", "content": "a" * 200}]},
        "tools[0].type": BODY | {"tools": [{"type": "web_search_20250305", "name": "w"}]},
        "mcp_servers": BODY | {"mcp_servers": [{"url": "a"}]},
        "messages[0].content[0].type": BODY
        | {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
    }
    for beginning, body in wrong.items():
        status, answer = server.post(PATH, body, **HEADERS)
        assert (status, answer["type"]) == (400, "error"), body
        assert answer["error"]["type"] == "invalid_request_error"
        assert answer["error"]["message"].startswith(f"{beginning}:"), answer
        assert answer["request_id"]
    _, answer = server.post(PATH, BODY | {"max_tokens": 500}, **HEADERS)
    assert "500 output tokens" in answer["error"]["message"]
    assert "too long" not in answer["error"]["message"], "clients would shorten the conversation"
    status, answer = server.post(PATH, BODY | {"model": "claude-opus-5"}, **HEADERS)
    assert (status, answer["error"]["type"]) == (404, "not_found_error")
    _, answer = server.post(PATH, BODY | {"anything": 1, "context_management": {}}, **HEADERS)
    assert answer["type"] == "message", "unknown fields have no effect"


@pytest.mark.parametrize(
    ("beginning", "fields"),
    [
        ("messages", {"messages": [{"role": "system", "content": ""}]}),
        ("messages", {"messages": [{"role": "assistant", "content": [USE]}]}),
        ("messages[0].role", {"messages": [{"content": "a"}]}),
        ("messages[0].content[0].text", {"system": "Be kind.",
                                         "messages": [{"role": "user", "content": "\ud800"}]}),
        ("tool_choice.type", {"tools": TOOLS, "tool_choice": {"type": ["any"]}}),
        ("tool_choice.type", {"tools": TOOLS, "tool_choice": {"type": "required"}}),
        ("tools[0].name", {"tools": [{"name": "a b"}]}),
        ("stop_token_ids[0]", {"stop_token_ids": ["a"]}),
        ("stop_sequences[0]", {"stop_sequences": [1]}),
        ("output_config.format", {"output_config": {"format": [1]}}),
        ("output_config.format.schema", {"output_config": {"format": {"type": "json_schema"}}}),
    ],
)  # fmt: skip
def test_errors_name_the_field_of_the_client(beginning, fields):
    with pytest.raises(RequestError, match=f"^{re.escape(beginning)}: "):
        dialects.read_messages(BODY | {"model": None} | fields, make_model())


def chat(body, model=None):
    fields = {"messages": [{"role": "user", "content": "q"}], **body}
    parsed = validation.parse(MessagesBody, fields)
    return messages_api.chat_of(parsed, fields, model or make_model())


def test_the_messages_of_a_conversation():
    billing = text("x-anthropic-billing-header: cc_version=2; cch=0f0f;")
    cached = {"cache_control": {"type": "ephemeral"}}
    thinking = {"type": "thinking", "thinking": "Hm.", "signature": "0"}
    messages = [
        {"role": "user", "content": [text("Question", **cached)]},
        {"role": "assistant", "content": [thinking, text("See."), USE]},
        {"role": "system", "content": "Be quick."},
        {"role": "user", "content": [RESULT | {"content": [text("3"), text("4")]}]},
        {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}, text("7")]},
        {"role": "user", "content": [RESULT, text("And"), text("then?")]},
        {"role": "system", "content": [text("Be brief.")]},
    ]
    system = [billing, text("You are helpful.", **cached), text("Be kind.")]
    function = {"name": "f", "arguments": '{"x": 1}'}
    call = {"id": "toolu_1", "type": "function", "function": function}
    assert chat({"messages": messages, "system": system})["messages"] == [
        {"role": "system", "content": "You are helpful.\n\nBe kind."},
        {"role": "user", "content": "Question"},
        {"role": "assistant", "content": "See.", "reasoning_content": "Hm.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "toolu_1", "content": "3\n4\n\nBe quick."},
        {"role": "assistant", "content": "7"},
        {"role": "tool", "tool_call_id": "toolu_1", "content": "3"},
        {"role": "user", "content": "And\n\nthen?\n\nBe brief."},
    ]


def test_a_system_text_is_kept_behind_its_billing_line():
    system = "x-anthropic-billing-header: cc_version=2; cch=0f0f;\nYou are helpful.\nBe kind."
    first, _ = chat({"system": system})["messages"]
    assert first == {"role": "system", "content": "You are helpful.\nBe kind."}


def test_fields_of_the_request():
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}}
    tool = {"name": "f", "description": "d", "input_schema": schema, "cache_control": {}}
    output = {"effort": "max", "format": {"type": "json_schema", "schema": {}}}
    asked = {"tools": [tool], "tool_choice": {"type": "tool", "name": "f"}}
    asked |= {"thinking": {"type": "enabled", "budget_tokens": 9}, "output_config": output}
    fields = chat(asked | {"stop_sequences": ["a"]})
    function = {"name": "f", "description": "d", "parameters": schema}
    assert fields["tools"] == [{"type": "function", "function": function}]
    assert fields["tool_choice"] == {"type": "function", "function": {"name": "f"}}
    assert fields["parallel_tool_calls"]
    assert fields["stop"] == ["a"]
    assert fields["response_format"] == {"type": "json_schema", "json_schema": {"schema": {}}}
    # The template has no such settings, which are hints.
    assert not fields.keys() & {"enable_thinking", "reasoning_effort", "max_thinking_tokens"}
    kinds = {"auto": "auto", "any": "required", "none": "none"}
    for kind, expected in kinds.items():
        assert chat({"tools": [tool], "tool_choice": {"type": kind}})["tool_choice"] == expected


@pytest.mark.parametrize(
    ("thinking", "expected"),
    [
        ({}, {"enable_thinking": False}),
        ({"type": "disabled"}, {"enable_thinking": False}),
        ({"type": "adaptive"}, {"enable_thinking": True, "reasoning_effort": "max"}),
        ({"type": "enabled", "budget_tokens": 9},
         {"enable_thinking": True, "reasoning_effort": "max", "max_thinking_tokens": 9}),
    ],
)  # fmt: skip
def test_thinking_of_a_model_that_has_the_choice(tmp_path, thinking, expected):
    train_byte_level(tmp_path)
    template = "{{ enable_thinking }}{{ reasoning_effort }}{# </think> #}"
    (tmp_path / "chat_template.jinja").write_text(template)
    words = tokenizer_loading.load_tokenizer(tmp_path)
    model = make_model(tokenizer=words, chat_format=format_of(template))
    body = {"thinking": thinking, "output_config": {"effort": "max"}}
    fields = chat(body, model=model)
    names = {"enable_thinking", "reasoning_effort", "max_thinking_tokens"}
    assert {name: fields[name] for name in names & fields.keys()} == expected


def test_the_effort_of_a_model_that_always_reasons():
    template = types.SimpleNamespace(switches_thinking=False, chat_template="{{reasoning_effort}}")
    model = make_model(tokenizer=template, chat_format=ChatFormat(FORMATS["harmony"]))
    assert chat({"output_config": {"effort": "low"}}, model=model)["reasoning_effort"] == "low"


def test_an_answer_continues_the_last_message_of_the_assistant():
    model = make_model()
    question = {"role": "user", "content": "q"}
    (prompt,) = dialects.read_messages({"messages": [question], "max_tokens": 5}, model).prompts
    begun = [question, {"role": "assistant", "content": "The sum"}]
    (longer,) = dialects.read_messages({"messages": begun, "max_tokens": 5}, model).prompts
    whole = model.tokenizer.decode(longer, special_tokens=True)
    assert whole == model.tokenizer.decode(prompt, special_tokens=True) + "The sum"
    chat = {"messages": begun, "continue_final_message": True}
    assert dialects.read_chat(chat, model).prompts == (longer,)
    problems = [
        (chat | {"add_generation_prompt": True}, "not together with add_generation_prompt"),
        (chat | {"messages": [question]}, "the last message is no text of the assistant"),
        (chat | {"messages": [question, begun[1] | {"content": ""}]}, "does not render the last"),
    ]
    for body, problem in problems:
        with pytest.raises(RequestError, match=problem) as caught:
            dialects.read_chat(body, model)
        assert caught.value.param == "continue_final_message"
