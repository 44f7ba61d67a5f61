"""Chat templates: where they come from, what they may use, and what is said where one fails."""

import pytest
from support.trained_tokenizers import (
    MESSAGES,
    failure,
    train_byte_level,
    train_sentencepiece,
    write_json,
)

from dflash.text import chat_template
from dflash.text import tokenizer as tokenization


def test_template_file_goes_before_the_config(tmp_path):
    train_byte_level(tmp_path)
    write_json(tmp_path / "tokenizer_config.json", {"chat_template": "config"})
    (tmp_path / "chat_template.jinja").write_text("file")
    tokenizer = tokenization.load_tokenizer(tmp_path)
    assert tokenizer.decode(tokenizer.encode_chat(MESSAGES)) == "file"


def test_named_templates(tmp_path):
    train_byte_level(tmp_path)
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    write_json(tmp_path / "tokenizer_config.json", {"chat_template": named})
    tokenizer = tokenization.load_tokenizer(tmp_path)
    assert tokenizer.decode(tokenizer.encode_chat(MESSAGES)) == "plain"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ messages[0] | tojson }}", '{"role": "system", "content": "Be brief."}'),
        ("{% generation %}a{{ messages | length }}{% endgeneration %}b", "a2b"),
        ("{% for m in messages %}{{ m.role }}{% break %}{% endfor %}", "system"),
        ("{% if true %}\n    x\n{% endif %}", "    x\n"),
        ("{{ strftime_now('%Y') | length }}", "4"),
    ],
)
def test_what_templates_may_use(tmp_path, template, expected):
    (tmp_path / "chat_template.jinja").write_text(template)
    assert chat_template.ChatTemplate(tmp_path, {}).render(MESSAGES) == expected


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('Start with a user.') }}", "Start with a user."),
        ("{% if %}", "Expected an expression, got 'end of statement block'"),
        ("{{ messages[0].content + 1 }}", 'TypeError: can only concatenate str (not "int") to str'),
        ("{{ ''.__class__.mro() }}", "access to attribute '__class__' of 'str' object is unsafe."),
    ],
)
def test_template_that_fails(tmp_path, template, reason):
    path = tmp_path / "chat_template.jinja"
    path.write_text(template)
    assert failure(chat_template.ChatTemplate(tmp_path, {}).render, MESSAGES) == (
        f"{path}: chat template fails: {reason}"
    )


@pytest.mark.parametrize("train", [train_byte_level, train_sentencepiece])
def test_no_template(tmp_path, train):
    train(tmp_path)
    tokenizer = tokenization.load_tokenizer(tmp_path)
    assert failure(tokenizer.encode_chat, MESSAGES) == (
        f"{tmp_path}: no chat template (chat_template.jinja, or chat_template in "
        "tokenizer_config.json); give plain text prompts or prompt_ids"
    )


def test_template_variables_reach_the_template(tmp_path):
    """Reasoning models' templates ask for `enable_thinking`; unset, it is undefined."""
    train_byte_level(tmp_path)
    template = "{% if enable_thinking is defined %}{{ enable_thinking }}{% else %}unset{% endif %}"
    (tmp_path / "chat_template.jinja").write_text(template)
    texts = [
        tokenization.load_tokenizer(tmp_path, **variables).render_chat(MESSAGES)
        for variables in ({}, {"enable_thinking": False}, {"enable_thinking": True})
    ]
    assert texts == ["unset", "False", "True"]
