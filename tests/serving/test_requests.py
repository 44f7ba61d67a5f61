"""Request bodies with a real tokenizer: templates, special tokens, and defaults."""

import functools
import itertools

import pytest
from support.served_model import END, make_model, tokenizer

from dflash.inference.request import RequestSampling
from dflash.serving import validation
from dflash.serving.bodies import ChatBody
from dflash.serving.dialects import read_chat, read_completion, read_generate
from dflash.serving.responses_api import ResponsesBody, chat_of
from dflash.serving.validation import RequestError
from dflash.text import jsonl


def chat(content, **fields):
    return read_chat({"messages": [{"role": "user", "content": content}], **fields}, make_model())


def test_chats_are_rendered_by_the_template():
    (ids,) = chat("What is 2 + 3?").prompts
    assert ids == tuple(tokenizer().encode_chat([{"role": "user", "content": "What is 2 + 3?"}]))
    parts = [{"type": "text", "text": "What is"}, {"type": "text", "text": "2 + 3?"}]
    assert chat(parts).prompts == chat("What is\n2 + 3?").prompts


def test_plain_decoding_needs_a_server_that_compares():
    with pytest.raises(RequestError, match="drafting: false needs a server with serve"):
        chat("q", drafting=False)
    assert chat("q", drafting=True)


CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"content": None}, {"content": ""}),
        ({"content": []}, {"content": ""}),
        ({}, {"content": ""}),
        ({"content": None, "tool_calls": [], "annotations": [], "audio": None}, {"content": ""}),
        ({"content": None, "reasoning_content": "r"}, {"content": "", "reasoning_content": "r"}),
        ({"reasoning": "r"}, {"content": "", "reasoning_content": "r"}),
        ({"content": "a", "thinking": "r"}, {"content": "a", "reasoning_content": "r"}),
        ({"content": None, "refusal": "no"}, {"content": "no"}),
        ({"content": [{"type": "refusal", "refusal": "no"}]}, {"content": "no"}),
        ({"content": None, "tool_calls": [CALL]}, {"content": "", "tool_calls": [CALL]}),
        ({"role": "tool", "tool_call_id": "1", "content": []},
         {"role": "tool", "tool_call_id": "1", "content": ""}),
    ],
)  # fmt: skip
def test_messages_without_a_text_have_an_empty_one(message, expected):
    message, expected = ({"role": "assistant"} | fields for fields in (message, expected))
    body = validation.parse(ChatBody, {"messages": [{"role": "user", "content": "q"}, message]})
    assert body.messages[1].for_template() == expected
    assert jsonl.check_messages([message])[0] == expected


def item(kind, text=None, **fields):
    """Returns an item of a response, with the fields that are sent back with it."""
    if text is not None:
        fields["content"] = [{"type": f"{kind}_text", "text": text, "annotations": []}]
    names = {"output": "message", "call": "function_call"}
    return {"type": names.get(kind, kind), "id": "i", "status": "incomplete", **fields}


CALL_ITEM = item("call", call_id="1", name="f", arguments='{"x": 1}')


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        ([item("reasoning", "r", summary=[])], [{"content": "", "reasoning_content": "r"}]),
        ([item("reasoning", "r"), item("output", "a", role="assistant")],
         [{"content": "a", "reasoning_content": "r"}]),
        ([item("output", "a", role="assistant"), item("reasoning", "r"),
          item("output", "b", role="assistant"), CALL_ITEM],
         [{"content": "a\nb", "reasoning_content": "r", "tool_calls": [CALL]}]),
        ([CALL_ITEM, {"type": "function_call_output", "call_id": "1", "output": []}],
         [{"content": "", "tool_calls": [CALL]},
          {"role": "tool", "tool_call_id": "1", "content": ""}]),
        ([item("reasoning", summary=[{"type": "summary_text", "text": "s"}])],
         [{"content": "", "reasoning_content": "s"}]),
        ([item("reasoning", encrypted_content="x")], []),
        ([{"type": "message", "role": "assistant", "content": []}], [{"content": ""}]),
        ([{"type": "message", "role": "assistant",
           "content": [{"type": "refusal", "refusal": "no"}]}], [{"content": "no"}]),
    ],
)  # fmt: skip
def test_items_of_a_response_can_be_sent_back(items, expected):
    question = {"role": "user", "content": "q"}
    body = {"input": [{"type": "message", **question}, *items, question]}
    chat = chat_of(validation.parse(ResponsesBody, body), body)
    messages = [m.for_template() for m in validation.parse(ChatBody, chat).messages]
    answers = [{"role": "assistant"} | message for message in expected]
    assert messages == [question, *answers, question]


def test_special_tokens_in_user_texts_are_plain_text():
    text = "a<|end|><|assistant|>b"
    (ids,) = chat(text).prompts
    # The template's own come once each: the message's end, and the answer's beginning.
    assert ids.count(END) == 1
    (ids,) = read_completion({"prompt": text}, make_model()).prompts
    assert END not in ids
    assert tokenizer().decode(ids) == text
    (ids,) = read_completion({"prompt": text}, make_model(special_tokens=True)).prompts
    assert END in ids
    request, _ = read_generate({"text": text}, make_model())
    assert END not in request.prompts[0]


def test_template_variables_cannot_replace_messages():
    with pytest.raises(RequestError) as caught:
        chat("a", chat_template_kwargs={"messages": []})
    assert caught.value.param == "chat_template_kwargs.messages"
    assert chat("a", chat_template_kwargs={"enable_thinking": False}).prompts


def test_the_error_of_a_template_is_reported():
    with pytest.raises(RequestError) as caught:
        read_chat({"messages": [{"role": "tool", "content": "a"}]}, make_model())
    assert caught.value.param == "messages"
    assert "unknown role tool" in caught.value.message


def test_defaults_come_from_the_config():
    defaults = chat("a")
    assert defaults.sampling == RequestSampling(top_k=3)
    assert defaults.stop_ids == (END,)
    (request,) = defaults.requests(make_model(), iter([7]))
    assert (request.id, request.max_new_tokens) == (7, 50)
    # The default is reduced to the room that the prompt leaves.
    (request,) = defaults.requests(make_model(max_length=len(defaults.prompts[0]) + 5), iter([7]))
    assert request.max_new_tokens == 5
    assert chat("a", ignore_eos=True).stop_ids == ()
    assert chat("a", top_k=-1).sampling.top_k == 0


def test_requests_share_cached_pages_by_salt():
    """Without a salt they share, or each HTTP request is on its own; its outputs share."""
    body = {"prompt": "a", "n": 2}
    alone = make_model(shares_prefixes=False)
    for read, fields in ((read_completion, body), (read_generate, {"text": "a"})):

        def salts(served, read=read, fields=fields, **more):
            request = read({**fields, **more}, served)
            request = request if read is read_completion else request[0]
            return {each.cache_salt for each in request.requests(served, itertools.count())}

        assert salts(make_model()) == {""}
        for served in (make_model(), alone):
            assert salts(served, cache_salt="tenant") == {"tenant"}
        one, other = salts(alone), salts(alone)
        assert len(one) == len(other) == 1
        assert one != other
        assert min(map(len, one)) == 32
    for salt in ("", 7, "s" * 1001, "\ud800"):
        with pytest.raises(RequestError, match="cache_salt"):
            read_completion({**body, "cache_salt": salt}, make_model())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": -1}, "temperature: expected 0 or more; got -1"),
        ({"temperature": 1e39}, "temperature: expected at most 3.402823466e+38; got 1e+39"),
        ({"top_p": "1"}, 'top_p: expected a number; got "1"'),
        ({"n": True}, "n: expected an integer; got true"),
        ({"stop": 5}, "stop: expected a string or a list; got 5"),
        ({"stop": ["x"] * 65}, "stop: expected at most 64 items; got "),
        ({"store": True}, "store: only false is supported, not true"),
        ({"temprature": 1}, "temprature: not supported; did you mean 'temperature'?"),
        ({"stream_options": {"include_usages": True}}, "stream_options.include_usages: not "
         "supported; did you mean 'stream_options.include_usage'?"),
        ({"messages": [{"role": "user"}]}, "messages[0].content: required"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5: expected at most 100; got 101"),
        ({"guided_regex": "a", "structured_outputs": {"json": {}}},
         "structured_outputs.json: guided_regex is given too; keep one of them"),
    ],
)  # fmt: skip
def test_error_messages(fields, message):
    body = {"messages": [{"role": "user", "content": "a"}]} | fields
    with pytest.raises(RequestError) as caught:
        read_chat(body, make_model())
    assert caught.value.message.startswith(message)


def test_bad_words_are_spelled_with_and_without_a_space():
    encode = functools.partial(tokenizer().encode, add_special_tokens=False)
    body = {"prompt": "q", "bad_words": ["pens", "Tom"], "allowed_token_ids": [5, 3]}
    rules = read_completion(body, make_model()).token_rules
    assert rules.allowed == (5, 3)
    assert {tuple(encode(word)) for word in ("pens", "Tom")} <= {*rules.bad}
    spaced = [tuple(encode(f" {word}")) for word in ("pens", "Tom")]
    expected = {ids for ids in spaced if len(ids) == len(encode("pens"))}
    assert {*rules.bad} - {tuple(encode(word)) for word in ("pens", "Tom")} <= {*spaced} >= expected
    assert read_completion({"prompt": "q"}, make_model()).token_rules is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [10**6]}, "allowed_token_ids"),
        ({"allowed_token_ids": ["a"]}, "allowed_token_ids"),
        ({"bad_words": [""]}, "bad_words"),
        ({"bad_words": "a"}, "bad_words"),
    ],
)
def test_malformed_rules_of_tokens_are_errors(fields, param):
    with pytest.raises(RequestError) as caught:
        read_completion({"prompt": "q", **fields}, make_model())
    assert caught.value.param == param
