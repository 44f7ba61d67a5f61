import io
import json
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import Terminal

from dflash import errors
from dflash.config import schema
from dflash.text import prompts
from dflash.text.jsonl import parse_json, quote

VOCAB_SIZE = 300


class BytesTokenizer:
    """One token per UTF-8 byte; a conversation is its contents, each behind token 256.

    Where special tokens are asked for, "|" is token 257.
    """

    def encode(self, text, *, special_tokens=False):
        ids = list(text.encode("utf-8"))
        return [257 if special_tokens and token == ord("|") else token for token in ids]

    def encode_chat(self, messages):
        return [t for m in messages for t in [256, *self.encode(m["role"][0] + m["content"])]]


def read(config=None, *, tokenizer=BytesTokenizer, vocab_size=VOCAB_SIZE, stdin="", **keys):
    config = config or schema.PromptsConfig(**keys)
    stdin = io.StringIO(stdin) if isinstance(stdin, str) else stdin
    tokenizer = tokenizer() if tokenizer else None
    return prompts.read_prompts(config, tokenizer, vocab_size=vocab_size, stdin=stdin)


@pytest.fixture
def jsonl(tmp_path, monkeypatch):
    """Writes lines (bytes, text or values) to prompts.jsonl, which is then in the directory."""
    monkeypatch.chdir(tmp_path)

    def write(*lines):
        encoded = [
            line if isinstance(line, bytes) else json.dumps(line).encode("utf-8") for line in lines
        ]
        (tmp_path / "prompts.jsonl").write_bytes(b"".join(line + b"\n" for line in encoded))
        return "prompts.jsonl"

    return write


def failure(**keys):
    with pytest.raises(errors.InputError) as caught:
        read(**keys)
    assert caught.value.exit_status == 2
    return str(caught.value)


def test_text_from_the_config():
    found = read(text=("ab", "c"))
    assert found == [
        prompts.Prompt(0, (97, 98), "ab", None, "prompts.text[0]"),
        prompts.Prompt(1, (99,), "c", None, "prompts.text[1]"),
    ]


def test_chat_wraps_plain_text(jsonl):
    assert read(text=("ab",), chat=True)[0].ids == (256, ord("u"), 97, 98)
    assert read(file=jsonl({"prompt": "ab"}), chat=True)[0].ids == (256, ord("u"), 97, 98)
    assert read(stdin="ab\n", chat=True)[0].ids == (256, ord("u"), 97, 98)


@pytest.mark.parametrize("has_template", [False, True])
def test_text_goes_through_the_template_if_there_is_one(jsonl, has_template):
    class Tokenizer(BytesTokenizer):
        has_chat_template = has_template

    plain, wrapped = (97, 98), (256, ord("u"), 97, 98)
    for chat, expected in ((None, wrapped if has_template else plain), (False, plain)):
        keys = {"file": jsonl({"prompt": "ab"}), "chat": chat}
        assert read(tokenizer=Tokenizer, **keys)[0].ids == expected


USER, ANSWER = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}


@pytest.mark.parametrize(
    ("messages", "left"),
    [
        ([USER, ANSWER], [USER]),
        ([USER, ANSWER, ANSWER], [USER]),
        ([USER, ANSWER, USER, ANSWER], [USER, ANSWER, USER]),
        ([USER, ANSWER, USER], None),
        ([USER], None),
    ],
)
def test_reference_answers_at_the_end_of_a_line_are_dropped(jsonl, messages, left):
    (prompt,) = found = read(file=jsonl({"messages": messages}))
    assert prompt.messages == tuple(left or messages)
    assert prompt.dropped_answer == (left is not None)
    assert len(prompts.dropped_answers(found)) == (left is not None)


TOOLS = [{"type": "function", "function": {"name": "f"}}]
CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}


def test_tools_of_a_line_reach_the_chat_template(jsonl):
    class Tokenizer(BytesTokenizer):
        has_chat_template = True

        def encode_chat(self, messages, tools=None):
            names = "".join(tool["function"]["name"] for tool in tools or ())
            return [*range(len(messages)), *self.encode(names)]

    lines = {"messages": [USER]}, {"prompt": "a"}, {"turns": ["a", "b"]}
    for line in lines:
        (prompt,) = read(tokenizer=Tokenizer, file=jsonl({**line, "tools": TOOLS}), chat=None)
        assert prompt.ids == (0, ord("f"))
    later = prompts.continued(prompt, 1, prompt.messages, "b", Tokenizer(), vocab_size=VOCAB_SIZE)
    assert later.ids == (0, 1, 2, ord("f"))


@pytest.mark.parametrize("name", ["tools", "documents"])
def test_variables_of_a_line_are_never_dropped(jsonl, name):
    class Tokenizer(BytesTokenizer):
        def encode_chat(self, messages, **variables):
            return super().encode_chat(messages)

    line = {"messages": [USER], name: TOOLS}
    message = f"prompts.jsonl:1: {name}: the chat template does not render this field"
    assert failure(tokenizer=Tokenizer, file=jsonl(line)) == message
    message = f"prompts.jsonl:1: {name}: only chat templates render this field"
    assert failure(file=jsonl({"prompt": "a", name: TOOLS})) == message
    assert read(file=jsonl({"prompt_ids": [1], name: TOOLS}))[0].ids == (1,)


def test_calls_without_content_are_messages_of_a_prompt(jsonl):
    class Tokenizer(BytesTokenizer):
        def encode_chat(self, messages):
            return [len(message.get("tool_calls", ())) for message in messages]

    result = {"role": "tool", "content": "r"}
    for call in CALL, {key: CALL[key] for key in ("role", "tool_calls")}:
        file = jsonl({"messages": [USER, call, result, ANSWER]})
        (prompt,) = read(tokenizer=Tokenizer, file=file)
        assert prompt.ids == (0, 1, 0)


def test_a_conversation_of_answers_alone_asks_nothing(jsonl):
    assert "expected a question, not answers alone" in failure(file=jsonl({"messages": [ANSWER]}))


def test_special_tokens_in_text_are_read_where_asked_for(jsonl):
    assert read(text=("a|",))[0].ids == (97, 124)
    assert read(text=("a|",), special_tokens=True)[0].ids == (97, 257)
    assert read(stdin="a|\n", special_tokens=True)[0].ids == (97, 257)
    assert read(text=("|",), chat=True, special_tokens=True)[0].ids == (256, ord("u"), 124)


def test_file_of_every_kind(jsonl):
    messages = [{"role": "system", "content": ""}, {"role": "user", "content": "hé"}]
    ids = b'\t{"prompt_ids": [5, 0, 299]}\r'
    text = {"prompt": "ab", "id": "gsm8k/7", "answer": 3}
    found = read(file=jsonl(text, b"", ids, {"messages": messages}))
    chat = (256, ord("s"), 256, ord("u"), *"hé".encode())
    assert [p.ids for p in found] == [(97, 98), (5, 0, 299), chat]
    assert [p.index for p in found] == [0, 1, 2]
    assert [p.source for p in found] == [f"prompts.jsonl:{line}" for line in (1, 3, 4)]
    assert [p.text for p in found] == ["ab", None, None]
    assert found[2].messages == tuple(messages)


def test_token_ids_are_never_wrapped_as_chat(jsonl):
    assert read(file=jsonl({"prompt_ids": [1, 2]}), chat=True)[0].ids == (1, 2)


def test_byte_order_mark_and_line_separators_inside_text(jsonl):
    line = b'\xef\xbb\xbf{"prompt": "a\xe2\x80\xa8b"}'
    assert read(file=jsonl(line))[0].text == "a\u2028b"


def test_stdin_is_one_prompt_a_line():
    found = read(stdin="one\n\n two \nthree")
    shown = [(p.text, p.source) for p in found]
    assert shown == [("one", "stdin:1"), (" two ", "stdin:3"), ("three", "stdin:4")]


def test_stdin_of_bytes_names_the_undecodable_line():
    stdin = io.TextIOWrapper(io.BytesIO(b"fine\nh\xff\n"), encoding="utf-8")
    assert failure(stdin=stdin) == "stdin:2: not UTF-8: byte 0xff at column 2"


def test_stdin_is_left_alone_when_the_config_has_prompts():
    stdin = io.StringIO("unread\n")
    read(text=("ab",), stdin=stdin)
    assert stdin.tell() == 0


def test_hint_on_a_terminal_only(capsys):
    read(stdin="a\n")
    assert capsys.readouterr().err == ""
    read(stdin=Terminal("a\n"))
    captured = capsys.readouterr()
    assert captured.err == "reading prompts, one per line; press Ctrl-D to finish\n"
    assert captured.out == ""


def test_token_ids_need_no_tokenizer(jsonl):
    assert read(file=jsonl({"prompt_ids": [1]}), tokenizer=None)[0].ids == (1,)
    assert failure(file=jsonl({"prompt_ids": [1]}, {"prompt": "a"}), tokenizer=None) == (
        "prompts.jsonl:2: text needs a tokenizer and the target has none: give prompt_ids"
    )


KEYS = "prompt, messages, turns, prompt_ids"
TEXTS = "not supported, only texts; remove the field"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"prompt": "a"', "not JSON: Expecting ',' delimiter at column 15"),
        (b"prompt", "not JSON: Expecting value at column 1"),
        (b'{"prompt": "\xff"}', "not UTF-8: byte 0xff at column 13"),
        (b'"ab"', 'expected a JSON object, not "ab"'),
        ([1], "expected a JSON object, not [1]"),
        ({}, f"expected exactly one of {KEYS}; found none of them"),
        ({"prompt": "a", "prompt_ids": [1]},
         f"expected exactly one of {KEYS}; found prompt and prompt_ids"),
        ({"prompt": 3}, "prompt: expected a string, not 3"),
        ({"prompt": ""}, "empty prompt"),
        (b'{"prompt": "a\\ud800"}', "prompt: \\ud800 is an unpaired surrogate"),
        ({"messages": "hi"}, 'messages: expected a list, not "hi"'),
        ({"messages": []}, "empty prompt: no messages"),
        ({"messages": ["hi"]}, 'messages[0]: expected an object, not "hi"'),
        ({"messages": [{"role": "user"}]}, "messages[0]: no content"),
        ({"messages": [{"content": "a"}]}, "messages[0]: no role"),
        ({"messages": [{"role": "user", "content": "a" * 99}, {"role": 1, "content": ""}]},
         "messages[1].role: expected a string, not 1"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": ["x" * 99]}]}]},
         'messages[0].content: expected a string, not [{"type": "text", "text": ["' + "x" * 32
         + "…"),
        ({"messages": [USER, ANSWER | {"thinking": 1}, USER]},
         "messages[1].reasoning_content: expected a string, not 1"),
        ({"messages": [USER, ANSWER | {"tool_calls": ["f"]}, USER]},
         'messages[1].tool_calls: expected a list of objects, not ["f"]'),
        ({"messages": [USER, ANSWER | {"tool_calls": [{"function": "f"}]}, USER]},
         'messages[1].tool_calls[0].function: expected an object, not "f"'),
        ({"messages": [USER, ANSWER | {"tool_calls": [{"function": {"arguments": "[]"}}]}, USER]},
         "messages[1].tool_calls[0].function.arguments: expected a JSON object, not []"),
        ({"prompt": "a", "images": ["x.png"]}, f"images: {TEXTS}"),
        ({"messages": [USER | {"images": ["x"]}]}, f"messages[0].images: {TEXTS}"),
        ({"messages": [USER | {"content": [{"type": "text", "text": "a"}, {"type": "image"}]}]},
         'messages[0].content[1]: "image" is not supported, only texts'),
        ({"prompt_ids": 3}, "prompt_ids: expected a list, not 3"),
        ({"prompt_ids": []}, "empty prompt: no prompt_ids"),
        ({"prompt_ids": [1, 2.0]}, "prompt_ids[1]: expected an integer, not 2.0"),
        ({"prompt_ids": [True]}, "prompt_ids[0]: expected an integer, not true"),
        ({"prompt_ids": [1, 300]}, "token id 300 (position 1) is out of the vocabulary (size 300)"),
        ({"prompt_ids": [-1]}, "token id -1 (position 0) is out of the vocabulary (size 300)"),
    ],
)  # fmt: skip
def test_a_bad_line_is_named(jsonl, line, message):
    assert failure(file=jsonl({"prompt": "a"}, b"", line)) == f"prompts.jsonl:3: {message}"


@pytest.mark.parametrize("number", [b"NaN", b"-Infinity", b"1e999"])
def test_numbers_that_are_not_finite_are_named(jsonl, number):
    """Python accepts non-finite numbers in JSON, unlike other readers of the outputs."""
    user = b'{"role": "user", "content": "a", "score": 1.5}'
    line = b'{"messages": [%b, %b]}' % (user, user.replace(b"1.5", number))
    message = f"prompts.jsonl:2: messages[1].score: {number.decode()} is not a valid JSON number"
    assert failure(file=jsonl({"prompt": "NaN"}, line)) == message


@pytest.mark.parametrize(
    "line", ['{"a":1e999', '{"a":1e999,"a":1}', '{"prompt":"a","seed":184e440737[1}', '{"a":NaN,']
)
def test_numbers_that_are_not_finite_beside_other_faults(line):
    with pytest.raises(errors.InputError, match="is not a valid JSON number"):
        parse_json(line)


def test_memory_of_a_check_is_that_of_the_line():
    """Places of nested values are not built unless they are reported."""
    for inner in ("[]", '{"b":1e5}'):
        line = '{"' + "k" * 4000 + '":[' + ",".join([inner] * 5000) + "]}"
        tracemalloc.start()
        parse_json(line)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 4 * 2**20


def test_a_quotation_costs_no_more_than_it_shows():
    value = [0] * 10**6
    tracemalloc.start()
    assert quote(value) == "[" + "0, " * 19 + "0,…"
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**16


def test_json_beyond_the_parser_is_one_line(jsonl):
    deep = (
        b'{"messages": [{"role": "user", "content": "a", "x": ' + b"[" * 120 + b"]" * 120 + b"}]}"
    )
    message = failure(file=jsonl(deep))
    assert message.startswith("prompts.jsonl:1: messages[0].x[0][0]")
    assert message.endswith("…: nested too deep")
    assert read(file=jsonl({"prompt": "[" * 200}))[0].text == "[" * 200
    for line in (b"[" * 100_000, b'{"prompt_ids": [' + b"9" * 5000 + b"]}"):
        message = failure(file=jsonl(line))
        assert message.startswith("prompts.jsonl:1: not usable JSON: ")
        assert "\n" not in message


def test_all_bad_lines_are_reported_together(jsonl):
    file = jsonl({"prompt": ""}, {"prompt": "fine"}, {"prompt": 1})
    assert failure(file=file) == (
        "prompts.jsonl:1: empty prompt\nprompts.jsonl:3: prompt: expected a string, not 1"
    )


def test_many_bad_lines_are_counted(jsonl):
    lines = failure(file=jsonl(*[{"prompt": ""}] * 12)).split("\n")
    assert lines[:10] == [f"prompts.jsonl:{line}: empty prompt" for line in range(1, 11)]
    assert lines[10:] == ["prompts.jsonl: 2 more unusable prompts (12 in all)"]
    assert len(failure(file=jsonl(*[{"prompt": ""}] * 10)).split("\n")) == 10


def test_a_tokenizer_of_another_target():
    assert failure(text=("\u00ff",), vocab_size=100) == (
        "prompts.text[0]: the tokenizer does not fit the target: "
        "token id 195 (position 0) is out of the vocabulary (size 100)"
    )


def test_text_without_tokens():
    class Silent(BytesTokenizer):
        def encode(self, text, *, special_tokens=False):
            return []

    message = "prompts.text[0]: empty prompt: the text has no tokens"
    assert failure(text=("\u200b",), tokenizer=Silent) == message


def test_tokenizer_errors_name_the_line(jsonl):
    class Strict(BytesTokenizer):
        def encode_chat(self, messages):
            raise errors.InputError("roles must alternate")

    file = jsonl({"messages": [{"role": "user", "content": "a"}]})
    assert failure(file=file, tokenizer=Strict) == "prompts.jsonl:1: roles must alternate"


def test_nothing_to_read(jsonl, tmp_path):
    assert failure(file=jsonl()) == "prompts.jsonl: no prompts found"
    assert failure(file=jsonl(b"", b"  ")) == "prompts.jsonl: no prompts found"
    assert failure(stdin="") == "stdin: no prompts found"
    message = "absent.jsonl: cannot be read: No such file or directory"
    assert failure(file="absent.jsonl") == message
    assert failure(file=str(tmp_path)) == f"{tmp_path}: cannot be read: Is a directory"


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), min_size=1))
def test_any_text_survives_a_file(tmp_path_factory, texts):
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    # Unescaped, so that the file itself holds every odd separator that Unicode has.
    lines = [json.dumps({"prompt": text}, ensure_ascii=False) for text in texts]
    path.write_text("\n".join(lines), encoding="utf-8", newline="\n")
    assert [p.text for p in read(file=str(path))] == texts


@given(st.binary(max_size=200))
def test_any_bytes_are_prompts_or_plain_errors(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_bytes(data)
    with pytest.raises(errors.InputError) as caught:
        read(file=str(path))
    assert all(line.startswith(str(path)) for line in str(caught.value).split("\n"))


def test_turns_are_asked_one_after_the_other(jsonl):
    file = jsonl({"turns": ["a", "b", "c"], "category": "x"}, {"prompt": "d"}, {"turns": ["e"]})
    first, second, third = read(file=file)
    assert first.messages == ({"role": "user", "content": "a"},)
    assert [list(prompt.indices) for prompt in (first, second, third)] == [[0, 1, 2], [3], [4]]
    assert (first.later_turns, second.later_turns, third.later_turns) == (("b", "c"), (), ())
    words, options = BytesTokenizer(), {"vocab_size": VOCAB_SIZE}
    again = prompts.continued(first, 1, first.messages, "é\ud800", words, **options)
    assert (again.index, again.source) == (1, "prompts.jsonl:1, turn 2")
    said = [("user", "a"), ("assistant", "é?"), ("user", "b")]
    assert [(m["role"], m["content"]) for m in again.messages] == said
    assert list(again.ids) == words.encode_chat(again.messages)
    last = prompts.continued(first, 2, again.messages, "!", words, **options)
    assert (last.index, len(last.messages), last.messages[-1]["content"]) == (2, 5, "c")


@pytest.mark.parametrize(
    ("turns", "message"),
    [
        ("a", 'turns: expected a list of texts, not "a"'),
        ([], "turns: expected a list of texts, not []"),
        (["a", ""], "empty turns[1]"),
        (["a", 1], "turns[1]: expected a string, not 1"),
    ],
)
def test_bad_turns_are_named(jsonl, turns, message):
    assert failure(file=jsonl({"turns": turns})) == f"prompts.jsonl:1: {message}"
