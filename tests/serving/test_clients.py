"""Real clients: the unmodified openai package, and recorded requests of load generators."""

import json
import pathlib

import pytest
from support import spoiled

RECORDED = json.loads(pathlib.Path(__file__).with_name("requests.json").read_text())
TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": spoiled.PARAMETERS, "strict": True},
}
OPTIONS = {
    "model": "tiny",
    "tools": [TOOL],
    "parallel_tool_calls": False,
    "logit_bias": {str(ord(one)): -100 for one in " \t\n"},  # JSON may have any number of them
    "max_tokens": 100,
    "extra_body": {"stop_token_ids": [0]},
}
MESSAGES = [{"role": "user", "content": "abcabc"}]


@pytest.fixture(scope="module")
def openai():
    """The package, whose import takes seconds: not while tests are collected."""
    return pytest.importorskip("openai", reason="needs the openai package")


@pytest.fixture(scope="module")
def client(server, openai):
    options = {"base_url": f"{server.url}/v1", "api_key": "EMPTY", "max_retries": 0}
    with openai.OpenAI(**options) as openai_client:
        yield openai_client


def test_openai_completions(client, server):
    parameters = {"max_tokens": 10, "temperature": 0.8, "seed": 4}
    response = client.completions.create(model="tiny", prompt="abcabc", **parameters)
    expected = server.plain("abcabc", **parameters)
    assert response.choices[0].text == expected
    assert response.usage.completion_tokens == 10
    parts = client.completions.create(model="tiny", prompt="abcabc", stream=True, **parameters)
    assert "".join(part.choices[0].text for part in parts) == expected


def test_openai_chat_completions(client, server):
    expected = server.plain("abcabc\n", max_tokens=10)
    response = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=10)
    assert response.choices[0].message.content == expected
    assert response.choices[0].finish_reason == "length"
    parts = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_completion_tokens=10, stream=True,
        stream_options={"include_usage": True}, n=2,
    )  # fmt: skip
    texts, usage = {0: "", 1: ""}, None
    for part in parts:
        usage = part.usage or usage
        for choice in part.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == {0: expected, 1: expected}
    assert usage.completion_tokens == 20


def test_openai_tool_loop(client):
    """Three steps of an agent: each answer is a call, whose result goes back to the model."""
    messages = [{"role": "user", "content": "a"}]
    for step in range(3):
        options = OPTIONS | {"messages": messages, "tool_choice": "required"}
        if step == 1:
            with client.chat.completions.stream(**options) as stream:
                choice = stream.get_final_completion().choices[0]
        else:
            choice = client.chat.completions.create(**options).choices[0]
        (call,) = choice.message.tool_calls
        assert (choice.finish_reason, call.function.name) == ("tool_calls", "f")
        x = json.loads(call.function.arguments)["x"]
        # The tiny context has no room for the calls before.
        messages = [choice.message.model_dump(exclude_none=True)]
        messages.append({"role": "tool", "tool_call_id": call.id, "content": str(x + 1)})
    options = OPTIONS | {"messages": messages, "tool_choice": "none", "max_tokens": 4}
    assert client.chat.completions.create(**options).choices[0].message.content


def test_openai_responses(client):
    """A text, a call and its result, streamed as well as whole."""
    response = client.responses.create(model="tiny", input="abcabc", max_output_tokens=8)
    assert (response.status, response.usage.output_tokens) == ("incomplete", 8)
    with client.responses.stream(model="tiny", input="abcabc", max_output_tokens=8) as stream:
        events = list(stream)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert text == response.output_text
    tool = {"type": "function", **TOOL["function"]}
    options = {"model": "tiny", "tools": [tool], "parallel_tool_calls": False}
    options |= {"max_output_tokens": 100, "tool_choice": {"type": "function", "name": "f"}}
    options["extra_body"] = {"stop_token_ids": [0], "logit_bias": OPTIONS["logit_bias"]}
    (call,) = client.responses.create(input="a", **options).output
    assert json.loads(call.arguments)["x"] in (1, 2)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "3"}
    with client.responses.stream(input=[call.model_dump(), result], **options) as stream:
        (call,) = stream.get_final_response().output
    assert call.parsed_arguments["x"] in (1, 2)


def test_openai_exceptions_name_the_field(client, openai):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="tiny", messages=MESSAGES, reasoning_effort="low")
    assert (caught.value.param, caught.value.code) == ("reasoning_effort", "unsupported_parameter")
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="gpt-4", prompt="a")
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt="a" * 127, max_tokens=64)
    assert caught.value.code == "context_length_exceeded"


@pytest.mark.parametrize("name", RECORDED)
def test_requests_of_load_generators(server, name):
    path, body = RECORDED[name]["path"], RECORDED[name]["body"]
    if not body.get("stream"):
        status, answer = server.post(path, body)
        assert status == 200
        if path == "/generate":
            meta = answer["meta_info"]
            assert meta["completion_tokens"] == 8
            assert meta["spec_verify_ct"] > 0 < meta["spec_accept_length"]
        elif path != "/tokenize":
            assert answer["usage"]["completion_tokens"] == 8
        return
    events = server.events(path, {key: value for key, value in body.items() if key != "stream"})
    if path == "/generate":
        assert all(event["text"] for event in events)
        assert events[-1]["meta_info"]["completion_tokens"] == 8
        assert "cached_tokens" in events[-1]["meta_info"]
    elif "stream_options" in body:
        assert events[-1]["choices"] == []
        assert events[-1]["usage"]["completion_tokens"] == 8
        assert all(event["choices"] for event in events[:-1])
    else:  # older copies look at choices[0] of every event
        assert all(event["choices"] for event in events)
