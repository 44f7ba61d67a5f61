"""Requests that cannot be served are rejected at once, with an error of one line."""

import json
import socket
import tracemalloc
import urllib.parse

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dflash.serving import validation
from dflash.serving.bodies import ChatBody, CompletionBody
from dflash.serving.validation import RequestError

RESPONSES = "/v1/responses"
CHAT, TEXT, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
USER = {"role": "user", "content": "a"}
TOOL = {"type": "function", "function": {"name": "f"}}
CALLED = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}
WRONG = [
    (TEXT, {}, "prompt"),
    (TEXT, {"prompt": ""}, "prompt"),
    (TEXT, {"prompt": []}, "prompt"),
    (TEXT, {"prompt": {"a": 1}}, "prompt"),
    (TEXT, {"prompt": [1, "a"]}, "prompt"),
    (TEXT, {"prompt": [1, 128]}, "prompt"),
    (TEXT, {"prompt": [["a"]]}, "prompt[0]"),
    (TEXT, {"prompt": ["a"] * 129}, "prompt"),
    (TEXT, {"prompt": "a" * 128}, "prompt"),
    (TEXT, {"prompt": "a", "max_tokens": 0}, "max_tokens"),
    (TEXT, {"prompt": "a", "max_tokens": 128}, "max_tokens"),
    (TEXT, {"prompt": "a", "max_tokens": "7"}, "max_tokens"),
    (TEXT, {"prompt": "a", "max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
    (TEXT, {"prompt": "a", "temperature": 10**400}, "temperature"),
    (TEXT, {"prompt": "a", "top_k": -2}, "top_k"),
    (TEXT, {"prompt": "a", "seed": 2**63}, "seed"),
    (TEXT, {"prompt": "a", "n": 129}, "n"),
    (TEXT, {"prompt": ["a"] * 100, "n": 2}, "n"),
    (TEXT, {"prompt": "a", "best_of": 2}, "best_of"),
    (TEXT, {"prompt": "a", "stop": ""}, "stop"),
    (TEXT, {"prompt": "a", "stop": [1]}, "stop[0]"),
    (TEXT, {"prompt": "a", "stop_token_ids": [500]}, "stop_token_ids"),
    (TEXT, {"prompt": "a", "stop_token_ids": list(range(20))}, "stop_token_ids"),
    (TEXT, {"prompt": "a", "suffix": "b"}, "suffix"),
    (TEXT, {"prompt": "a", "logprobs": 21}, "logprobs"),
    (TEXT, {"prompt": "a", "logprobs": 1, "echo": True, "stream": True}, "echo"),
    (TEXT, {"prompt": "a", "prompt_logprobs": -1}, "prompt_logprobs"),
    (TEXT, {"prompt": "a", "stream": "yes"}, "stream"),
    (TEXT, {"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options"),
    (TEXT, {"prompt": "a", "stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
    (TEXT, {"prompt": "a", "drafting": 1}, "drafting"),
    (TEXT, {"prompt": "\ud800"}, "prompt"),
    (TEXT, {"prompt": "é"}, "prompt"),
    (TEXT, {"prompt": "a", "messages": [USER]}, "messages"),
    (TEXT, {"prompt": "a", "priority": -1}, "priority"),
    (TEXT, {"prompt": "a", "repetition_penalty": 0}, "repetition_penalty"),
    (TEXT, {"prompt": "a", "min_tokens": 9, "max_tokens": 8}, "min_tokens"),
    (TEXT, {"prompt": "a", "logit_bias": {"a": 1}}, "logit_bias"),
    (TEXT, {"prompt": "a", "logit_bias": {"128": 1}}, "logit_bias"),
    (TEXT, {"prompt": "a", "logit_bias": [1]}, "logit_bias"),
    (TEXT, {"prompt": "a", "response_format": {"type": "xml"}}, "response_format.type"),
    (TEXT, {"prompt": "a", "response_format": {"type": "json_object"}}, "response_format"),
    (TEXT, {"prompt": "a", "response_format": {"type": "json_schema"}},
     "response_format.json_schema.schema"),
    (TEXT, {"prompt": "a", "guided_json": "{", "stop_token_ids": [0]}, "guided_json"),
    (TEXT, {"prompt": "a", "guided_regex": "(", "stop_token_ids": [0]}, "guided_regex"),
    (CHAT, {}, "messages"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": "a"}, "messages"),
    (CHAT, {"messages": ["a"]}, "messages[0]"),
    (CHAT, {"messages": [{"content": "a"}]}, "messages[0].role"),
    (CHAT, {"messages": [USER | {"content": 5}]}, "messages[0].content"),
    (CHAT, {"messages": [USER | {"content": ["a"]}]}, "messages[0].content[0]"),
    (CHAT, {"messages": [USER | {"content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
     "messages[0].content[0].type"),
    (CHAT, {"messages": [USER | {"tool_calls": [{}]}]}, "messages[0].tool_calls[0].function"),
    (CHAT, {"messages": [CALLED]}, "messages[0].tool_calls[0].function.arguments"),
    (CHAT, {"messages": [USER], "tools": [{}]}, "tools[0].function"),
    (CHAT, {"messages": [USER], "tool_choice": "required"}, "tool_choice"),
    (CHAT, {"messages": [USER], "tools": [TOOL]}, "tools"),  # no stop token
    (CHAT, {"messages": [USER], "tools": [TOOL], "tool_choice": {}}, "tool_choice"),
    (CHAT, {"messages": [USER], "tools": [TOOL, TOOL]}, "tools"),
    (CHAT, {"messages": [USER], "tools": [TOOL], "show_drafts": True}, "show_drafts"),
    (CHAT, {"messages": [USER], "stop_token_ids": [0],
            "tools": [TOOL, {"function": {"name": "g", "parameters": {"anyOf": 5}}}]},
     "tools[1].function.parameters"),
    (CHAT, {"messages": [USER], "reasoning_effort": "low"}, "reasoning_effort"),
    (CHAT, {"messages": [USER], "max_thinking_tokens": 5}, "max_thinking_tokens"),
    (CHAT, {"messages": [USER], "top_logprobs": 2}, "top_logprobs"),
    (CHAT, {"messages": [USER], "chat_template_kwargs": 1}, "chat_template_kwargs"),
    (CHAT, {"messages": [USER], "audio": {}}, "audio"),
    (RESPONSES, {}, "input"),
    (RESPONSES, {"input": "a", "previous_response_id": "x"}, "previous_response_id"),
    (RESPONSES, {"input": "a", "store": True}, "store"),
    (RESPONSES, {"input": []}, "input"),
    (RESPONSES, {"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
    (RESPONSES, {"input": [{"role": "user", "content": [5]}]}, "input[0].content[0]"),
    (RESPONSES, {"input": "a", "tools": [{"type": "web_search"}]}, "tools[0].type"),
    (RESPONSES, {"input": "a", "reasoning": {"effort": "low"}}, "reasoning.effort"),
    (RESPONSES, {"input": "a", "max_output_tokens": 500}, "max_output_tokens"),
    (RESPONSES, {"input": "a" * 200}, "input"),
    (GENERATE, {}, "text"),
    (GENERATE, {"text": "a", "input_ids": [1]}, "text"),
    (GENERATE, {"text": 1}, "text"),
    (GENERATE, {"text": ["a", "b"], "stream": True}, "stream"),
    (GENERATE, {"text": "a", "sampling_params": []}, "sampling_params"),
    (GENERATE, {"text": "a", "sampling_params": {"x": 1}}, "sampling_params.x"),
    (GENERATE, {"text": "a", "lora_path": 3}, "lora_path"),
    (GENERATE, {"text": "a", "logprob_start_len": 0}, "logprob_start_len"),
    ("/tokenize", {}, "messages"),
    ("/detokenize", {}, "tokens"),
    ("/detokenize", {"tokens": [1000]}, "tokens"),
]  # fmt: skip


def error_of(answer) -> dict:
    """Returns the error in a response, after a check of its format."""
    assert set(answer) == {"error"}
    error = answer["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "\n" not in error["message"]
    assert len(error["message"]) < 1200
    return error


@pytest.mark.parametrize(
    ("path", "body", "param"), WRONG, ids=[f"{i}-{case[2]}" for i, case in enumerate(WRONG)]
)
def test_errors_name_the_invalid_field(server, path, body, param):
    status, answer = server.post(path, body)
    assert status == 400, answer
    error = error_of(answer)
    assert error["param"] == param
    assert param in error["message"] or error["code"] == "context_length_exceeded"


BODIES = [
    b"", b"{", b"[]", b"\xff\xfe", b'{"prompt": "\xff"}', b'{"prompt": NaN}', b"[" * 50_000,
    b'{"a":' * 20_000, b'{"prompt": "a", "seed": ' + b"9" * 9000 + b"}",
    b'{"prompt": "a", "max_tokens": 1e999}', json.dumps({"prompt": "a", "x" * 50_000: 1}).encode(),
    json.dumps({"prompt": "a", "text": "a", "\ud800": 1}).encode(),
    json.dumps({"prompt": "a", "user": None, "stop": ["y" * 50_000]}).encode(),
    json.dumps({"prompt": list(range(128)) * 150}).encode(),
    json.dumps({"prompt": "a" * 90_000}).encode(),
]  # fmt: skip


@pytest.mark.parametrize("body", BODIES, ids=range(len(BODIES)))
@pytest.mark.parametrize("path", [TEXT, GENERATE])
def test_malformed_bodies_are_rejected(server, path, body):
    status, answer = server.post(path, body)
    assert status == 400
    error_of(answer)


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (CompletionBody, {f"a{i}": 1 for i in range(20_000)}),
        (CompletionBody, {"prompt": "a", "stop": [1] * 100_000}),
        (CompletionBody, {"prompt": "a", "logit_bias": {str(i): "a" for i in range(20_000)}}),
        (CompletionBody, {"prompt": "a", "stream_options": {f"a{i}": 1 for i in range(20_000)}}),
        (ChatBody, {"messages": [1] * 100_000}),
        (ChatBody, {"messages": [{"role": "user", "content": [1] * 100_000}]}),
    ],
)
def test_many_faults_take_no_memory(kind, body):
    """Pydantic collects all errors of a body, at a kilobyte each, unless it is told not to."""
    tracemalloc.start()
    with pytest.raises(RequestError):
        validation.parse(kind, body)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 * 2**20


def test_large_bodies_and_other_content_types_are_rejected(server):
    status, answer = server.post(TEXT, {"prompt": "a" * 200_000})
    assert (status, error_of(answer)["code"]) == (413, "too_large")
    status, answer = server.post(TEXT, b"prompt=a", **{"Content-Type": "text/plain"})
    assert (status, "application/json" in error_of(answer)["message"]) == (415, True)
    assert server.post(TEXT, b"x", **{"Content-Encoding": "gzip"})[0] == 415


def raw(server, content: bytes, *, patience_s: float = 300) -> bytes:
    """Returns the server's response to raw bytes on a connection."""
    place = urllib.parse.urlsplit(server.url)
    with socket.create_connection((place.hostname, place.port), patience_s) as connection:
        connection.sendall(content)
        received = b""
        while piece := connection.recv(65536):
            received += piece
            if b"\r\n\r\n" in received and b"400" in received[:20]:
                break
        return received


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"\x00\x01\x02\r\n\r\n", b"400"),
        (b"GET\r\n\r\n", b"400"),
        (HEAD + b"Content-Length: -5\r\n\r\n", b"400"),
        (HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n", b"400"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", b"400"),
        (HEAD + b"Content-Length: 99999999999999\r\nConnection: close\r\n\r\n", b"413"),
        # The announced body never arrives.
        (HEAD + b"Content-Length: 50\r\nConnection: close\r\n\r\n{", b"408"),
    ],
)
def test_malformed_http_is_rejected(server, content, status):
    assert status in raw(server, content)[:20]


NAMES = st.text(max_size=8)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda some: st.lists(some, max_size=3) | st.dictionaries(NAMES, some, max_size=3),
    max_leaves=6,
)
FIELDS = (
    "prompt messages text input_ids sampling_params max_tokens temperature top_p top_k n seed stop "
    "stop_token_ids ignore_eos min_tokens logprobs top_logprobs echo best_of stream_options user "
    "logit_bias tools response_format chat_template_kwargs skip_special_tokens rid lora_path"
).split()


@settings(
    max_examples=80,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    path=st.sampled_from([TEXT, CHAT, GENERATE, "/tokenize", "/detokenize"]),
    body=st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=12), VALUES, max_size=5),
)
def test_random_bodies_do_not_crash_the_server(server, path, body):
    status, answer = server.post(path, json.dumps(body).encode())
    assert status in (200, 400)
    if status == 400:
        error_of(answer)
