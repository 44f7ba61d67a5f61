"""Tool calls of chats: constrained, parsed, streamed, and equal to plain decoding."""

import json
import random
import re

import pytest
from support import spoiled
from support.served_model import make_model
from support.trained_tokenizers import train_byte_level

from dflash import errors
from dflash.serving import validation
from dflash.serving.answers import template_variables
from dflash.serving.bodies import ChatBody
from dflash.serving.dialects import read_chat
from dflash.serving.served_model import ServedModel, TokenNames
from dflash.serving.validation import RequestError
from dflash.text import tokenizer_loading
from dflash.text.chat_formats.table import FORMATS, ChatFormat, format_of
from dflash.text.grammar import Grammar, Vocabulary
from dflash.text.tokenizer import ByteTokenizer

CHAT = "/v1/chat/completions"
BODY = {
    "messages": [{"role": "user", "content": "a"}],
    "tools": spoiled.TOOLS,
    "tool_choice": "required",
    "parallel_tool_calls": False,
    "stop_token_ids": [0],
    "logit_bias": {str(ord(one)): -100 for one in " \t\n"},  # JSON may have any number of them
    "max_tokens": 100,
}


BYTES_ONLY = [name for name in FORMATS if name != "gemma4"]  # Formats without a needed token.


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_call_is_that_of_plain_decoding(server, temperature):
    body = BODY | {"temperature": temperature, "seed": 3}
    answers = [server.post(CHAT, body | {"drafting": drafting}) for drafting in (True, False)]
    (drafted, plain) = (answer["choices"][0] for status, answer in answers if status == 200)
    message = drafted["message"]
    (call,), (expected,) = message["tool_calls"], plain["message"]["tool_calls"]
    assert call["function"] == expected["function"]
    assert json.loads(call["function"]["arguments"])["x"] in (1, 2)
    assert call["function"]["name"] in ("f", "g")
    assert call["type"] == "function"
    assert message["content"] is None
    assert drafted["finish_reason"] == "tool_calls"
    usage = [answer["usage"]["completion_tokens"] for _, answer in answers]
    assert usage[0] == usage[1]


def test_a_streamed_call(server):
    body = BODY | {"tool_choice": {"type": "function", "function": {"name": "g"}}}
    choices = [event["choices"][0] for event in server.events(CHAT, body)]
    deltas = [choice["delta"].get("tool_calls", [None])[0] for choice in choices]
    first, *others = [delta for delta in deltas if delta]
    assert first["function"] == {"name": "g", "arguments": ""}
    assert (first["index"], first["type"], first["id"][:5]) == (0, "function", "call_")
    assert all(set(delta) == {"index", "function"} for delta in others)
    arguments = "".join(delta["function"]["arguments"] for delta in others)
    assert json.loads(arguments)["x"] in (1, 2)
    assert [choice["finish_reason"] for choice in choices[:-1]] == [None] * (len(choices) - 1)
    assert choices[-1]["finish_reason"] == "tool_calls"


def test_text_before_a_call_is_free(server):
    """With "auto", an output that does not begin a call is that without tools."""
    free = BODY | {"tool_choice": "auto", "logit_bias": {}, "max_tokens": 8}
    plain = {name: value for name, value in free.items() if name != "tools"}
    texts = [
        server.post(CHAT, body)[1]["choices"][0]["message"]["content"] for body in (free, plain)
    ]
    assert texts[0] == texts[1]
    none = server.post(CHAT, free | {"tool_choice": "none"})[1]["choices"][0]
    assert none["message"]["content"] == texts[0]


def model(name: str = "hermes", **changes) -> ServedModel:
    """Returns a model whose tokens are bytes."""
    tokenizer = ByteTokenizer()
    tokenizer.chat_template = "reasoning_effort"
    facts = {
        "tokenizer": tokenizer, "names": TokenNames(tokenizer), "vocabulary": lambda: VOCABULARY,
        "eos_ids": (0,), "vocab_size": 256, "max_length": 4096,
        "chat_format": ChatFormat(FORMATS[name], True),
    }  # fmt: skip
    return make_model(**facts | changes)


VOCABULARY = Vocabulary.of(ByteTokenizer())


def test_malformed_tool_requests_have_an_error_of_one_line():
    pytest.importorskip("llguidance", reason="pip install 'dflash-jax[grammar]'")
    served = [model(name) for name in BYTES_ONLY]
    problems = []
    for seed in range(400):
        chance = random.Random(seed)
        problems.append(problem_of(spoiled.chat(chance), chance.choice(served)))
    rejected = [problem for problem in problems if problem is not None]
    assert len(rejected) > 60
    for problem in rejected:
        assert "\n" not in str(problem)
        if isinstance(problem, RequestError):
            assert problem.status == 400
            assert problem.param is not None


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder"])  # Other formats have JSON, too.
@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        ({"if": {"required": ["x"]}}, "if"),
        ({"$ref": "#/$defs/Missing"}, "$ref: '#/$defs/Missing' names no schema of these"),
        ({"allOf": [{"properties": {"x": {"type": "string"}}}]},
         "json_schema: Unsatisfiable schema: "),
    ],
)  # fmt: skip
def test_a_schema_that_grammars_cannot_follow_is_an_error_with_its_place(name, schema, problem):
    pytest.importorskip("llguidance", reason="pip install 'dflash-jax[grammar]'")
    function = {"name": "h", "parameters": spoiled.PARAMETERS | schema}
    body = BODY | {"tools": [*spoiled.TOOLS[:1], {"type": "function", "function": function}]}
    with pytest.raises(RequestError, match=re.escape(problem)) as caught:
        compiled(body, model(name))
    assert caught.value.param == "tools[1].function.parameters"


@pytest.mark.parametrize(
    "fields",
    [
        {"enable_thinking": True},
        {"reasoning_effort": "low"},
        {"chat_template_kwargs": {"enable_thinking": True}},
        {"chat_template_kwargs": {"thinking": True}},
    ],
)
def test_reasoning_of_an_unknown_form_is_refused(fields):
    template = "{{ enable_thinking }}"
    served = model(chat_format=format_of(template))
    served.tokenizer.chat_template, served.tokenizer.switches_thinking = template, True
    body = {"messages": BODY["messages"], "stop_token_ids": [0]}
    with pytest.raises(RequestError, match=r"serve\.reasoning=none leaves it") as caught:
        read_chat(body | fields, served)
    assert caught.value.param.endswith(("thinking", "effort"))
    for allowed in ({}, {"enable_thinking": False}, {"reasoning_effort": "none"}):
        read_chat(body | allowed, served)


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        ("low medium xhigh", "low low medium xhigh xhigh xhigh"),  # as that of Qwen3.8
        ("none high", "high high high high high high"),  # as that of Mistral Small 4
        ("minimal low medium high xhigh max", "minimal low medium high xhigh max"),
        ("", "minimal low medium high xhigh max"),
    ],
)
def test_the_nearest_effort_that_the_template_accepts_is_rendered(tmp_path, known, expected):
    train_byte_level(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(
        f"{{% if reasoning_effort not in {known.split()} %}}{{{{ raise_exception('effort') }}}}"
        "{% endif %}{{ reasoning_effort }}"
    )
    served = model(tokenizer=tokenizer_loading.load_tokenizer(tmp_path))
    efforts = "minimal low medium high xhigh max".split()
    bodies = [{"messages": BODY["messages"], "reasoning_effort": effort} for effort in efforts]
    fields = [validation.parse(ChatBody, body) for body in bodies]
    chosen = [template_variables(body, served)["reasoning_effort"] for body in fields]
    assert chosen == expected.split()
    none = validation.parse(ChatBody, bodies[0] | {"reasoning_effort": "none"})
    assert template_variables(none, served)["reasoning_effort"] == "none"


def test_a_template_that_does_not_show_tools_needs_a_chosen_format():
    """Those that DeepSeek publishes render calls, but no tools."""
    published = "<｜tool▁calls▁begin｜> {{ m['tool_calls'] }}"
    with pytest.raises(RequestError, match=r"set serve\.tool_format=deepseek_v31$") as caught:
        read_chat(BODY, model(chat_format=format_of(published)))
    assert caught.value.param == "tools"
    read_chat(BODY, model(chat_format=format_of(published, tools="deepseek_v31")))


def compiled(body, served: ServedModel) -> Grammar:
    """Returns the grammar of the answer to a body."""
    return read_chat(body, served).structure.compile(lambda: VOCABULARY, lambda: False)


def problem_of(body, served: ServedModel) -> RequestError | errors.InputError | None:
    """Returns the error of a body, or of the grammar of its answer."""
    try:
        request = read_chat(body, served)
        if request.structure is not None:
            Grammar("lark", request.structure.source, VOCABULARY).matcher()
    except (RequestError, errors.InputError) as error:
        return error
    return None
