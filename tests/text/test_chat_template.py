"""Tests of the sources, variables and errors of chat templates."""

import copy
import datetime
import functools
import itertools
import json

import pytest
from support import llama_cpp
from support.trained_tokenizers import MESSAGES, failure, train_byte_level, write_json

from dflash.data import files
from dflash.serving import bodies, validation
from dflash.text import chat_template, jsonl, tokenizer_loading
from dflash.text.tokenizer_loading import load_tokenizer

USER = {"role": "user", "content": "a"}
DATE = datetime.date(2024, 2, 29)


def test_template_file_goes_before_the_config(tmp_path):
    train_byte_level(tmp_path)
    write_json(tmp_path / "tokenizer_config.json", {"chat_template": "config"})
    (tmp_path / "chat_template.jinja").write_text("file")
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.decode(tokenizer.encode_chat(MESSAGES)) == "file"


@pytest.mark.parametrize("default", ["file", None])
@pytest.mark.parametrize("tool_use", ["tools", None])
def test_templates_in_files_replace_those_of_the_config(tmp_path, default, tool_use):
    train_byte_level(tmp_path)
    named = [{"name": "tool_use", "template": "config, tools"}]
    named.append({"name": "default", "template": "config"})
    write_json(tmp_path / "tokenizer_config.json", {"chat_template": named})
    (tmp_path / "additional_chat_templates").mkdir()
    if default:
        (tmp_path / "chat_template.jinja").write_text(default)
    if tool_use:
        (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text(tool_use)
    transformers = pytest.importorskip("transformers")
    reference = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    template = chat_template.ChatTemplate(tmp_path, {}, DATE)
    for tools in [None, [{"type": "function", "function": {"name": "f"}}]]:
        if default or not tool_use:
            expected = reference.apply_chat_template(MESSAGES, tools=tools, tokenize=False)
            assert template.render(MESSAGES, tools=tools) == expected
    assert template.exists == bool(default or not tool_use)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ messages[0] | tojson }}", '{"role": "system", "content": "Be brief."}'),
        ("{% generation %}a{{ messages | length }}{% endgeneration %}b", "a2b"),
        ("{% for m in messages %}{{ m.role }}{% break %}{% endfor %}", "system"),
        ("{% if true %}\n    x\n{% endif %}", "    x\n"),
        ("{{ tools is none and documents is none and other is undefined }}", "True"),
        ("{{ strftime_now('%d %b %Y %H:%M') }}", "29 Feb 2024 00:00"),
    ],
)
def test_what_templates_may_use(tmp_path, template, expected):
    (tmp_path / "chat_template.jinja").write_text(template)
    assert chat_template.ChatTemplate(tmp_path, {}, DATE).render(MESSAGES) == expected


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('Start with a user.') }}", "Start with a user."),
        ("{% if %}", "Expected an expression, got 'end of statement block'"),
        ("{{ messages[0].content + 1 }}", 'TypeError: can only concatenate str (not "int") to str'),
        ("{{ 1 / 0 }}", "ZeroDivisionError: division by zero"),
        ("{{ 2.0**100**100 }}", "OverflowError: "),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
         "RecursionError: maximum recursion depth exceeded"),
        ("{{ " + "(" * 10_000 + "1" + ")" * 10_000 + " }}",
         "RecursionError: maximum recursion depth exceeded"),
        ("{{ ''.__class__.mro() }}", "access to attribute '__class__' of 'str' object is unsafe."),
    ],
)  # fmt: skip
def test_template_that_fails(tmp_path, template, reason):
    path = tmp_path / "chat_template.jinja"
    path.write_text(template)
    message = failure(chat_template.ChatTemplate(tmp_path, {}, DATE).render, MESSAGES)
    assert message.startswith(f"{path}: chat template fails: {reason}")


def test_template_that_is_not_text(tmp_path):
    path = tmp_path / "chat_template.jinja"
    path.write_bytes(b"a\xff")
    render = chat_template.ChatTemplate(tmp_path, {}, DATE).render
    assert failure(render, MESSAGES) == f"{path}: not UTF-8: byte 0xff at offset 1"
    path.unlink()
    path.mkdir()
    assert failure(render, MESSAGES) == f"{path}: cannot be read: Is a directory"


@pytest.mark.parametrize(
    "templates", [5, [], ["plain"], [{"name": "tool_use", "template": "x"}], [{"name": "default"}]]
)
def test_template_of_an_unknown_form(tmp_path, templates):
    write_json(tmp_path / "tokenizer_config.json", {"chat_template": templates})
    render = chat_template.ChatTemplate(tmp_path, {}, DATE).render
    assert failure(render, MESSAGES).startswith(f"{tmp_path}: no chat template (")


def test_the_date_is_that_of_the_run(tmp_path):
    """A run that is resumed the next day, or begins around midnight, has one date throughout."""
    train_byte_level(tmp_path)
    path = tmp_path / "chat_template.jinja"
    path.write_text("{{ strftime_now('%d %b %Y') }}")
    days = [datetime.date(2024, 12, 31), datetime.date(2025, 1, 1)]
    first, second = (load_tokenizer(tmp_path, date=day) for day in days)
    assert first.render_chat(MESSAGES) == "31 Dec 2024"
    assert second.render_chat(MESSAGES) == "01 Jan 2025"
    assert first.fingerprint != second.fingerprint
    today = load_tokenizer(tmp_path)
    assert today.render_chat(MESSAGES)[-4:] >= "2025"
    path.write_text("no date")
    first, second = (load_tokenizer(tmp_path, date=day) for day in days)
    assert first.fingerprint == second.fingerprint


@pytest.mark.parametrize(
    ("further", "expected"),
    [
        ({}, {"bos_token": "<map>", "eos_token": "<map>", "pad_token": "<pad>"}),
        ({"added_tokens_decoder": {}}, {"bos_token": "<config>", "pad_token": "<pad>"}),
    ],
)
def test_the_map_of_special_tokens_counts_as_in_transformers(tmp_path, further, expected):
    """It precedes the config, and is not read beside added_tokens_decoder."""
    write_json(tmp_path / "special_tokens_map.json", {"bos_token": "<map>", "eos_token": "<map>"})
    config = {"bos_token": "<config>", "pad_token": {"content": "<pad>"}, "unk_token": None}
    write_json(tmp_path / "tokenizer_config.json", config | further)
    assert chat_template.special_tokens(tmp_path) == expected


def test_lists_of_special_tokens_are_joined(tmp_path):
    write_json(tmp_path / "special_tokens_map.json", {"extra_special_tokens": ["<b>"]})
    write_json(tmp_path / "tokenizer_config.json", {"extra_special_tokens": ["<a>"]})
    assert chat_template.named_tokens(tmp_path) == {"extra_special_tokens": ["<a>", "<b>"]}


def with_template(directory, template: str):
    """Returns a tokenizer that has this chat template."""
    train_byte_level(directory)
    (directory / "chat_template.jinja").write_text(template)
    return load_tokenizer(directory)


def routes(messages, tokenizer):
    """Renders a conversation that ends with an answer as each route to a template does."""
    body = validation.parse(bodies.ChatBody, {"messages": messages})
    http = [message.for_template() for message in body.messages]
    prompt = jsonl.check_messages(messages)
    example = files.example_of({"messages": messages}).messages
    for normalized in (http, prompt, example, messages):
        yield tokenizer.render_chat(normalized, add_generation_prompt=False)


OBJECT = "{% for c in m.tool_calls or [] %}({{ c.function.arguments | tojson }}){% endfor %}"
REASONING = "{% if m.NAME is defined %}[{{ m.NAME }}]{% endif %}{{ m.content }}"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% if '</think>' in m.content %}!{% endif %}" + OBJECT, '({"x": "é"})'),
        ("{% if m.content is defined %}{{ m.content }}{% endif %}" + OBJECT, '({"x": "é"})'),
        ("{% for c in m.tool_calls or [] %}{% for k, v in c.function.arguments | items %}"
         "{{ k }}={{ v }}{% endfor %}{% endfor %}", "x=é"),
        ("{% for c in m.tool_calls or [] %}{{ '(' + c.function.arguments + ')' }}{% endfor %}",
         '({"x": "é"})'),
        ("{% for c in m.tool_calls or [] %}({{ c.function.arguments }}){% endfor %}",
         '({"x": "é"})'),
        ("{% if m.content is none %}{% for c in m.tool_calls %}{{ c['function']['arguments'] + '!' "
         "}}{% endfor %}{% else %}{{ m.content }}{% endif %}", '{"x": "é"}!'),
    ],
)  # fmt: skip
@pytest.mark.parametrize("arguments", ['{"x": "é"}', {"x": "é"}], ids=["text", "object"])
@pytest.mark.parametrize("content", [None, "", [], "absent"])
def test_calls_have_the_form_that_the_template_renders(
    tmp_path, template, expected, arguments, content
):
    loop = "{% for m in messages if m.role == 'assistant' %}" + template + "{% endfor %}"
    tokenizer = with_template(tmp_path, loop)
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    answer = {"role": "assistant", "tool_calls": [call]}
    answer |= {} if content == "absent" else {"content": content}
    messages = [{"role": "user", "content": "a"}, answer]
    assert [*routes(messages, tokenizer)] == [expected] * 4


@pytest.mark.parametrize("name", jsonl.REASONING_FIELDS)
@pytest.mark.parametrize("read", jsonl.REASONING_FIELDS)
@pytest.mark.parametrize("content", [None, "b"])
def test_reasoning_has_the_name_that_the_template_reads(tmp_path, name, read, content):
    loop = "{% for m in messages %}" + REASONING.replace("NAME", read) + "{% endfor %}"
    messages = [USER, {"role": "assistant", "content": content, name: "why"}]
    rendered = [*routes(messages, with_template(tmp_path, loop))]
    assert rendered == [f"a[why]{content or ''}"] * 4


def test_reasoning_is_a_part_of_the_content_where_the_template_reads_it_there(tmp_path):
    """As those of Mistral's do."""
    tokenizer = with_template(
        tmp_path,
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for part in m.content %}{% if part.type == 'thinking' %}[{{ part.thinking }}]"
        "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}",
    )
    answers = ({"role": "assistant", "content": text, "reasoning": "why"} for text in ("b", None))
    texts = [[*routes([USER, answer], tokenizer)] for answer in answers]
    assert texts == [["a[why]b"] * 4, ["a[why]"] * 4]


def test_reasoning_gives_way_to_a_text_where_the_template_takes_one_of_them(tmp_path):
    """As that of gpt-oss does beside calls; it renders both of a last answer without calls."""
    tokenizer = with_template(
        tmp_path,
        "{% for m in messages %}{% if m.tool_calls and m.content and m.thinking %}"
        "{{ raise_exception('both') }}{% endif %}{{ m.thinking }}{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}"
        "{% endfor %}",
    )
    call = {"type": "function", "function": {"name": "f"}}
    answer = {"role": "assistant", "content": "b", "reasoning_content": "why"}
    texts = [
        [*routes([USER, {**answer, **fields}], tokenizer)]
        for fields in ({}, {"tool_calls": [call]}, {"tool_calls": [call], "content": None})
    ]
    assert texts == [[text] * 4 for text in ("awhyb", "ab{}", "awhy{}")]


def test_ids_are_short_where_the_template_demands_it(tmp_path):
    """As those of Mistral's do, up to tokenizer v11."""
    tokenizer = with_template(
        tmp_path,
        "{% macro id(x) %}{{ x if x | length == 9 else raise_exception('nine') }}{% endmacro %}"
        "{% for m in messages %}{% for c in m.tool_calls or [] %}[{{ id(c.id) }}"
        "{{ c.function.arguments | tojson }}]{% endfor %}"
        "{% if m.role == 'tool' %}({{ id(m.tool_call_id) }}){% endif %}{% endfor %}",
    )
    for id, short in (("call_0123456789", "ab14600fc"), ("a1B2c3D4e", "a1B2c3D4e")):
        call = {"id": id, "type": "function", "function": {"name": "f"}}
        answer = {"role": "assistant", "content": None, "tool_calls": [call]}
        messages = [USER, answer, {"role": "tool", "tool_call_id": id, "content": "b"}]
        text = f"[{short}{{}}]({short})"
        assert [tokenizer.render_chat(messages, add_generation_prompt=False)] == [text]


def test_results_are_inside_of_answers_where_the_template_reads_them_there(tmp_path):
    """As Gemma 4's first one does; a later one reads either form."""
    tokenizer = with_template(
        tmp_path,
        "{% for m in messages %}{{ m.role }}:{{ m.content }}{% for c in m.tool_calls or [] %}"
        "{{ c.function.arguments | tojson }}{% endfor %}{% for r in m.tool_responses or [] %}"
        "[{{ r.name }}={{ r.response }}]{% endfor %};{% endfor %}",
    )
    calls = [{"id": id, "type": "function", "function": {"name": id}} for id in ("f", "g")]
    answer = {"role": "assistant", "content": None, "tool_calls": calls}
    results = [{"role": "tool", "tool_call_id": id, "content": id * 2} for id in ("g", "f")]
    rendered = tokenizer.render_chat([USER, answer, *results, USER])
    assert rendered == "user:a;assistant:{}{}[g=gg][f=ff];user:a;"


@pytest.mark.parametrize(
    ("known", "rendered"),
    [("'user', 'developer'", "developer:b;user:a;"), ("'user', 'system'", "system:b;user:a;")],
)
def test_developers_are_systems_where_the_template_does_not_know_them(tmp_path, known, rendered):
    """As those of Qwen3.5 and DeepSeek do not."""
    for other in ("{{ raise_exception('role') }}", ""):
        template = (
            f"{{% for m in messages %}}{{% if m.role in [{known}] %}}{{{{ m.role }}}}:"
            f"{{{{ m.content }}}};{{% else %}}{other}{{% endif %}}{{% endfor %}}"
        )
        messages = [{"role": "developer", "content": "b"}, USER]
        assert with_template(tmp_path, template).render_chat(messages) == rendered


@pytest.mark.parametrize("variable", ["enable_thinking", "thinking"])
def test_templates_read_either_name_of_the_switch(tmp_path, capsys, variable):
    """Those of Granite and DeepSeek V3.1 read `thinking`; some that always think raise."""
    train_byte_level(tmp_path)
    file = tmp_path / "chat_template.jinja"
    file.write_text(f"{{{{ {variable} if {variable} is defined else 'unset' }}}}")

    def load(thinking):
        return tokenizer_loading.for_target(tmp_path, thinking=thinking)

    tokenizers = [load(thinking) for thinking in (None, True, False)]
    assert [words.render_chat(MESSAGES) for words in tokenizers] == ["unset", "True", "False"]
    assert len({words.fingerprint for words in tokenizers}) == 3
    (tmp_path / "other").mkdir()
    train_byte_level(tmp_path / "other")
    prints = {
        tokenizer_loading.for_target(tmp_path / "other", thinking=thinking).fingerprint
        for thinking in (None, False)
    }
    assert len(prints) == 1, "a variable that no template reads changes nothing"
    kwargs = {"thinking": True}, {"enable_thinking": True}, {"reasoning_effort": "low"}
    assert {load(False).render_chat(MESSAGES, **given) for given in kwargs} == {"True"}
    assert load(None).render_chat(MESSAGES, reasoning_effort="none") == "False"
    file.write_text(
        f"{{% if {variable} is defined and not {variable} %}}{{{{ raise_exception('always') }}}}"
        "{% endif %}<think>"
    )
    assert load(None).render_chat(MESSAGES) == load(True).render_chat(MESSAGES) == "<think>"
    assert load(False).render_chat(MESSAGES, reasoning_effort="low") == "<think>"
    assert failure(load(False).render_chat, MESSAGES) == (
        f"{file}: chat template fails: always (enable_thinking is false: leave it and "
        "prompts.thinking unset)"
    )
    assert not capsys.readouterr().err


def test_a_switch_without_effect_is_one_warning(tmp_path, capsys):
    train_byte_level(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].thinking }}")
    for thinking in (None, False, True, True):
        tokenizer_loading.for_target(tmp_path, thinking=thinking)
    assert capsys.readouterr().err == (
        f"warning: thinking=true has no effect: the chat template of {tmp_path} reads neither "
        "enable_thinking nor thinking\n"
    )


# Templates that do not take the usual form of calls: JSON text, and None in place of no text.
JOINED = {
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B.jinja": None,
    "meetkai-functionary-medium-v3.2.jinja": "",
}
NO_TEXT = {"deepseek-ai-DeepSeek-R1-Distill-Qwen-32B.jinja": None, **JOINED}
PARAMETERS = {"x": {"type": "string", "description": "A number."}}
TOOL = {
    "name": "sum",
    "description": "Adds.",
    "parameters": {"type": "object", "properties": PARAMETERS, "required": ["x"]},
}
TOOLS = [{"type": "function", "function": TOOL}]
CALL = {"id": "call00001", "type": "function", "function": {"name": "sum", "arguments": {"x": "é"}}}
RESULT = {"role": "tool", "tool_call_id": "call00001", "name": "sum", "content": "3"}
CALLED = [USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}, RESULT]
TALK = [USER, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
REASONED = {"reasoning_content": "why"}
CONVERSATIONS = [
    [USER],
    TALK,
    TALK[:2],
    [{"role": "system", "content": "Be brief."}, *TALK],
    [*TALK[:1], TALK[1] | REASONED],
    [*TALK[:1], TALK[1] | REASONED, TALK[2]],
    [USER, {"role": "assistant", "content": ""} | REASONED, TALK[2]],
    CALLED,
    CALLED[:2],
    [USER, CALLED[1] | REASONED, RESULT],
    [USER, CALLED[1] | {"content": "First."}, RESULT],
    [*CALLED, TALK[1], TALK[2]],
    [USER, CALLED[1] | {"tool_calls": [CALL, CALL | {"id": "call00002"}]}, RESULT,
     RESULT | {"tool_call_id": "call00002", "content": ""}],
]  # fmt: skip


def with_joined_arguments(messages):
    """Returns the messages with arguments of calls as JSON text."""
    messages = json.loads(json.dumps(messages))
    for call in itertools.chain(*(message.get("tool_calls", ()) for message in messages)):
        call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    return messages


def with_results_inside(messages):
    """Returns the messages with the results of calls in the answers that have these."""
    written = []
    for message in messages:
        if message["role"] == "tool":
            result = {"name": message["name"], "response": message["content"]}
            written[-1].setdefault("tool_responses", []).append(result)
        else:
            written.append(message)
    return written


def in_transformers(source, name, messages, variables):
    """Renders messages as users of transformers write them; None if that fails."""
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    written = with_joined_arguments(messages) if name in JOINED else copy.deepcopy(messages)
    for message in written:
        if message.get("tool_calls") and name in NO_TEXT:
            message["content"] = message["content"] or NO_TEXT[name]
        reasoning = message.get("reasoning_content")
        if reasoning and name == "upstage-Solar-Open-100B.jinja":
            message["reasoning"] = reasoning
        if reasoning and name == "mistralai-Ministral-3-14B-Reasoning-2512.jinja":
            text = message["content"]
            message["content"] = [{"type": "thinking", "thinking": reasoning}]
            message["content"] += [{"type": "text", "text": text}] if text else []
    if name == "google-gemma-4-31B-it-interleaved.jinja":
        written = with_results_inside(written)
    try:
        rendered, _ = utils.render_jinja_template([written], chat_template=source, **variables)
    except Exception:
        return None
    return rendered[0]


def test_templates_of_many_models_render_as_in_transformers(tmp_path):
    """Also with messages as OpenAI's clients send them; a template that fails there is named."""
    file, failed = tmp_path / "chat_template.jinja", set()
    templates = llama_cpp.files("models/templates", ".jinja")
    assert len(templates) >= 70
    options = list(itertools.product((None, TOOLS), (True, False), ({}, {"enable_thinking": True})))
    for name, content in templates.items():
        file.write_bytes(content)
        template = chat_template.ChatTemplate(tmp_path, {"bos_token": "<s>"}, datetime.date.today())
        for messages, (tools, prompt, thinking) in itertools.product(CONVERSATIONS, options):
            variables = {"tools": tools, "add_generation_prompt": prompt, **thinking}
            given = {"bos_token": "<s>", **variables, **({"thinking": True} if thinking else {})}
            expected = in_transformers(content.decode(), name, messages, given)
            wire = with_joined_arguments(messages)
            wire = [message | {"content": message["content"] or None} for message in wire]
            formed = template.formed(jsonl.check_messages(wire), tools=bool(tools))
            if expected is None:
                render = functools.partial(template.render, formed, **variables)
                assert failure(render).startswith(f"{file}: ")
                failed.add(name)
            else:
                assert template.render(formed, **variables) == expected, (name, messages, variables)
    assert len(failed) < len(templates) / 3
